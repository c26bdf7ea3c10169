"""Checkpoints of a remote store on this machine: fetched once, checked, shared by processes, deleted oldest first."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from filelock import FileLock
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from qrl import checkpoint
from qrl.errors import QrlError
from qrl.workspace import WORK, check_space, free_bytes, write_atomically

FOLDER = WORK / "models"
MAX_KEPT = 12  # the cells of a study, twice
MODEL = "model"  # the checkpoint's folder among a model's artifacts
_CHUNK_BYTES = 16 << 20  # that each of MLflow's threads holds in memory; its own default is 100 MiB
_descriptors: dict[Path, int] = {}  # folder → descriptor with a shared lock, which this process keeps until `release`
_MISSING = -1
_DELETED = ".deleted"  # ends the hidden name of a folder that is being deleted: what a kill leaves of it is no model


def get(address: str, digest: str = "") -> Path:
    """Return the checkpoint among a model's remote artifacts, downloaded once for all processes in this folder.

    Files go straight to their place, a chunk at a time, and appear once all of them are there and are what was logged.

    Args:
        address: of the artifacts, as MLflow resolves it: mlflow-artifacts:/… or s3://….
        digest: of the checkpoint that was logged; empty where it is unknown.

    Raises:
        BadInput: the disk lacks the space.
        QrlError: the store holds something else than was logged.
    """
    folder = _folder(address)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _download(address, folder, digest)
        if folder not in _descriptors:
            _descriptors[folder] = os.open(folder, os.O_RDONLY)
            fcntl.flock(_descriptors[folder], fcntl.LOCK_SH)
        os.utime(folder)  # the least recently used are deleted first
    return folder / MODEL


def _download(address: str, folder: Path, digest: str) -> None:
    """Download a checkpoint to a folder that appears whole; raise QrlError if it has another digest, unless empty."""
    os.environ.setdefault("MLFLOW_MULTIPART_DOWNLOAD_CHUNK_SIZE", str(_CHUNK_BYTES))
    repository = get_artifact_repository(address)
    _make_space(folder, sum(file.file_size or 0 for file in repository.list_artifacts(MODEL)))
    with write_atomically(folder) as partial:
        partial.mkdir()
        repository.download_artifacts(MODEL, str(partial))
        if not digest:
            return
        actual_digest = checkpoint.digest(partial / MODEL)
        if actual_digest != digest:
            raise QrlError(
                f"What the store holds at {address} has the digest {actual_digest[:12]}, but {digest[:12]} was logged: "
                "run the step that made it again."
            )


def release(besides: Path) -> None:
    """Let other processes delete what this one has fetched, all but the model that `get` returned as `besides`."""
    for folder in list(_descriptors):
        if folder / MODEL != besides:
            os.close(_descriptors.pop(folder))


def keep_uploaded(address: str, source: Path, files: Iterable[str]) -> None:
    """Link a step's own files, which were uploaded just now, to where `get` finds them, so that nobody downloads them.

    Nothing is kept on another file system.

    Args:
        address: as for `get`.
        source: the checkpoint.
        files: names below it.
    """
    folder = _folder(address)
    with contextlib.suppress(OSError), FileLock(f"{folder}.lock"), write_atomically(folder) as partial:
        for name in files:
            (partial / MODEL / name).parent.mkdir(parents=True, exist_ok=True)
            os.link((source / name).resolve(), partial / MODEL / name)
    _make_space(folder, 0)


def check_sizes(address: str, source: Path, files: Sequence[str]) -> None:
    """Raise QrlError if a file in a remote store has another size than here; its digest is checked when it is read.

    Arguments are as for `keep`.
    """
    repository = get_artifact_repository(address)
    stored_sizes = {}
    for folder in {Path(MODEL, name).parent for name in files}:
        for file in repository.list_artifacts(folder.as_posix()):
            stored_sizes[Path(file.path)] = file.file_size
    for name in files:
        size = (source / name).stat().st_size
        stored_size = stored_sizes.get(Path(MODEL, name), _MISSING)
        if stored_size in (None, size):  # some stores list no sizes
            continue
        arrived = "none" if stored_size == _MISSING else stored_size
        message = f"{arrived} of its {size} bytes are in the store"
        raise QrlError(f"{name} did not arrive whole ({message}): run the step again.")


def _folder(address: str) -> Path:
    return (FOLDER / sha256(address.rstrip("/").encode()).hexdigest()[:16]).resolve()


def _make_space(needed_by: Path, size: int) -> None:
    """Delete the least recently used until few are kept and `size` bytes fit; one that a process uses stays."""
    with FileLock(needed_by.parent / ".space.lock"):
        for path in needed_by.parent.glob(f".*{_DELETED}"):
            shutil.rmtree(path, ignore_errors=True)
        # Hidden names are of downloads that have not finished.
        models = [path for path in needed_by.parent.iterdir() if path.is_dir() and not path.name.startswith(".")]
        count = len(models)
        for path in sorted(models, key=lambda path: path.stat().st_mtime):
            has_room = count < MAX_KEPT and free_bytes(needed_by) >= size
            if path != needed_by and not has_room:
                count -= _delete_unused(path)
    check_space(needed_by, size, f"A model of the store, to be fetched to {needed_by.parent},")


def _delete_unused(path: Path) -> bool:
    """Delete a fetched model, and return whether no process uses it."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        stack.enter_context(FileLock(f"{path}.lock", blocking=False))  # a Timeout where a process is about to use it
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError where a process uses it
        hidden = path.rename(path.with_name(f".{path.name}{_DELETED}"))  # at once: what a kill leaves is no model
        shutil.rmtree(hidden, ignore_errors=True)
        return True
    return False
