"""What must not be loaded by what: seen in a fresh interpreter, not by time."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "numpy", "safetensors", "huggingface_hub", "gguf")


def loaded_after(code: str) -> set[str]:
    return {name.partition(".")[0] for name in modules_after(code)}


def modules_after(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.__stderr__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def run_main(*args: str) -> str:
    return f"from headrace.cli.app import main\nmain({list(args)!r})"


def test_importing_the_package_loads_neither_torch_nor_pydantic() -> None:
    loaded = loaded_after("import headrace; headrace.__version__; dir(headrace)")
    assert not loaded & {*HEAVY, "pydantic", "typer", "rich"}


@pytest.mark.parametrize("args", [(), ("--help",), ("--version",), ("check", "--help")])
def test_help_loads_neither_torch_nor_pydantic_nor_rich(args: tuple[str, ...]) -> None:
    assert not loaded_after(run_main(*args)) & {*HEAVY, "rich"}


def test_help_of_the_whole_loads_no_pydantic() -> None:
    assert "pydantic" not in loaded_after(run_main("--help"))


@pytest.mark.parametrize(
    "args",
    [
        ("check",),
        ("check", "--offload-group-size", "4", "--json"),
        ("check", "--offload-group-size", "4", "--offload-num-in-group", "8"),
    ],
)
def test_check_loads_no_torch(args: tuple[str, ...]) -> None:
    loaded = loaded_after(run_main(*args))
    assert "pydantic" in loaded
    assert not loaded & {*HEAVY, "rich"}


def test_the_pages_of_the_reference_load_no_torch() -> None:
    loaded = loaded_after("import headrace.server.reference, headrace.server.listening, headrace.reference.export")
    assert {"fastapi", "jinja2", "uvicorn"} <= loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("args", [("reference", "--help"), ("explain", "--help")])
def test_help_of_the_reference_loads_no_pages(args: tuple[str, ...]) -> None:
    assert not loaded_after(run_main(*args)) & {*HEAVY, "fastapi", "jinja2", "sqlite3"}


BUILDING = {
    "headrace.reference.build",
    "headrace.reference.extract",
    "headrace.reference.packages",
    "headrace.cli.reference_work",
    "rich.progress",
    "multiprocessing",
}


@pytest.mark.parametrize("pasted", ["id", "message", "traceback"])
def test_explaining_loads_nothing_that_builds(
    pasted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli.app import main
    from headrace.errors import InvalidOffloadConfig

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    error = InvalidOffloadConfig(**InvalidOffloadConfig.example)
    text = {
        "id": error.error_id(),
        "message": error.what,
        "traceback": f"Traceback (most recent call last):\nheadrace.errors.InvalidOffloadConfig: {error}",
    }[pasted]
    assert main(["explain", text]) == 0, "the reference of Headrace itself is built first"
    assert capsys.readouterr().out.startswith("InvalidOffloadConfig of headrace")
    loaded = modules_after(run_main("explain", text))
    assert "sqlite3" in loaded
    assert not loaded & {*HEAVY, *BUILDING}


CONFIG = str(Path(__file__).parent / "data" / "configs" / "llama-3.1-405b.json")


@pytest.mark.parametrize(
    "args",
    [
        ("plan", CONFIG, "--memory", "64GiB"),
        ("plan", CONFIG, "--memory", "64GiB", "--device", "l40s", "--json"),
        ("plan", CONFIG, "--for", "vllm", "--device", "h200", "--gpus", "8"),
        ("check", "--", "vllm", "serve", CONFIG, "--offload-group-size", "8"),
    ],
)
def test_planning_loads_no_torch(args: tuple[str, ...]) -> None:
    loaded = loaded_after(run_main(*args))
    assert "rich" in loaded
    assert not loaded & {*HEAVY, "matplotlib"}


@pytest.mark.slow
def test_reading_early_loads_no_torch(root: Path) -> None:
    from tiny_models import shared

    code = f"""
from headrace import early
with early.reading({str(shared(root, "llama"))!r}, context=64) as ahead:
    ahead.wait()
    assert ahead.committed_bytes > 2**20
    ahead.close()
"""
    loaded = loaded_after(code)
    assert "pydantic" in loaded
    assert not loaded & {*HEAVY, "typer", "rich"}


def test_config_loads_no_torch() -> None:
    assert not loaded_after("import headrace; headrace.OffloadConfig()") & {*HEAVY, "typer", "rich"}


def test_public_names() -> None:
    import headrace
    from headrace import config, errors

    assert headrace.OffloadConfig is config.OffloadConfig
    assert headrace.UVAOffloadConfig is config.UVAOffloadConfig
    assert headrace.PrefetchOffloadConfig is config.PrefetchOffloadConfig
    assert headrace.HeadraceError is errors.HeadraceError
    assert headrace.__version__ == "0.1.0"
    assert set(headrace.__all__) <= set(dir(headrace))
    assert set(headrace.__all__) == {
        "Handle",
        "HeadraceError",
        "OffloadConfig",
        "PrefetchOffloadConfig",
        "UVAOffloadConfig",
        "__version__",
        "load",
        "offload",
        "report",
    }


def test_a_name_that_does_not_exist() -> None:
    import headrace

    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        headrace.laod  # noqa: B018
