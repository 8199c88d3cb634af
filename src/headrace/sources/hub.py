"""A name on the hub becomes a local directory. Knows nothing of what a checkpoint needs beyond which files to fetch.

All of it is `huggingface_hub`'s: download, resume, cache, offline use. What is ours is that each way it can fail
becomes one of our errors.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.errors import MissingPackage, ModelNotFound, NotWritable

Progress = Callable[[str, int, int], None]

_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]
_UNWANTED = ["*/*", "consolidated*"]
"""Sub-directories hold other formats; consolidated files hold the same weights again under other names."""


def download(repo_id: str, *, on_progress: Progress | None = None) -> Path:
    """The snapshot of a model repository: from the hub, or from its cache if the hub cannot be reached.

    Raises ModelNotFound, NotWritable, MissingPackage.
    """
    hub = _package()
    try:
        return Path(
            hub.snapshot_download(
                repo_id,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                tqdm_class=_progress_bar(f"downloading {repo_id}", on_progress),
            )
        )
    except Exception as error:
        raise _ours(repo_id, error) from error


def config_file(repo_id: str) -> Path:
    """The config.json of a model repository: from the hub's cache, else fetched; nothing else is.

    Raises ModelNotFound, NotWritable, MissingPackage.
    """
    hub = _package()
    try:
        cached = hub.try_to_load_from_cache(repo_id, "config.json")
        return Path(cached if isinstance(cached, str) else hub.hf_hub_download(repo_id, "config.json"))
    except Exception as error:
        raise _ours(repo_id, error) from error


def cached(repo_id: str) -> Path | None:
    """The directory of a model repository in the hub's cache, if it has a config; the hub is not asked."""
    try:
        found = _package().try_to_load_from_cache(repo_id, "config.json")
    except Exception:  # who needs the model finds out why it is not there
        return None
    return Path(found).parent if isinstance(found, str) else None


def files(repo_id: str) -> list[str]:
    """The names of the files in a repository, or none if that cannot be found out."""
    try:
        return sorted(_package().list_repo_files(repo_id))
    except Exception:  # asked only to word another error better
        return []


def _package() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingPackage(
            package="huggingface_hub", purpose="Loading a model from the hub", extra="engine"
        ) from error
    return huggingface_hub


def _ours(repo_id: str, error: Exception) -> Exception:
    from huggingface_hub import constants
    from huggingface_hub import errors as theirs

    reason: str
    if isinstance(error, theirs.HFValidationError):
        reason = "no such file or directory, and it is not a name the hub could have"
    elif isinstance(error, theirs.GatedRepoError):
        reason = "its repository on the hub is gated: accept its terms there and log in with `hf auth login`"
    elif isinstance(error, theirs.RepositoryNotFoundError):
        reason = "no such file or directory, and the hub has no such repository (or it is private: `hf auth login`)"
    elif isinstance(error, theirs.RevisionNotFoundError):
        reason = "its repository on the hub has no main branch"
    elif isinstance(error, theirs.IncompleteSnapshotError):
        reason = "the hub's cache holds only a part of it, and the hub could not be reached"
    elif isinstance(error, theirs.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        reason = "no such file or directory, not in the hub's cache, and HF_HUB_OFFLINE forbids to ask the hub"
    elif isinstance(error, theirs.LocalEntryNotFoundError):
        reason = "no such file or directory, not in the hub's cache, and the hub could not be reached"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return NotWritable(path=constants.HF_HUB_CACHE, reason=os.strerror(error.errno))
    else:
        reason = f"no such file or directory, and the hub could not be reached ({type(error).__name__})"
    return ModelNotFound(model=repo_id, reason=reason)


def _progress_bar(label: str, on_progress: Progress | None) -> Any:
    """A class in the place of huggingface_hub's progress bar that draws nothing and reports bytes."""
    tqdm: Any = importlib.import_module("tqdm").tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of the two bars of bytes, the other one counts what the network needed, which may be less.
            self._counts = kwargs.get("unit") == "B" and not str(kwargs.get("desc")).startswith("Download")
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if on_progress is not None and self._counts and self.total:
                on_progress(label, int(self.n), int(self.total))
            return None

    return Bar
