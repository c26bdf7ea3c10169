"""Models of a remote store: fetched once, checked, shared, deleted oldest first; a folder stands in for the store."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

import qrl
from qrl import checkpoint, workspace
from qrl.errors import BadInput, QrlError
from qrl.tracking import fetched


@pytest.fixture
def remote(tiny_checkpoint, tmp_path, monkeypatch):
    """Return a function that makes the address of a stored model; downloads are counted in its `made`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetched, "_descriptors", {})
    repository = fetched.get_artifact_repository

    def counted(address: str):
        store = repository(address)
        download = store.download_artifacts
        store.download_artifacts = lambda *given: (store_of.made.append(address), download(*given))[1]
        return store

    monkeypatch.setattr(fetched, "get_artifact_repository", counted)

    def store_of(name: str) -> str:
        shutil.copytree(tiny_checkpoint, tmp_path / "remote" / name / fetched.MODEL)
        return str(tmp_path / "remote" / name)

    store_of.made = []
    return store_of


def test_a_model_is_fetched_once_and_checked(remote, tiny_checkpoint):
    address, digest = remote("a"), checkpoint.digest(tiny_checkpoint)
    path = fetched.get(address, digest)
    assert checkpoint.digest(path) == digest and path.is_relative_to(fetched.FOLDER.resolve())
    assert fetched.get(address, digest) == path and remote.made == [address]
    with pytest.raises(QrlError, match=r"has the digest .*, but 0000 was logged: run the step"):
        fetched.get(remote("b"), "0000")
    assert len([folder for folder in fetched.FOLDER.iterdir() if folder.is_dir()]) == 1  # nothing half, nothing wrong


def test_who_uploaded_a_model_never_downloads_it_and_sizes_are_compared(remote, tiny_checkpoint):
    address, files = remote("a"), (tiny_checkpoint, checkpoint.files(tiny_checkpoint))
    fetched.check_sizes(address, *files)
    fetched.FOLDER.mkdir(parents=True)
    fetched.keep_uploaded(address, *files)
    kept = fetched.get(address, checkpoint.digest(tiny_checkpoint))
    assert not remote.made and (kept / "model.safetensors").samefile(tiny_checkpoint / "model.safetensors")
    stored = Path(address) / fetched.MODEL / "model.safetensors"
    stored.write_bytes(stored.read_bytes()[:1000])
    with pytest.raises(QrlError, match=r"model\.safetensors did not arrive whole \(1000 of its"):
        fetched.check_sizes(address, *files)


@pytest.mark.process
def test_the_least_recently_used_are_deleted_but_none_that_a_process_uses(remote, monkeypatch):
    monkeypatch.setattr(fetched, "MAX_KEPT", 2)
    first, second = remote("first"), remote("second")
    held = fetched.get(first)  # by this process
    program = "import sys; from qrl.tracking import fetched; print(fetched.get(sys.argv[1]))"
    environment = os.environ | {"PYTHONPATH": str(Path(qrl.__file__).parents[1])}
    command = [sys.executable, "-c", program, second]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    fetched.get(remote("third"))
    assert held.is_dir() and not Path(done.stdout.strip()).exists()


def test_a_model_that_was_used_again_outlives_one_that_was_fetched_later(remote, monkeypatch):
    monkeypatch.setattr(fetched, "MAX_KEPT", 2)
    first, second = remote("first"), remote("second")
    used_again, used_once = fetched.get(first), fetched.get(second)
    for folder, seconds in ((used_again, 1000), (used_once, 2000)):
        os.utime(folder.parent, (seconds, seconds))
    fetched.get(first)
    fetched.release(besides=Path())
    fetched.get(remote("third"))
    assert used_again.is_dir() and not used_once.exists()


def test_a_kill_during_a_deletion_leaves_nothing_that_looks_like_a_model(remote, monkeypatch):
    place = fetched.get(remote("a")).parent
    fetched.release(besides=Path())

    def killed(path: Path, **_) -> None:
        (path / fetched.MODEL / "model.safetensors").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(shutil, "rmtree", killed)
        fetched._delete_unused(place)
    assert not place.exists()
    again = fetched.get(remote.made[0])
    assert again.parent == place and (again / "model.safetensors").is_file()
    assert [path.name for path in place.parent.iterdir() if path.is_dir()] == [place.name]  # the remains are deleted


def test_a_model_that_another_process_is_about_to_use_or_holds_is_not_deleted_until_it_is_released(remote):
    first, second = fetched.get(remote("first")), fetched.get(remote("second"))
    fetched.release(besides=second)
    with FileLock(f"{first.parent}.lock"):  # as in `get`, before it holds the folder
        assert not fetched._delete_unused(first.parent)
    assert fetched._delete_unused(first.parent) and not first.exists()
    assert not fetched._delete_unused(second.parent) and second.is_dir()


def test_a_disk_without_space_is_a_sentence_before_anything_is_fetched(remote, monkeypatch):
    monkeypatch.setattr(workspace, "free_bytes", lambda folder: 1000)
    with pytest.raises(BadInput, match=r"needs 0\.00\d+ GB, but .* has 1e-06 GB free: free the disk, .*or start qrl"):
        fetched.get(remote("a"))
    assert not remote.made
