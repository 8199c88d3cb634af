"""Conditions put to the test by running the functions, and what those functions cannot do."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.app import main
from headrace.reference import explained, verify
from headrace.reference.build import build
from headrace.reference.database import Catalogue
from headrace.reference.document import document
from headrace.reference.explain import explain
from headrace.reference.packages import PackageSource, directory
from headrace.reference.records import Atom, Page, Pair
from headrace.reference.running import slices

pytestmark = pytest.mark.slow

SOURCE = '''
"""A mill."""
import enum
import inspect
import os

from mill.limits import LARGEST, Mode

STONES = ("granite", "basalt")


class Odd(Exception):
    pass


class Wheel:
    width: int = 4
    mode: Mode = Mode.SLOW

    def check(self, load):
        if load is None:
            return
        if load.weight % self.width != 0:
            raise ValueError(f"{load.weight} does not fit {self.width}")
        self.turn(load)

    async def start(self, stone, *, force=False):
        await self.stop()
        if stone not in STONES and not force:
            raise Odd(f"no stone is called {stone}")
        return stone

    def speed(self):
        if self.mode is Mode.FAST and not available():
            raise RuntimeError("fast is not available")
        return self.mode


def large(n):
    if n > LARGEST:
        raise ValueError(f"{n} is too large")
    numbers = [n]
    return numbers[7]


def options(data):
    if isinstance(data, dict) and data.get("speed") and data.get("mode") == "slow":
        raise ValueError("slow has no speed")


def parsed(text):
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"no number: {text}") from error


def some(sacks):
    for sack in sacks:
        if sack < 0:
            raise ValueError(f"a sack of {sack}")


def hangs(n):
    while n is not None:
        pass
    if n is None:
        raise ValueError("never")


def hangs_for_good(n):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
    if n > 3:
        raise ValueError("never, never")


def ends_the_process(n):
    inspect.os._exit(0)
    if n > 3:
        raise ValueError("not after that")


def calls(n):
    connection = inspect.importlib.import_module("socket").create_connection(("127.0.0.1", PORT))
    if n > 3:
        raise ValueError(f"sent {n}")


def starts(n):
    inspect.os.system("true")
    if n > 3:
        raise ValueError(f"started {n}")


def writes_outside(n):
    inspect.os.open("OUTSIDE", inspect.os.O_CREAT | inspect.os.O_WRONLY)
    if n > 3:
        raise ValueError(f"wrote {n}")


def writes_inside(n):
    inspect.os.close(inspect.os.open("here.txt", inspect.os.O_CREAT | inspect.os.O_WRONLY))
    if n > 3:
        raise ValueError(f"noted {n}")


def gathers(sacks, most):
    full = []
    for sack in sacks:
        full.append(sack)
    if len(full) > most:
        raise ValueError("too many sacks")


MADE = None


def remembers(late):
    global MADE
    if MADE is None:
        if late:
            raise ValueError("it is too late to make one")
        MADE = Wheel()


def sets_first(wheel):
    wheel.width = wheel.width or 4
    if wheel.width > 64:
        raise ValueError(f"{wheel.width} is too wide")


def keywords(*names, **options):
    if not names and options.get("width") is None:
        raise ValueError("width is needed")


def wrong(data):
    if data["n"] > 3:
        data.__setitem__("n", 0)
        if data["n"] > 2:
            raise ValueError("this is not reached")
'''
LIMITS = "import enum\nLARGEST = 2 * 8\n\n\nclass Mode(str, enum.Enum):\n    SLOW = 'slow'\n    FAST = 'fast'\n"


@pytest.fixture(scope="module")
def listener() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory, listener: socket.socket) -> PackageSource:
    folder = tmp_path_factory.mktemp("mill")
    package = folder / "mill"
    package.mkdir()
    outside = folder / "outside.txt"
    text = SOURCE.replace("PORT", str(listener.getsockname()[1])).replace("OUTSIDE", str(outside))
    (package / "__init__.py").write_text(text)
    (package / "limits.py").write_text(LIMITS)
    (package / "other.py").write_text("def other(n):\n    if n > 3:\n        raise ValueError(f'{n} is another')\n")
    return directory(folder, package="mill")


@pytest.fixture(scope="module")
def plain(mill: PackageSource) -> list[Page]:
    """The pages of a build that runs nothing."""
    with Catalogue.open(build(mill, path=mill.root / "plain" / "mill.sqlite")) as catalogue:
        assert catalogue.tried == {}
        return list(catalogue.pages())


@pytest.fixture(scope="module")
def outcomes(mill: PackageSource, plain: list[Page]) -> dict[str, verify.Outcome]:
    """By function."""
    sites = [site for page in plain for site in page.sites]
    assert all(site.condition.complete for site in sites)
    progress: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "SITE_SECONDS", 4.0)
        found = verify.verify(mill, sites, lambda done, total: progress.append((done, total)))
    assert progress == [(number, len(sites)) for number in range(1, len(sites) + 1)]
    return {key[2]: outcome for key, outcome in found.items()}


@pytest.mark.parametrize(
    ("function", "pair"),
    [
        ("large", Pair((("n", "17"),), (("n", "16"),), "goes on")),
        ("Wheel.start", Pair((("stone", "'x'"), ("force", "False")), (("force", "True"),), "returns")),
        ("parsed", Pair((("text", "'x'"),), (("text", "1"),), "returns")),
    ],
)
def test_values_that_raise_and_values_that_do_not(
    outcomes: dict[str, verify.Outcome], function: str, pair: Pair
) -> None:
    assert outcomes[function] == verify.Outcome("verified", pair=pair)


@pytest.mark.parametrize(
    "function",
    ["Wheel.check", "Wheel.speed", "options", "some", "writes_inside", "other", "remembers", "keywords", "sets_first"],
)
def test_what_can_be_run_is_verified(outcomes: dict[str, verify.Outcome], function: str) -> None:
    outcome = outcomes[function]
    assert outcome.verdict == "verified", outcome
    assert outcome.pair is not None
    assert outcome.pair.before
    assert outcome.pair.after


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("hangs_for_good", "it hung, or ended its process"),
        ("ends_the_process", "it hung, or ended its process"),
        ("calls", "asked for open "),
        ("starts", "asked for os.system b'true'"),
        ("writes_outside", "asked for open "),
    ],
)
def test_what_a_function_may_not(outcomes: dict[str, verify.Outcome], function: str, why: str) -> None:
    assert outcomes[function].verdict == "not run"
    assert outcomes[function].why.startswith(why)


def test_nothing_got_out(outcomes: dict[str, verify.Outcome], mill: PackageSource, listener: socket.socket) -> None:
    assert outcomes
    assert not (mill.root / "outside.txt").exists()
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_condition_that_its_own_values_refute(outcomes: dict[str, verify.Outcome], plain: list[Page]) -> None:
    assert outcomes["wrong"].verdict == "refuted"
    sites = {site.qualname: site for page in plain for site in page.sites}
    by_key = {verify.key_of(sites[name]): outcome for name, outcome in outcomes.items()}
    after = {site.qualname: site for page in verify.with_outcomes(plain, by_key) for site in page.sites}
    assert after["wrong"].condition == replace(
        sites["wrong"].condition, complete=False, incomplete="run with values that meet it, the function did not raise"
    )
    assert after["wrong"].pair is None
    assert after["large"].condition == sites["large"].condition
    assert after["large"].pair == outcomes["large"].pair
    assert after["calls"] == sites["calls"]


def test_what_cannot_be_followed_refutes_nothing(outcomes: dict[str, verify.Outcome]) -> None:
    assert {name for name, outcome in outcomes.items() if outcome.verdict == "refuted"} == {"wrong"}
    assert outcomes["gathers"].verdict == "not run"
    assert outcomes["gathers"].why.endswith("(what it reads is computed on the way)")


def test_a_condition_that_lacks_a_test(mill: PackageSource, plain: list[Page]) -> None:
    site = next(site for page in plain for site in page.sites if site.qualname == "options")
    lacking = replace(site, condition=replace(site.condition, atoms=site.condition.atoms[:2]))
    (outcome,) = verify.verify(mill, [lacking]).values()
    assert outcome.verdict == "refuted"
    opposite = replace(site, condition=replace(site.condition, atoms=(Atom("not isinstance(data, dict)", 1),)))
    (outcome,) = verify.verify(mill, [opposite]).values()
    assert (outcome.verdict, outcome.pair) == ("refuted", None)


def test_an_error_of_another_text_or_class_is_not_this_one(mill: PackageSource, plain: list[Page]) -> None:
    site = next(site for page in plain for site in page.sites if site.qualname == "other")
    for changed in (replace(site, templates=(("something else",),)), replace(site, error_class="TypeError")):
        (outcome,) = verify.verify(mill, [changed]).values()
        assert outcome.verdict != "verified"


# --- what is kept ---------------------------------------------------------------------------------------------------


def _pairs(path: Path) -> dict[str, Pair | None]:
    with Catalogue.open(path) as catalogue:
        return {site.qualname: site.pair for page in catalogue.pages() for site in page.sites}


def test_a_build_keeps_what_was_shown_about_files_that_stay(tmp_path: Path) -> None:
    package = tmp_path / "mill"
    package.mkdir()
    check = "def {name}(n):\n    if n > 3:\n        raise ValueError('{name} is too large')\n"
    bad = SOURCE[SOURCE.index("def wrong") :]
    (package / "__init__.py").write_text(check.format(name="first") + "\n\n" + bad)
    (package / "second.py").write_text(check.format(name="second"))
    path = tmp_path / "mill.sqlite"
    build(directory(tmp_path, package="mill"), path=path)
    assert _pairs(path) == {"first": None, "second": None, "wrong": None}

    labels: set[str] = set()
    build(
        directory(tmp_path, package="mill"),
        path=path,
        verify=True,
        on_progress=lambda label, done, total: labels.add(label),
    )
    assert "running functions of mill 0" in labels
    pair = Pair((("n", "4"),), (("n", "3"),), "returns")
    assert _pairs(path) == {"first": pair, "second": pair, "wrong": None}
    with Catalogue.open(path) as catalogue:
        assert catalogue.tried == {"verified": 2, "refuted": 1}
        (refuted,) = (page for page in catalogue.pages() if page.sites[0].qualname == "wrong")
        assert refuted.sites[0].condition.incomplete == verify.REFUTED
        explanation = explain("ValueError: first is too large", [catalogue])
        assert explained.tried(explanation) == [
            "the function itself was run, with stand-ins for all else:",
            "with n = 4 it raises this error",
            "with n = 3 it returns",
        ]
        assert document(explanation)["verified"] == {
            "by": "running it",
            "before": "n = 4",
            "after": "n = 3",
            "ends": "returns",
            "basis": "test",
        }
        assert document(explain("ValueError: this is not reached", [catalogue]))["verified"] is None

    before = path.stat().st_mtime_ns
    build(directory(tmp_path, package="mill"), path=path, verify=True)
    assert path.stat().st_mtime_ns == before

    (package / "second.py").write_text("# moved\n" + check.format(name="second"))
    build(directory(tmp_path, package="mill"), path=path)
    assert _pairs(path) == {"first": pair, "second": None, "wrong": None}
    with Catalogue.open(path) as catalogue:
        (refuted,) = (page for page in catalogue.pages() if page.sites[0].qualname == "wrong")
        assert refuted.sites[0].condition.incomplete == verify.REFUTED


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mill").mkdir()
    (tmp_path / "mill" / "__init__.py").write_text(
        "def f(n):\n    if n > 3:\n        raise ValueError(f'{n} sacks are too many')\n"
    )
    source = ["reference", "build", "mill", "--source", str(tmp_path / "mill")]
    assert main(source) == 0
    assert "Conditions" not in capsys.readouterr().out
    assert main([*source, "--verify"]) == 0
    told = "Conditions tried by running their functions: 1 verified, 0 refuted, 0 could not be run."
    assert told in capsys.readouterr().out
    assert main(["explain", "ValueError: 7 sacks are too many", "--package", "mill"]) == 0
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "verified   the function itself was run, with stand-ins for all else:" in told
    assert "with n = 4 it raises this error" in told
    assert "with n = 3 it returns" in told


# --- the jail itself ------------------------------------------------------------------------------------------------

JAILED = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
import socket, os
from headrace.reference.running import jail
jail.lock(Path({directory!r}), 5)
try:
    {attempt}
except jail.Refused as refused:
    print("refused", refused)
except OSError as error:
    print("failed", type(error).__name__)
else:
    print("done")
"""


@pytest.mark.parametrize(
    ("attempt", "outcome"),
    [
        ("open('here.txt', 'w').close()", "done"),
        ("open('here.txt', 'wb').write(b'x' * (1 << 21))", "failed OSError"),
        ("open('/etc/hostname')", "refused open /etc/hostname"),
        ("open('../there.txt', 'w')", "refused open ../there.txt"),
        ("os.remove('here.txt')", "refused os.remove here.txt"),
        ("os.fork()", "refused os.fork"),
        ("os.kill(1, 0)", "refused os.kill 1"),
        ("socket.socket()", "refused socket.__new__"),
        ("__import__('ftplib')", "refused import ftplib"),
        ("print(os.environ.get('HOME'), end=' ')", "None done"),
    ],
)
def test_the_jail(tmp_path: Path, attempt: str, outcome: str) -> None:
    root = str(Path(verify.__file__).parents[2])
    code = JAILED.format(root=root, directory=str(tmp_path), attempt=attempt)
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert result.stdout.strip().startswith(outcome), result.stderr


# --- cutting out ----------------------------------------------------------------------------------------------------


def test_a_function_keeps_its_lines_and_loses_what_it_cannot_have() -> None:
    import ast

    source = """
        class A:
            size: int = Field(default=3, ge=1)

            @validator("x")
            async def f(self, n: Foreign = compute(), *, m=2) -> Foreign:
                x: Foreign = await n
                async for y in x:
                    pass
                return x
    """
    tree = ast.parse(textwrap.dedent(source))
    found = slices.cut(tree, "A.f", 8)
    assert found is not None
    (function,) = found.module.body
    assert ast.unparse(function).splitlines() == [
        "def function_under_test(self, n, *, m):",
        "    x = n",
        "    for y in x:",
        "        pass",
        "    return x",
    ]
    assert [statement.lineno for statement in function.body] == [7, 8, 10]
    assert {name: ast.unparse(value) if value else None for name, value in found.parameters.items()} == {
        "self": None,
        "n": "compute()",
        "m": "2",
    }
    assert ast.unparse(found.fields["size"]) == "3"
    assert slices.cut(tree, "A.f", 30) is None
