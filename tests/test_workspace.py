"""Folders to work in: one process at a time, and nothing stays of killed processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qrl import workspace as workspaces
from qrl.errors import BadInput
from qrl.workspace import WORK, Scratch, workspace


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def left() -> set[str]:
    return {path.name for path in WORK.iterdir()}


def test_it_is_empty_and_goes_with_the_work():
    with workspace("compare-1") as folder:
        (folder / "half.json").write_text("{")
    assert not folder.exists() and not left()
    with pytest.raises(ZeroDivisionError), workspace("compare-1") as folder:
        assert not list(folder.iterdir())
        raise ZeroDivisionError
    assert not folder.exists() and not left()
    with pytest.raises(ZeroDivisionError), workspace("train-1", keep_on_error=True):
        raise ZeroDivisionError
    assert not left()  # there is nothing to go on from


def test_what_a_second_try_goes_on_from_stays():
    with pytest.raises(ZeroDivisionError), workspace("train-1", keep_on_error=True) as folder:
        (folder / "checkpoint").write_text("1")
        raise ZeroDivisionError
    with workspace("train-1", keep_on_error=True) as again:
        assert (again / "checkpoint").read_text() == "1"
    assert not again.exists()


def test_the_same_work_is_not_done_twice_at_once(monkeypatch):
    monkeypatch.setattr(workspaces, "DYING_S", 0.1)
    with workspace("train-1"), pytest.raises(BadInput, match="Another process"), workspace("train-1"):
        pass


def test_what_a_killed_process_left_is_swept_and_a_living_ones_is_not():
    program = "import os\nfrom qrl.workspace import workspace\nwith workspace('quantize-awq', shared=True): os._exit(9)"
    root = str(Path(__file__).parents[1])
    assert (
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": root}, check=False).returncode
        == 9
    )
    (dead,) = (name for name in left() if not name.endswith(".lock"))
    with workspace("quantize-awq", shared=True) as folder, workspace("evaluate-base-nf4", shared=True):
        assert dead not in left() and f"{dead}.lock" not in left()
        assert folder.is_dir() and str(os.getpid()) in folder.name
    assert not left()


def test_a_file_in_its_place_is_refused():
    WORK.write_text("not a folder")
    with pytest.raises(BadInput, match="a folder to work in was expected"), workspace("compare-1"):
        pass


def test_a_temporary_folder_goes_with_the_next_one_once_its_process_was_killed(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    program = (
        "import os, sys\nfrom qrl.workspace import Scratch\nkept = Scratch('one-')\nprint(kept.path, flush=True)\n"
        "sys.stdin.read()\nos._exit(9)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        theirs = Path(other.stdout.readline().strip())
        (theirs / "weights").write_text("many")
        os.utime(theirs, (0, 0))
        mine = Scratch("one-")
        assert theirs.is_dir()  # it lives
        other.stdin.close()
    young = tmp_path / "one-young"
    young.mkdir()
    Scratch("one-").cleanup()
    assert sorted(tmp_path.iterdir()) == sorted([mine.path, young])
    mine.cleanup()
    assert list(tmp_path.iterdir()) == [young]


OTHER = """
import sys
from pathlib import Path
from qrl.workspace import write_atomically
with write_atomically(Path(sys.argv[1])) as path:
    path.write_text("theirs")
"""


def test_two_processes_that_write_one_file_never_mix_and_what_a_killed_one_left_is_deleted(tmp_path):
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    host = workspaces._writer().partition("-")[0]
    (left := tmp_path / f".a.{host}-{int(gone.stdout)}.partial").write_text("half")
    (elsewhere := tmp_path / f".a.0123abcd-{int(gone.stdout)}.partial").write_text("another host's, which may live")
    with workspaces.write_atomically(tmp_path / "a") as ours:
        ours.write_text("first half, ")
        subprocess.run(
            [sys.executable, "-c", OTHER, str(tmp_path / "a")], cwd=Path(workspaces.__file__).parents[1], check=True
        )
        assert (tmp_path / "a").read_text() == "theirs" and not left.exists()
        with ours.open("a") as file:
            file.write("second half")
    assert (tmp_path / "a").read_text() == "first half, second half"
    assert set(tmp_path.iterdir()) == {tmp_path / "a", elsewhere}
