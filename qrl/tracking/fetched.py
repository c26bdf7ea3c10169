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
from qrl.workspace import WORK, free_bytes, need, written_whole

FOLDER = WORK / "models"
MOST = 12  # kept: the cells of a study, twice
MODEL = "model"  # the checkpoint's folder among a model's artifacts
_CHUNK = 16 << 20  # bytes that each of MLflow's threads holds in memory; its own default is 100 MiB
_held: dict[Path, int] = {}  # folder → descriptor with a shared lock, which this process keeps until `release`
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
    place = _place(address)
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.is_dir():
            os.environ.setdefault("MLFLOW_MULTIPART_DOWNLOAD_CHUNK_SIZE", str(_CHUNK))
            store = get_artifact_repository(address)
            _make_space(place, sum(file.file_size or 0 for file in store.list_artifacts(MODEL)))
            with written_whole(place) as partial:
                partial.mkdir()
                store.download_artifacts(MODEL, str(partial))
                if digest and (found := checkpoint.digest(partial / MODEL)) != digest:
                    raise QrlError(
                        f"What the store holds at {address} has the digest {found[:12]}, but {digest[:12]} was logged: "
                        "run the step that made it again."
                    )
        if place not in _held:
            _held[place] = os.open(place, os.O_RDONLY)
            fcntl.flock(_held[place], fcntl.LOCK_SH)
        os.utime(place)  # the least recently used are deleted first
    return place / MODEL


def release(besides: Path) -> None:
    """Let other processes delete what this one has fetched, all but the model that `get` returned as `besides`."""
    for place in [place for place in _held if place / MODEL != besides]:
        os.close(_held.pop(place))


def keep(address: str, source: Path, files: Iterable[str]) -> None:
    """Link a step's own files, which were uploaded just now, to where `get` finds them, so that nobody downloads them.

    Nothing is kept on another file system.

    Args:
        address: as for `get`.
        source: the checkpoint.
        files: names below it.
    """
    place = _place(address)
    with contextlib.suppress(OSError), FileLock(f"{place}.lock"), written_whole(place) as partial:
        for name in files:
            (partial / MODEL / name).parent.mkdir(parents=True, exist_ok=True)
            os.link((source / name).resolve(), partial / MODEL / name)
    _make_space(place, 0)


def check_sizes(address: str, source: Path, files: Sequence[str]) -> None:
    """Raise QrlError if a file in a remote store has another size than here; its digest is checked when it is read.

    Arguments are as for `keep`.
    """
    store, stored = get_artifact_repository(address), {}
    for folder in {Path(MODEL, name).parent for name in files}:
        stored |= {Path(file.path): file.file_size for file in store.list_artifacts(folder.as_posix())}
    for name in files:
        size, there = (source / name).stat().st_size, stored.get(Path(MODEL, name), -1)
        if there not in (None, size):
            wrong = f"{'none' if there == -1 else there} of its {size} bytes are in the store"
            raise QrlError(f"{name} did not arrive whole ({wrong}): run the step again.")


def _place(address: str) -> Path:
    return (FOLDER / sha256(address.rstrip("/").encode()).hexdigest()[:16]).resolve()


def _make_space(place: Path, size: int) -> None:
    """Delete the least recently used until few are kept and `size` bytes fit; one that a process uses stays."""
    with FileLock(place.parent / ".space.lock"):
        for path in place.parent.glob(f".*{_DELETED}"):
            shutil.rmtree(path, ignore_errors=True)
        kept = [path for path in place.parent.iterdir() if path.is_dir() and path.name[0] != "."]  # not one that comes
        left = len(kept)
        for path in sorted(kept, key=lambda path: path.stat().st_mtime):
            if path != place and (left >= MOST or free_bytes(place) < size):
                left -= _delete_unused(path)
    need(place, size, f"A model of the store, to be fetched to {place.parent},")


def _delete_unused(path: Path) -> bool:
    """Delete a fetched model, and return whether no process uses it."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        stack.enter_context(FileLock(f"{path}.lock", blocking=False))  # a Timeout where a process is about to use it
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError where a process uses it
        gone = path.rename(path.with_name(f".{path.name}{_DELETED}"))
        shutil.rmtree(gone, ignore_errors=True)
        return True
    return False
