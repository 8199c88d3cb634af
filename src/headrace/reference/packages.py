"""Where the Python source of a package lies: installed, in a directory, or in a wheel. Imports and runs none of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import posixpath
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from headrace.errors import PackageNotFound, SourceUnusable

_REPOSITORY = re.compile(r"https?://(?:www\.)?(?:github|gitlab)\.com/[\w.-]+/[\w.-]+?(?=\.git\b|/|$|[\s#?])")
_COMMIT = re.compile(
    r"^(?:__commit_id__ = )?(?:commit_id|__commit__|git_version|__git_version__)\s*=\s*'?g?([0-9a-f]{7,40})\b", re.M
)
_SKIPPED = {"tests", "test", "testing_data", "node_modules", "__pycache__"}
_TEST_FOLDERS = {"tests", "test"}
_TEST_FILE = re.compile(r"(?:test_\w+|\w+_test|tests)\.py")
_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
_PREFERRED_LINKS = ("source", "source code", "repository", "github", "code", "homepage", "home")


@dataclass(frozen=True, slots=True)
class PackageSource:
    """The files of one version of one package; small enough to be sent to another process."""

    name: str
    """The package that is imported: `vllm`, also when the distribution is called otherwise."""
    version: str
    files: tuple[str, ...]
    """Paths of the .py files relative to `root`, with slashes, sorted."""
    root: Path
    """The directory that holds the package, or the wheel."""
    repository: str | None = None
    """Where the source is published: `https://github.com/ORG/REPO`."""
    commit: str | None = None
    prefix: str = ""
    """What published paths begin with and `files` do not: `src/`."""
    tests: tuple[str, ...] = ()
    """Paths of the package's own tests, as far as they come with it; those beside it begin with `../`, or `tests/`."""

    def read(self, files: Iterable[str]) -> Iterable[tuple[str, bytes]]:
        """Path and content of each file. Raises: SourceUnusable."""
        try:
            if self.root.is_file():
                with zipfile.ZipFile(self.root) as wheel:
                    yield from ((file, wheel.read(file)) for file in files)
            else:
                yield from ((file, (self.root / file).read_bytes()) for file in files)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise SourceUnusable(source=str(self.root), reason=str(error)) from error

    def checksums(self) -> dict[str, str]:
        """Of each file in a wheel, as its directory states them. Raises: SourceUnusable."""
        try:
            with zipfile.ZipFile(self.root) as archive:
                return {
                    file: f"{(info := archive.getinfo(file)).CRC:08x}{info.file_size:x}"
                    for file in (*self.files, *self.tests)
                }
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise SourceUnusable(source=str(self.root), reason=str(error)) from error

    def permalink(self, file: str, line: int) -> str | None:
        """The line on the web at the commit (or the tag) of this version; None if no repository is known."""
        if self.repository is None:
            return None
        return permalink(self.repository, self.commit or f"v{self.version}", self.prefix + file, line)


def permalink(repository: str, revision: str, file: str, line: int) -> str:
    """Where a repository shows a line."""
    return f"{repository}/blob/{revision}/{posixpath.normpath(file)}#L{line}"


def installed(package: str) -> PackageSource:
    """An installed package by its import name or its distribution's name. Raises: PackageNotFound."""
    top, distribution = _distribution(package)
    version = distribution.version
    located = [
        (file, Path(str(distribution.locate_file(file))))
        for file in distribution.files or ()
        if _is_source(str(file), top)
    ]
    if not located:
        return _editable(top, distribution)
    file, path = located[0]
    root = path.parents[len(PurePosixPath(str(file)).parts) - 1]
    source = _source(top, version, sorted(str(file) for file, _ in located), root, _metadata(distribution))
    tests = sorted(
        name for file in distribution.files or () if is_test(name := str(file)) and name.startswith(f"{top}/")
    )
    return replace(source, tests=tuple(tests))


def _metadata(distribution: importlib.metadata.Distribution) -> Message:
    return HeaderParser().parsestr(distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "")


def _distribution(package: str) -> tuple[str, importlib.metadata.Distribution]:
    wanted = package.replace("-", "_").lower()
    owners = importlib.metadata.packages_distributions()
    for top, names in owners.items():
        if top.lower() == wanted:
            return top, importlib.metadata.distribution(names[0])
    for top, names in owners.items():
        if any(name.replace("-", "_").lower() == wanted for name in names) and not top.startswith("_"):
            return top, importlib.metadata.distribution(package)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # Installed as a pointer to its source, with no list of modules: such a package is called as it is imported.
        return wanted, importlib.metadata.distribution(package)
    import difflib

    nearest = difflib.get_close_matches(package, list(owners), n=1)
    raise PackageNotFound(package=package, nearest=nearest[0] if nearest else "headrace")


def _editable(top: str, distribution: importlib.metadata.Distribution) -> PackageSource:
    """A package that is installed as a pointer to its source directory."""
    import importlib.util

    spec = importlib.util.find_spec(top)  # of a top-level name: this looks for the file and runs nothing
    if spec is None or not spec.submodule_search_locations:
        raise SourceUnusable(source=top, reason="its installation lists no Python files")
    return directory(Path(next(iter(spec.submodule_search_locations))), metadata=_metadata(distribution))


def directory(folder: Path, *, metadata: Message | None = None, package: str | None = None) -> PackageSource:
    """A package in a directory: the package's own, or one that holds it as `NAME` or `src/NAME`.

    Raises: SourceUnusable.
    """
    package_folder = _package_folder(folder, package)
    root = package_folder.parent
    files = sorted(
        path.relative_to(root).as_posix()
        for path in package_folder.rglob("*.py")
        if _is_source(path.relative_to(root).as_posix(), package_folder.name)
    )
    if not files:
        raise SourceUnusable(source=str(folder), reason="it holds no Python files")
    metadata = metadata or _project_metadata(root if root.name != "src" else root.parent)
    source = _source(package_folder.name, str(metadata.get("Version", "0")), files, root, metadata)
    in_src = root.name == "src"
    return replace(
        source, prefix="src/" if in_src else "", tests=_tests(package_folder, root.parent if in_src else root)
    )


def _tests(package_folder: Path, project: Path) -> tuple[str, ...]:
    """The tests in a package, and in the project around it."""
    root = package_folder.parent
    above = "" if project == root else "../"
    found = {path.relative_to(root).as_posix() for path in package_folder.rglob("*.py")}
    if any((project / name).is_file() for name in _PROJECT_FILES):
        for folder in ("tests", "test"):
            found |= {above + path.relative_to(project).as_posix() for path in (project / folder).rglob("*.py")}
    return tuple(sorted(file for file in found if is_test(file)))


def _package_folder(folder: Path, package: str | None) -> Path:
    folder = folder.resolve()
    if not folder.is_dir():
        raise SourceUnusable(source=str(folder), reason="it is not a directory")
    for candidate in (folder / "src" / (package or ""), folder / (package or "")) if package else ():
        if (candidate / "__init__.py").is_file():
            return candidate
    return folder


def _project_metadata(root: Path) -> Message:
    """What an unpacked release or a pyproject.toml tells of name, version and links."""
    import tomllib

    with contextlib.suppress(OSError):
        return HeaderParser().parsestr((root / "PKG-INFO").read_text(encoding="utf-8", errors="replace"))
    message = Message()
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        project = {}
    if isinstance(project.get("version"), str):
        message["Version"] = project["version"]
    for label, link in (project.get("urls") or {}).items():
        message["Project-URL"] = f"{label}, {link}"
    return message


def wheel(file: Path, package: str | None = None) -> PackageSource:
    """A package straight from its wheel. Raises: SourceUnusable."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            metadata = HeaderParser().parsestr(_metadata_text(archive, names))
    except (OSError, zipfile.BadZipFile) as error:
        raise SourceUnusable(source=str(file), reason=str(error)) from error
    tops = {name.partition("/")[0] for name in names if name.endswith("/__init__.py") and name.count("/") == 1}
    top = package if package in tops else max(tops, key=lambda top: _count(names, top), default="")
    files = sorted(name for name in names if top and _is_source(name, top))
    if not files:
        raise SourceUnusable(source=str(file), reason="it holds no Python package")
    source = _source(top, str(metadata.get("Version", "0")), files, file.resolve(), metadata)
    tests = sorted(name for name in names if name.startswith((f"{top}/", "tests/", "test/")) and is_test(name))
    return replace(source, tests=tuple(tests))


def _count(names: list[str], top: str) -> int:
    return sum(name.startswith(f"{top}/") for name in names)


def _metadata_text(archive: zipfile.ZipFile, names: list[str]) -> str:
    for name in names:
        if name.endswith(".dist-info/METADATA"):
            return archive.read(name).decode("utf-8", "replace")
    return ""


def _source(top: str, version: str, files: list[str], root: Path, metadata: Message) -> PackageSource:
    source = PackageSource(top, version, tuple(files), root, repository=_repository(metadata))
    return replace(source, commit=_commit(source))


def is_test(file: str) -> bool:
    """Whether a path is that of a file with tests."""
    *folders, name = file.split("/")
    return bool(_TEST_FOLDERS.intersection(folders)) and _TEST_FILE.fullmatch(name) is not None


def _is_source(file: str, top: str) -> bool:
    parts = file.split("/")
    return file.endswith(".py") and parts[0] == top and not _SKIPPED.intersection(parts[:-1])


def _repository(metadata: Message) -> str | None:
    links: dict[str, str] = {}
    for entry in metadata.get_all("Project-URL", []):
        label, _, link = str(entry).partition(",")
        links.setdefault(label.strip().lower(), link.strip())
    candidates = [links[label] for label in _PREFERRED_LINKS if label in links]
    candidates += [str(metadata.get("Home-page", "") or ""), *links.values()]
    for link in candidates:
        if match := _REPOSITORY.match(link):
            return match[0]
    return None


def _commit(source: PackageSource) -> str | None:
    """The commit that a generated version file names, if one does."""
    for name in ("_version.py", "version.py", "_commit.py"):
        file = f"{source.name}/{name}"
        if file in source.files:
            for _, content in source.read([file]):
                if match := _COMMIT.search(content.decode("utf-8", "replace")):
                    return match[1]
    return None
