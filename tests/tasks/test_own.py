"""Task files of the user: the README's example, their errors in sentences, graders that fail or hang."""

import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
from pebble.common import CONSTS

import qrl
from qrl import recipe, tasks
from qrl.cli.ending import main
from qrl.errors import BadInput, QrlError
from qrl.recipe import Recipe, Train
from qrl.tasks import Question, Verdict, files, limits, own, prompt
from qrl.tasks.math import pool
from qrl.tracking import keys
from tests.processes import children_with

pytestmark = pytest.mark.process

README = Path(qrl.__file__).parent / "tasks" / "own.md"
OWN_FORM = re.search(r"```python\n(# last_number\.py.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
EXAMPLE = re.search(r"```python\n(# reverse\.py.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
LOAD = """
from qrl.tasks import Question, Verdict
def load(split, n, seed):
    return [Question(str(i), f"What is {i} + 1?", f"#### {i + 1}", str(i + 1)) for i in range(12)]
"""
GRADE = """
def grade(completion, answer):
    return completion.endswith(answer)
"""


def written(folder: Path, source: str, name: str = "mine.py") -> str:
    (folder / name).write_text(source)
    own.read_source(str(folder / name))
    return str(folder / name)


def test_the_examples_questions_are_loaded_drawn_and_graded(tmp_path):
    task = written(tmp_path, EXAMPLE, "reverse.py")
    heldout = tasks.load(task, "heldout", 20, 0)
    assert len(heldout) == 20 and heldout == tasks.load(task, "heldout", 20, 0) != tasks.load(task, "heldout", 20, 1)
    assert len(tasks.load(task, "train", None, 0)) == 500
    first = heldout[0]
    assert tasks.grade(task, first.solution, first.answer) == Verdict(first.answer, True, True)
    assert tasks.grade(task, f"{first.answer}\n#### no", first.answer) == Verdict("no", False, True)
    prompt.check_task(task, "answer-line")  # any template fits a file
    assert own.function(task, "short")(["abcd"], ["x"]) == [-0.004]


def test_questions_are_drawn_if_there_are_more_and_told_apart_by_the_files_text(tmp_path):
    task = written(tmp_path, LOAD + GRADE)
    drawn = tasks.load(task, "heldout", 5, 3)
    label = tasks.label(task)
    assert re.fullmatch(r"mine-[0-9a-f]{8}", label) and tasks.label("gsm8k") == "gsm8k"
    everything = [Question(f"{label}-heldout-{i}", f"What is {i} + 1?", f"#### {i + 1}", str(i + 1)) for i in range(12)]
    assert drawn == random.Random(3).sample(everything, 5) and tasks.load(task, "heldout", 12) == everything
    written(tmp_path, LOAD + GRADE + "# edited\n")
    assert tasks.label(task) != label and not {each.id for each in tasks.load(task, "heldout", 12)} & {
        each.id for each in everything
    }


def test_an_edit_changes_no_run_that_has_begun(tmp_path):
    task = written(tmp_path, LOAD + GRADE)
    tasks.load(task, "train", 5)
    label = tasks.label(task)
    Path(task).write_text("def grade(completion, answer):\n    return False\n")
    assert tasks.grade(task, "so 4", "4").strict and tasks.label(task) == label
    Path(task).unlink()
    assert tasks.grade(task, "so 4", "4").strict and tasks.label(task) == label
    with pytest.raises(BadInput, match="cannot be read"):
        tasks.load(task, "train", 5)  # what begins next


def test_a_grader_of_true_and_false_reads_any_text_but_none(tmp_path):
    task = written(tmp_path, LOAD + GRADE)
    assert tasks.grade_many(task, ["so 4", "5", " "], ["4"] * 3) == [
        Verdict("so 4", True, True),
        Verdict("5", False, False),
        Verdict(None, False, False),
    ]


def test_graders_that_raise_or_hang_are_faults_and_the_others_count(tmp_path, monkeypatch):
    monkeypatch.setattr(own, "GRADE_S", 0.2)
    task = written(
        tmp_path,
        LOAD
        + """
import os
def grade(completion, answer):
    if completion == "raise":
        return 1 / 0
    if completion == "none":
        return None
    if completion == "hang":
        return 9 ** 9**9  # one call into C, which no signal interrupts
    if completion == "die":
        os._exit(3)
    return True
""",
    )
    with pytest.warns(UserWarning, match="grade failed, which counts as wrong") as seen:
        verdicts = tasks.grade_many(task, ["raise", "hang", "die", "fine"], ["1"] * 4)
    assert [verdict.fault for verdict in verdicts] == ["error", "timeout", "error", None] and verdicts[-1].strict
    assert "line 9, ZeroDivisionError" in str(seen[0].message) and "exit code 3" in str(seen[1].message)
    monkeypatch.setattr(CONSTS, "term_timeout", 600)  # for a process to obey SIGTERM; a call into C does at once
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.extend(tasks.grade_many(task, ["hang"], ["1"])))
    thread.start()
    thread.join(60)
    assert elsewhere[0].fault == "timeout"  # no signal arrives there


def grade_elsewhere(task: str, completion: str, answer: str) -> None:
    assert tasks.grade_many(task, [completion], [answer])[0].strict


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("kind", ["a file's", "math"])
def test_a_process_that_has_graded_ends_by_itself(kind, method, tmp_path):
    """`multiprocessing` joins a process's children before it ends: somebody has to end them, and no `atexit` will."""
    task = written(tmp_path, LOAD + "def grade(completion, answer):\n    return True\n") if kind == "a file's" else kind
    arguments = (task, r"\boxed{x^2+2x+1}", "(x+1)^2")
    process = multiprocessing.get_context(method).Process(target=grade_elsewhere, args=arguments)
    grade_elsewhere(*arguments)  # so that a server of forks runs here, which is no child of a fork
    for grader in (pool, limits):  # as whoever forks does: their threads would not be copied
        grader.close()
    process.start()
    process.join(60)
    try:
        assert process.exitcode == 0
    finally:
        process.kill()


def test_a_grader_that_hangs_does_not_outlive_a_process_that_was_killed(tmp_path):
    task = written(tmp_path, LOAD + "def grade(completion, answer):\n    return 9 ** 9**9\n")
    program = (
        "import sys\nfrom qrl.tasks import own\nif __name__ == '__main__':\n    own.GRADE_S = 600.0\n"
        "    print('began', flush=True)\n    own.grade_many(sys.argv[1], ['x'], ['1'], print)\n"
    )
    (tmp_path / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(Path(qrl.__file__).parents[1])}
    command = [sys.executable, tmp_path / "program.py", task]
    asking = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert asking.stdout.readline()
    until = time.monotonic() + 60
    while not (workers := children_with("spawn_main", asking.pid)):
        assert time.monotonic() < until
        time.sleep(0.1)
    while workers[0].cpu_times().user < 1.0:  # it has loaded the file, and hangs
        assert time.monotonic() < until
        time.sleep(0.1)
    asking.kill()
    asking.wait()
    assert not psutil.wait_procs(workers, 10)[1]


WRONG = {
    "no file": (None, "cannot be read"),
    "syntax": ("def load(:\n", r"loading it failed \(line 1, SyntaxError"),
    "import": ("\nimport nothing_of_this_name\n", r"line 2, ModuleNotFoundError"),
    "exit": ("import sys\nsys.exit(3)", r"line 2, SystemExit"),
    "no load": (GRADE, "no function load: expected load"),
    "no grade": (LOAD, "no function grade: expected grade"),
    "load raises": (
        "def load(split, n, seed):\n    return [1][n]\n" + GRADE,
        r"load\('train', 5, 0\) .*line 2, IndexError",
    ),
    "wrong arguments": ("def load(split):\n    return []\n" + GRADE, "TypeError"),
    "no list": ("def load(*_):\n    return 7\n" + GRADE, "a int, but a list of qrl"),
    "no questions": ("def load(*_):\n    return [7]\n" + GRADE, "a list with a int"),
    "empty": ("def load(*_):\n    return []\n" + GRADE, "returned none"),
    "no text": (LOAD.replace("str(i + 1)", "i + 1") + GRADE, "the answer 1, but a text"),
    "same ids": (LOAD.replace("str(i), f", "'a', f") + GRADE, "repeats the id"),
    "grade raises": (LOAD + "def grade(c, a):\n    return c.nothing\n", "grade on the solution .*AttributeError"),
    "grade returns text": (
        LOAD + "def grade(c, a):\n    return 'yes'\n",
        "returned 'yes', but True, False or a Verdict",
    ),
    "solutions are wrong": (LOAD + "def grade(c, a):\n    return c == a\n", "solution of question .* is wrong"),
    "grade hangs": (LOAD + "def grade(c, a):\n    while True: pass\n", "took longer than 0.2 s"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_file_does_wrong_is_a_sentence_before_anything_runs(name, tmp_path, monkeypatch):
    monkeypatch.setattr(own, "GRADE_S", 0.2)
    source, sentence = WRONG[name]
    task = written(tmp_path, source) if source is not None else str(tmp_path / "mine.py")
    with pytest.raises(BadInput, match=sentence):
        tasks.load(task, "train", 5, 0)


def test_data_beside_a_file_and_a_file_that_is_no_python_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"data = .* has no effect"):
        tasks.load(written(tmp_path, LOAD + GRADE), "train", 5, 0, str(tmp_path))
    for typed in ("chess", "mine.txt", ".py", "folder/"):
        with pytest.raises(BadInput, match=r"'task' is .*arithmetic, gsm8k, math, deepmath or FILE\.py"):
            recipe.load("tiny", {"task": typed})
    assert recipe.load("tiny", {"task": "a folder/mine.py"}).task == "a folder/mine.py"


def test_grade_uses_the_files_grader_and_its_errors_end_with_2(tmp_path, capsys):
    task, rows, out = written(tmp_path, LOAD + GRADE), tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps({"completion": text, "answer": 4}) + "\n" for text in ("so 4", "so 5")))
    main(["grade", "--task", task, str(rows), "--out", str(out)])
    assert "n = 2: strict 0.5000" in capsys.readouterr().out
    assert [json.loads(line)["correct"] for line in out.read_text().splitlines()] == [1, 0]
    with pytest.raises(SystemExit) as ended:
        main(["grade", "--task", written(tmp_path, LOAD), str(rows), "--out", str(out)])
    assert ended.value.code == 2 and "no function grade" in capsys.readouterr().err
    assert files.grade(rows, written(tmp_path, LOAD + GRADE)).frame["strict"].tolist() == [True, False]


def ran(script: Path, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(Path(qrl.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


UNGUARDED = """
import pandas as pd
import qrl
rows = [(12 if i % 5 < right else 13, name, i) for name, right in (("base", 2), ("grpo", 4)) for i in range(10)]
frame = pd.DataFrame({"completion": [f"so {said}" for said, _, _ in rows], "variant": [name for _, name, _ in rows]})
frame = frame.assign(answer="12", scheme="full", question=[i for _, _, i in rows])
print(qrl.grade(frame, task="mine.py").frame.groupby("variant")["correct"].mean().to_dict())
"""


@pytest.mark.process
def test_a_script_without_a_guard_grades_as_one_with_it(tmp_path):
    written(tmp_path, LOAD + GRADE)
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = ran(tmp_path / "script.py", tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == "{'base': 0.4, 'grpo': 0.8}", done.stderr[-2000:]


@pytest.mark.process
def test_a_script_that_its_own_processes_run_again_is_told_to_guard_its_main_code(tmp_path):
    written(tmp_path, LOAD + GRADE)
    (tmp_path / "script.py").write_text(
        UNGUARDED + "import multiprocessing\nmultiprocessing.get_context('spawn').Process(target=print).start()\n"
    )
    done = ran(tmp_path / "script.py", tmp_path)
    told = [line for line in done.stderr.splitlines() if line.startswith("qrl.errors.QrlError: ")]
    assert len(told) == 1 and 'if __name__ == "__main__":' in told[0]


def test_a_script_that_is_its_own_task_file_is_told_to_guard_its_main_code(tmp_path):
    script = str(tmp_path / "mine.py")
    source = f"{LOAD}{GRADE}\nfrom qrl import tasks\nif __name__ != 'guarded':\n    tasks.grade({script!r}, '1', '1')\n"
    with pytest.raises(BadInput, match=r'loads itself: .*if __name__ == "__main__":'):
        tasks.check_task(written(tmp_path, source))


def test_a_file_that_ends_the_process_that_loads_it_is_an_error_and_no_wrong_answer(tmp_path):
    dies = "\nimport multiprocessing, os\nif multiprocessing.parent_process():\n    os._exit(7)\n"
    task = written(tmp_path, LOAD + GRADE + dies)
    for call in (lambda: tasks.grade(task, "so 4", "4"), lambda: tasks.load(task, "train", 5, 0)):
        with pytest.raises(BadInput, match=r"^[^:]*mine\.py: .* ended while it loaded the file") as told:
            call()
        assert "__main__" not in str(told.value)


def test_a_process_that_ends_as_it_starts_is_no_fault_of_the_file(tmp_path, monkeypatch):
    task = written(tmp_path, LOAD + GRADE)
    monkeypatch.setattr(limits, "_begin", os.kill)  # with its own pid: of (pid, path, …), so that it raises
    with pytest.raises(QrlError, match="ended as it started, before it loaded the file") as told:
        tasks.load(task, "train", 5, 0)
    assert not isinstance(told.value, BadInput)


def test_results_that_nobody_reads_end_no_other_call(tmp_path):
    """A sentence about a wrong solution keeps its results alive for a while: their end must not be another file's."""
    first = written(tmp_path, LOAD + GRADE)
    slow = LOAD + "import time\ndef grade(completion, answer):\n    time.sleep(0.2)\n    return True\n"
    second = written(tmp_path, slow, "second.py")
    unread = limits.call_in_process(first, own._source(first), own.begin, own._graded, [("so 4", "4")] * 3, 60)
    assert next(unread).strict
    results = limits.call_in_process(second, own._source(second), own.begin, own._graded, [("so 4", "4")] * 3, 60)
    assert next(results).strict
    unread.close()
    assert [verdict.strict for verdict in results] == [True, True]
    assert tasks.grade(first, "so 4", "4").strict


FAILING = LOAD + "def grade(completion, answer):\n    return 1 / len(completion) and completion.endswith(answer)\n"


@pytest.mark.parametrize(("failed", "allowed", "code"), [(0, None, 0), (1, None, 1), (1, 0.02, 0), (60, None, 1)])
def test_grade_ends_with_1_above_the_faults_that_evaluate_allows(failed, allowed, code, tmp_path, capsys):
    task, rows, out = written(tmp_path, FAILING), tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    texts = [""] * failed + ["so 4"] * (60 - failed)
    rows.write_text("".join(json.dumps({"completion": text, "answer": 4}) + "\n" for text in texts))
    options = ["--max-grader-fault-rate", str(allowed)] if allowed else []
    words = ["grade", "--task", task, str(rows), "--out", str(out), *options]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not code:
            main(words)
            assert (f"{failed} of them not graded" in capsys.readouterr().out) == (failed > 0)
            files.grade(rows, task, max_grader_fault_rate=allowed)
        else:
            with pytest.raises(SystemExit) as ended:
                main(words)
            told = capsys.readouterr().err
            assert ended.value.code == 1 and f"on {failed} of 60" in told and "ZeroDivisionError" in told
            count = "1 time" if failed == 1 else f"{failed} times"
            with pytest.raises(QrlError, match=rf"\({count}: line \d+, ZeroDivisionError"):
                files.grade(rows, task)
    graded = [json.loads(line) for line in out.read_text().splitlines()]  # written all the same
    assert [row.get("fault") for row in graded] == ["error"] * failed + [None] * (60 - failed)
    assert all("ZeroDivisionError" in row["fault_cause"] for row in graded[:failed])


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_share_of_faults_is_a_share(rate, tmp_path):
    with pytest.raises(BadInput, match="max_grader_fault_rate"):
        files.grade("rows.jsonl", written(tmp_path, LOAD + GRADE), max_grader_fault_rate=rate)


def parts(settings: Recipe) -> tuple[dict[str, str], dict[str, str]]:
    """Return what the keys of a training and of a cell are made of."""
    found = keys.trained(settings, "base", "cpu"), keys.cell(settings, "grpo", "full", "weights", "cpu")
    return tuple(keys.PARTS[key] for key in found)


def test_keys_cover_a_files_text_and_not_its_place(tmp_path):
    def of(task: str, *rewards: str) -> Recipe:
        return Recipe(task=task, train=Train(rewards=("correct", *rewards)))

    (tmp_path / "elsewhere").mkdir()
    task, moved = (written(folder, LOAD + GRADE) for folder in (tmp_path, tmp_path / "elsewhere"))
    rewards = [f"{written(folder, EXAMPLE, 'r.py')}:short" for folder in (tmp_path, tmp_path / "elsewhere")]
    assert parts(of(task, rewards[0])) == parts(of(moved, rewards[1]))
    trained, cell = parts(of(task, rewards[0]))
    assert trained["task"] == "mine.py" and trained["train.rewards"] == "correct,r.py:short"
    assert trained["input file 0 (mine.py)"] == own.digest(task) == cell["input file 0 (mine.py)"]
    assert (
        own.digest(str(tmp_path / "r.py")) in trained.values()
        and own.digest(str(tmp_path / "r.py")) not in cell.values()
    )
    written(tmp_path, LOAD + GRADE + "# edited\n")
    edited = parts(of(task, rewards[0]))
    assert [
        {name for name in new if new[name] != old[name]} for new, old in zip(edited, (trained, cell), strict=True)
    ] == [{"input file 0 (mine.py)"}] * 2


def test_keys_of_recipes_without_files_hold_no_new_setting():
    new = {"top_p", "top_k", "min_p", "repetition_penalty", "mask_truncated", "soft_overlong_tokens", "max_resamples"}
    for found in parts(Recipe()):
        assert not {name for name in found if name.startswith("input file") or name.removeprefix("train.") in new}
    changed = Recipe(train=Train(top_p=0.9, max_resamples=2))
    assert {name.removeprefix("train.") for name in parts(changed)[0]} & new == {"top_p", "max_resamples"}


def test_data_files_that_a_task_names_belong_to_it(tmp_path):
    file = tmp_path / "words (1).py"
    file.write_text(f"FILES = ('words.txt',)\n{EXAMPLE}")
    with pytest.raises(BadInput, match=r"'words\.txt' in FILES, but there is no file"):
        tasks.label(str(file))
    labels = []
    for text in ("one", "two"):
        (tmp_path / "words.txt").write_text(text)
        own.read_source(str(file))
        labels.append(tasks.label(str(file)))
    assert len(set(labels)) == 2 and all(label.startswith("words__1_-") for label in labels)


@pytest.mark.parametrize(
    "files", ["5", "None", "('a/b.txt',)", "('..',)", "('',)", "('x' * 5000,)", "(5,)", "('a\\0b',)"]
)
def test_data_files_that_no_file_can_be_are_a_sentence(files, tmp_path):
    (tmp_path / "task.py").write_text(f"FILES = {files}\n{EXAMPLE}")
    with pytest.raises(BadInput, match="FILES"):
        tasks.label(str(tmp_path / "task.py"))


def test_what_a_grader_returns_is_made_plain_and_an_exit_is_a_fault(tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(
        "import re, sys\nimport numpy as np\nfrom qrl.tasks import Question, Verdict\n"
        "def load(split, n, seed):\n    return [Question('0', 'q', '#### 5', '5')]\n"
        "def grade(completion, answer):\n"
        "    if 'exit' in completion:\n        sys.exit(1)\n"
        "    if 'numpy' in completion:\n        return np.bool_(True)\n"
        "    found = re.search('#### (\\\\d)', completion)\n"
        "    return Verdict(found and found[1], strict=found and found[1] == answer, flexible=found)\n"
    )
    with pytest.warns(UserWarning, match="SystemExit"):
        none, numpy, ended, right = tasks.grade_many(str(file), ["?", "numpy", "exit", "#### 5"], ["5"] * 4)
    assert (none.strict, none.flexible, none.parsed) == (False, False, None)
    assert numpy.strict is True and ended.fault == "error" and right.strict is True


def test_the_documented_task_reads_a_model_that_answers_in_its_own_form(tmp_path):
    (tmp_path / "last_number.py").write_text(OWN_FORM)
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"question": "26 + 13?", "answer": "39"}\n')
    task = str(tmp_path / "last_number.py")
    (question,) = tasks.load(task, "heldout")
    assert (question.question, question.answer) == ("26 + 13?", "39")
    assert tasks.grade(task, "26 + 13 = 39", "39").strict
    assert not tasks.grade(task, "26 + 13 = 40", "39").strict
    assert not tasks.grade("gsm8k", "26 + 13 = 39", "39").strict
