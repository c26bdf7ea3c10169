"""Cells answered by several processes: the same answers, in order, and an end whatever happens in them."""

import multiprocessing
import os
import signal
import time
from functools import partial

import psutil
import pytest

from qrl import checkpoint, recipe, tasks, tiny
from qrl.errors import BadInput, QrlError
from qrl.steps import answers, evaluate

pytestmark = pytest.mark.process


def ask(cell: str, progress: answers.Progress) -> tuple[str, int]:
    """Answer as the cell's name says: bad, killed, endless, or with this process's id after 3 answers."""
    if cell == "bad":
        raise BadInput("This cell cannot be asked.")
    if cell == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if cell in ("endless", "deaf"):
        if cell == "deaf":  # as Python itself is for a moment after a fork
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    for _ in range(3):
        progress(1)
    return cell, os.getpid()


def test_every_cell_is_answered_elsewhere_with_its_progress():
    progress: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    with answers.in_processes(ask, list(progress), 2) as wait:
        results = [wait(cell, progress[cell].append) for cell in progress]
    assert [cell for cell, _ in results] == ["a", "b", "c"] and os.getpid() not in {pid for _, pid in results}
    assert {sum(counts) for counts in progress.values()} == {3}
    assert not multiprocessing.active_children()
    with answers.in_processes(ask, ["a"], 1) as ask_here:
        assert ask_here is ask


def test_each_cell_can_have_a_process_of_its_own():
    cells = ["a", "b", "c", "d"]
    with answers.in_processes(ask, cells, 2, fresh=True) as wait:
        pids = {wait(cell, lambda n: None)[1] for cell in reversed(cells)}
    assert len(pids) == 4 and os.getpid() not in pids
    with pytest.raises(QrlError, match="memory"), answers.in_processes(ask, ["a", "killed"], 2, fresh=True) as wait:
        assert wait("a", lambda n: None)[0] == "a"
        wait("killed", lambda n: None)
    with pytest.raises(BadInput, match="cannot be"), answers.in_processes(ask, ["a", "bad"], 2, fresh=True) as wait:
        wait("bad", lambda n: None)


def test_what_a_step_leaves_unanswered_ends_with_it():
    began = time.monotonic()
    others = psutil.Process().children()
    with answers.in_processes(ask, ["endless", "deaf", "a"], 3, fresh=True) as wait:
        wait("a", lambda n: None)
        children = [child for child in psutil.Process().children(recursive=True) if child not in others]
    _, alive = psutil.wait_procs(children, timeout=30)
    assert len(children) >= 4 and not alive and time.monotonic() - began < 60


@pytest.mark.parametrize(("cell", "error", "words"), [("bad", BadInput, "cannot be"), ("killed", QrlError, "memory")])
def test_an_error_in_a_process_is_the_steps_and_the_others_are_ended(cell, error, words):
    began = time.monotonic()
    with pytest.raises(error, match=words), answers.in_processes(ask, [cell, "endless", "deaf"], 3) as wait:
        wait(cell, lambda n: None)
    assert not multiprocessing.active_children() and time.monotonic() - began < 60


def test_one_process_per_thread_answers_small_models(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert [answers.processes(cells, answers.SMALL) for cells in (1, 3, 6)] == [1, 3, 4]
    assert answers.processes(6, answers.SMALL + 1) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert answers.processes(6, 1) == 1


def test_a_cell_has_the_same_answers_wherever_it_is_asked():
    settings = recipe.load("tiny", {"evaluate.max_new_tokens": "8"})
    questions = tasks.load("arithmetic", "heldout", 8, 0)
    weights = checkpoint.check(tiny.PATH)
    stored = ("qrl-tiny", weights, weights.digest)
    cells = [evaluate.Evaluation(settings, variant, "full", *stored, questions, "cpu") for variant in ("base", "grpo")]
    answer = partial(evaluate._ask, evaluate.cells.Engines())
    with answers.in_processes(answer, cells, 2) as wait:
        from_processes = [wait(cell, lambda n: None) for cell in cells]
    from_here = answer(cells[0], lambda n: None)
    receipts = [cell_answers.receipt["completions"] for cell_answers in (*from_processes, from_here)]
    assert set(receipts) == {from_here.receipt["completions"]}
    assert from_processes[1].frame["variant"].unique() == ["grpo"]
