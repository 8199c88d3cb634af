"""The pages and the API of the reference, as a browser and a program ask for them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import tiny_reference
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from headrace.errors import InvalidSetting
from headrace.reference.html import ASSETS
from headrace.reference.library import Library
from headrace.server.reference import MAX_BODY_BYTES, build, looks_pasted

PASTE = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: {tiny_reference.STONE}\n'


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("mill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        tiny_reference.built(folder)
        with TestClient(build(Library()), follow_redirects=False) as client:
            yield client


@pytest.fixture(scope="module")
def error_id(client: TestClient) -> str:
    return str(client.get("/api/errors", params={"q": "stone_width multiple"}).json()["results"][0]["id"])


# --- pages ------------------------------------------------------------------------------------------------------------


def test_the_first_page(client: TestClient) -> None:
    assert client.get("/").headers["location"] == "/errors"
    page = client.get("/errors")
    assert page.status_code == 200
    assert "mill 2.0" in page.text
    for address in re.findall(r'(?:href|src)="(/[^"#]*)"', page.text):
        assert client.get(address.replace("&amp;", "&")).status_code == 200, address


def test_an_error(client: TestClient, error_id: str) -> None:
    page = client.get(f"/errors/{error_id}")
    assert page.status_code == 200
    assert "must be a multiple of" in page.text
    assert client.get(f"/errors/{error_id.upper()}").headers["location"] == f"/errors/{error_id}"


def test_an_old_id_leads_to_what_it_became(client: TestClient) -> None:
    new = client.get("/api/errors", params={"q": "stored in this place"}).json()["results"][0]["id"]
    (old,) = client.get(f"/api/errors/{new}").json()["history"]["earlier"]
    moved = client.get(f"/errors/{old['id']}")
    assert (moved.status_code, moved.headers["location"]) == (301, f"/errors/{new}")
    assert client.get(f"/api/errors/{old['id']}").json()["id"] == new


def test_an_unknown_id_names_the_nearest(client: TestClient, error_id: str) -> None:
    wrong = error_id[:-1] + ("0" if error_id[-1] != "0" else "1")
    page = client.get(f"/errors/{wrong}")
    assert page.status_code == 404
    assert f'href="/errors/{error_id}"' in page.text
    answer = client.get(f"/api/errors/{wrong}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_error_id"
    assert error_id in answer.json()["error"]["message"]


def test_our_own_errors_have_pages_without_a_reference(client: TestClient) -> None:
    assert "<h1>InvalidSetting</h1>" in client.get(f"/errors/{InvalidSetting.error_id()}").text


def test_words(client: TestClient, error_id: str) -> None:
    page = client.get("/errors", params={"q": "stone_width mult"})
    assert f"/errors/{error_id}" in page.text
    nothing = client.get("/errors", params={"q": "<script>alert(1)</script> nowhere"})
    assert nothing.status_code == 200
    assert "No error has all of these words" in nothing.text
    assert "<script>alert" not in nothing.text


def test_an_id_in_the_search_box(client: TestClient, error_id: str) -> None:
    assert client.get("/errors", params={"q": error_id}).headers["location"] == f"/errors/{error_id}"


@pytest.mark.parametrize("query", [PASTE, tiny_reference.STONE])
def test_a_paste_in_the_search_box(client: TestClient, query: str) -> None:
    page = client.get("/errors", params={"q": query})
    assert "Your message: exactly this message" in page.text
    assert page.headers["cache-control"] == "no-store"
    posted = client.post("/errors", data={"q": query})
    assert "64 % 3 != 0" in posted.text
    assert client.post("/errors", data={}).status_code == 303


def test_lists(client: TestClient) -> None:
    page = client.get("/errors", params={"package": "mill", "class": "ValueError"})
    assert "must be a multiple of" in page.text
    for wrong in ({"class": "None"}, {"page": "2"}, {"page": "x"}, {"page": "-1"}, {"page": "9" * 40}, {"page": "²"}):
        assert client.get("/errors", params={"package": "mill", **wrong}).status_code == 404
    assert client.get("/errors", params={"package": "../mill"}).status_code == 404


@pytest.mark.parametrize(
    "name", ["base.html", "../html.py", "..%2fhtml.py", "%2e%2e/html.py", "/etc/passwd", "style.css%00"]
)
def test_no_address_reaches_a_file(client: TestClient, name: str) -> None:
    answer = client.get(f"/errors/-/{name}")
    assert answer.status_code == 404
    assert "import" not in answer.text


# --- headers ----------------------------------------------------------------------------------------------------------


def test_what_a_client_has_is_not_sent_again(client: TestClient, error_id: str) -> None:
    for address in (f"/errors/{error_id}", f"/api/errors/{error_id}", "/errors", "/api/errors"):
        first = client.get(address)
        assert first.headers["cache-control"] == "no-cache"
        again = client.get(address, headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        assert client.get(address, headers={"If-None-Match": '"other"'}).status_code == 200


def test_assets_stay_for_good(client: TestClient) -> None:
    page = client.get("/errors").text
    for name, kind in ASSETS.items():
        (address,) = re.findall(rf'"(/errors/-/{re.escape(name)}\?[0-9a-f]{{16}})"', page)
        answer = client.get(address)
        assert answer.headers["content-type"] == kind
        assert "immutable" in answer.headers["cache-control"]


def test_pages_may_load_nothing_from_elsewhere(client: TestClient, error_id: str) -> None:
    headers = client.get(f"/errors/{error_id}").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


# --- the API ----------------------------------------------------------------------------------------------------------


def test_what_there_is(client: TestClient) -> None:
    (package,) = client.get("/api/errors").json()["packages"]
    assert package["name"] == "mill"


def test_limits_of_a_search(client: TestClient) -> None:
    assert len(client.get("/api/errors", params={"q": "stone", "limit": 1}).json()["results"]) == 1
    assert client.get("/api/errors", params={"q": "stone", "limit": -5}).status_code == 200
    assert client.get("/api/errors", params={"q": "stone", "limit": "many"}).status_code == 400
    assert client.get("/api/errors", params={"q": "stone", "package": "other"}).json()["results"] == []


def test_a_message_is_explained(client: TestClient, error_id: str) -> None:
    command = "mill serve --stone-width 64 -gs 3"
    answers = [
        client.get("/api/explain", params={"message": PASTE, "command": command}),
        client.post("/api/explain", json={"message": PASTE, "command": command}),
        client.post("/api/explain", content=PASTE, headers={"Content-Type": "text/plain"}),
        client.post("/api/explain", content=PASTE),
    ]
    for answer in answers:
        assert answer.status_code == 200
        assert (answer.json()["id"], answer.json()["verdict"]) == (error_id, "exact")
        assert answer.headers["cache-control"] == "no-store"
    assert [answer.json()["command"] is not None for answer in answers] == [True, True, False, False]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "malformed_body"),
        (b"[]", "malformed_body"),
        (b"{}", "invalid_field"),
        (b'{"message": 3}', "invalid_field"),
        (b'{"message": "a", "package": "b"}', "unsupported_field"),
        (b'{"message": "\\ud800"}', "malformed_body"),
    ],
)
def test_a_body_that_is_wrong(client: TestClient, body: bytes, code: str) -> None:
    answer = client.post("/api/explain", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code


def test_a_body_that_is_no_text(client: TestClient) -> None:
    assert client.post("/api/explain", content=b"\xff\xfe").status_code == 400
    assert client.post("/errors", content=b"q=%ff\xff").status_code == 200


def test_a_body_that_is_too_large(client: TestClient) -> None:
    for address in ("/api/explain", "/errors"):
        answer = client.post(address, content=b"q=" + b"x" * MAX_BODY_BYTES)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"


def test_a_route_that_is_not_there(client: TestClient) -> None:
    answer = client.get("/api/nothing")
    assert answer.status_code == 404
    assert client.get(answer.json()["error"]["doc_url"]).status_code == 200


@pytest.mark.slow
@given(st.text(max_size=80))
def test_nothing_that_is_asked_makes_it_fail(client: TestClient, text: str) -> None:
    for address in ("/errors", "/api/errors"):
        assert client.get(address, params={"q": text, "package": text, "class": text}).status_code in (
            200,
            303,
            400,
            404,
        )
    for answer in (
        client.get("/api/explain", params={"message": text, "command": text}),
        client.post("/api/explain", json={"message": text, "command": text}),
        client.post("/errors", data={"q": text}),
    ):
        assert answer.status_code in (200, 303, 400)


QUERY = st.lists(st.sampled_from([*"\"'*():^-+{}; \0", "NEAR(", " AND ", " OR ", " NOT ", "message:", "stone"]))


@pytest.mark.slow
@given(QUERY.map("".join))
def test_query_syntax_is_text(client: TestClient, query: str) -> None:
    assert client.get("/api/errors", params={"q": query}).status_code == 200
    assert client.get("/errors", params={"q": query}).status_code == 200


@pytest.mark.parametrize(
    ("text", "pasted"),
    [
        ("stone width", False),
        ("ValueError", False),
        ("ValueError: no", True),
        ("(Core pid=1) mill.errors.StoneError: no", True),
        ("one\ntwo", True),
        ("one\n", False),
        ("error: words", False),
    ],
)
def test_what_looks_like_a_paste(text: str, pasted: bool) -> None:
    assert looks_pasted(text) is pasted
