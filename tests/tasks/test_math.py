"""The task math: cases as data, real gold answers right and perturbed ones wrong, no text that hangs or crashes it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import qrl
from qrl import tasks
from qrl.errors import BadInput, QrlError
from qrl.tasks.math import latex
from qrl.tasks.math import pool as math_pool
from qrl.train import reward

CASES = json.loads((Path(qrl.__file__).parents[1] / "tests" / "cases" / "math.json").read_text())
BOMBS = (
    r"10^{10^{10}}",
    r"9^{9^{9^9}}",
    r"10000000!",
    r"\binom{10^9}{10^8}",
    r"(x+1)^{1000}",
    "(" * 300 + "5" + ")" * 300,
)


def boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def math500() -> list[dict]:
    if "QRL_DATA_DIR" not in os.environ:
        pytest.skip("QRL_DATA_DIR names no folder with math500/test.jsonl")
    return [
        json.loads(line)
        for line in (Path(os.environ["QRL_DATA_DIR"]) / "math500" / "test.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def verdicts():
    return tasks.grade_many("math", [case["completion"] for case in CASES], [case["answer"] for case in CASES])


@pytest.mark.process
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case["why"][:60] for case in CASES])
def test_cases(verdicts, index):
    case, verdict = CASES[index], verdicts[index]
    fields = (verdict.parsed, verdict.strict, verdict.flexible, verdict.fault)
    assert fields == (case["parsed"], case["strict"], case["flexible"], None), case["why"]


def test_there_are_enough_cases_and_each_says_why():
    assert len(CASES) >= 150
    assert len({case["why"] for case in CASES}) == len(CASES)


@pytest.mark.process
def test_every_gold_answer_of_math500_grades_as_right():
    rows = math500()
    answers = [row["answer"] for row in rows]
    assert len(rows) == 500
    for completions in ([boxed(answer) for answer in answers], [row["solution"] for row in rows]):
        for row, verdict in zip(rows, tasks.grade_many("math", completions, answers), strict=True):
            assert verdict.strict, row["answer"]
            assert verdict.flexible, row["answer"]
            assert verdict.fault is None


# Perturbations that keep the value: minus zero, another power of a unit (units are not graded, since models omit them),
# and a square bracket beside infinity, which is in no interval.
EQUAL = {
    ("0", "-(0)"),
    (r"864 \mbox{ inches}^2", r"864 \mbox{ inches}^3"), (r"864 \mbox{ inches}^2", r"864 \mbox{ inches}^1"),
    (r"15\mbox{ cm}^2", r"15\mbox{ cm}^3"), (r"15\mbox{ cm}^2", r"15\mbox{ cm}^1"),
    (r"(-\infty, 2) \cup (3, \infty)", r"[-\infty, 2) \cup (3, \infty)"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty, 2) \cup (3, \infty]"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.process
def test_perturbed_gold_answers_of_math500_grade_as_wrong():
    pairs = [(row["answer"], variant) for row in math500() for variant in perturbed(row["answer"])]
    assert len(pairs) > 1900
    graded = tasks.grade_many("math", [boxed(variant) for _, variant in pairs], [gold for gold, _ in pairs])
    assert {pair for pair, verdict in zip(pairs, graded, strict=True) if verdict.strict} == EQUAL
    assert not any(verdict.fault for verdict in graded)


def perturbed(answer: str) -> list[str]:
    """Return an answer with each number ±1, negated, with each letter replaced, and with ends and brackets swapped."""
    variants = []
    for number in re.finditer(r"\d+", answer):
        digits = number[0]
        for value in (int(digits) + 1, int(digits) - 1):
            written = str(value).zfill(len(digits)) if digits.startswith("0") else str(value)
            variants += [answer[: number.start()] + written + answer[number.end() :]] if value >= 0 else []
    if re.search(r"\d|[a-z]", answer):
        variants.append(f"-({answer})")
    if word := re.fullmatch(r"\\text\{(.*)\}", answer):
        for place in (place for place, letter in enumerate(word[1], 6) if letter.isalpha()):
            variants.append(answer[:place] + ("y" if answer[place] == "z" else "z") + answer[place + 1 :])
    if bracketed := re.fullmatch(r"(?:\\left)?([(\[])(.*),(.*?)(?:\\right)?([)\]])", answer):
        left, first, second, right = bracketed.groups()
        variants.append(f"{left}{second},{first}{right}")
        variants.append(f"{'[' if left == '(' else '('}{first},{second}{right}")
        variants.append(f"{left}{first},{second}{']' if right == ')' else ')'}")
    alone = r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])"
    for letter in sorted(set(re.findall(alone, re.sub(r"\\[A-Za-z]+(\{[^}]*\})?", "", answer)))):
        variants.append(re.sub(alone.replace("[a-zA-Z](", f"{letter}("), "w", answer))
    return variants


@pytest.mark.slow
@pytest.mark.process
def test_answers_that_never_end_are_counted_and_do_not_delay_the_others(monkeypatch):
    monkeypatch.setattr(math_pool, "CPU_S", 1.0)
    math_pool.close()  # start with new workers
    completions = [boxed(text) for bomb in BOMBS for text in (bomb, r"\frac{2}{12}", r"\frac{1}{6}")]
    began = time.monotonic()
    graded = tasks.grade_many("math", completions, [r"\frac{1}{6}"] * len(completions))
    assert time.monotonic() - began < 60
    assert [verdict.fault for verdict in graded[::3]] == ["timeout"] * len(BOMBS)
    assert not any(verdict.strict or verdict.flexible for verdict in graded[::3])
    assert all(verdict.strict and verdict.fault is None for verdict in [*graded[1::3], *graded[2::3]])


@pytest.mark.process
def test_memory_is_bounded_and_a_worker_that_dies_is_replaced():
    from qrl.tasks.math import worker

    pool = math_pool._pool()
    with pytest.raises(MemoryError):
        pool.schedule(bytearray, args=(math_pool.MEMORY_BYTES,)).result()
    with pytest.raises(OSError, match="termination"):
        pool.schedule(os._exit, args=(7,)).result()
    assert tasks.grade("math", boxed(r"\frac{2}{12}"), r"\frac{1}{6}").strict
    modules = pool.schedule(eval, args=("set(__import__('sys').modules)",)).result()
    assert worker.__name__ in modules
    assert not {"torch", "transformers", "mlflow"} & modules


@pytest.mark.process
@pytest.mark.parametrize("when", ["idle", "sending", "always"])
def test_workers_that_are_killed_without_a_task_are_replaced(when, monkeypatch):
    texts = [boxed(rf"\frac{{{i}}}{{{2 * i + 2}}}") for i in range(3, 3 + 4 * math_pool.BATCH)]
    answers = [rf"\frac{{{2 * i}}}{{{4 * i + 4}}}" for i in range(3, 3 + 4 * math_pool.BATCH)]
    original, calls = math_pool._pool, []

    def kill():
        pool = original()
        for pid in list(pool._pool_manager.worker_manager.workers):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while pool.active and time.monotonic() < deadline:  # Pebble notices, and gives the whole pool up
            time.sleep(0.01)
        assert not pool.active

    def broken():
        original()._pool_manager.handle_broken_pool(BrokenProcessPool("all workers died"))

    def killed():
        calls.append(when)
        if when == "always" or len(calls) == 3:
            broken()
        return original()

    assert tasks.grade("math", texts[0], answers[0]).strict  # the pool is there
    if when == "idle":
        kill()
    else:
        monkeypatch.setattr(math_pool, "_pool", killed)
    if when == "always":
        with pytest.raises(QrlError, match="end as they start"):
            tasks.grade_many("math", texts, answers)
    else:
        assert all(verdict.strict for verdict in tasks.grade_many("math", texts, answers))


@pytest.mark.process
def test_a_batch_that_a_broken_pool_forgot_is_not_waited_for_forever():
    tasks.grade("math", boxed(r"\frac{2}{12}"), r"\frac{1}{6}")
    math_pool._pool()._pool_manager.handle_broken_pool(BrokenProcessPool("all workers died"))
    with pytest.raises(BrokenProcessPool):
        math_pool._result(Future())
    assert tasks.grade("math", boxed(r"\frac{2}{12}"), r"\frac{1}{6}").strict


@pytest.mark.process
def test_verdicts_do_not_depend_on_order_or_on_other_answers(verdicts):
    backwards = CASES[::-1]
    graded = tasks.grade_many(
        "math", [case["completion"] for case in backwards], [case["answer"] for case in backwards]
    )
    assert graded[::-1] == verdicts
    some = range(0, len(CASES), 10)
    assert [tasks.grade("math", CASES[i]["completion"], CASES[i]["answer"]) for i in some] == [
        verdicts[i] for i in some
    ]


def test_off_the_main_thread_and_as_a_reward():
    texts = [boxed(r"\frac{2}{12}"), boxed("7"), "", boxed(r"\frac{1}{6}") + boxed("2")]
    logged, results = {}, []
    correct = reward.functions("math")[0]
    thread = threading.Thread(
        target=lambda: results.append(correct(texts, [r"\frac{1}{6}"] * 4, log_metric=logged.__setitem__))
    )
    thread.start()
    thread.join(60)
    assert results == [[1.0, 0.0, 0.0, 0.0]]
    assert logged == {reward.TIMEOUTS: 0.0, reward.ERRORS: 0.0}


@pytest.mark.process
def test_grader_failures_reach_trainings_metrics(monkeypatch):
    monkeypatch.setattr(math_pool, "CPU_S", 0.5)
    logged = {}
    assert reward.functions("math")[0]([boxed(BOMBS[0]), boxed("5")], ["5", "5"], log_metric=logged.__setitem__) == [
        0.0,
        1.0,
    ]
    assert logged == {reward.TIMEOUTS: 0.5, reward.ERRORS: 0.0}


UNITS = [
    "\\boxed{",
    "\\boxed{5}",
    "{",
    "}",
    "\\boxed{5",
    "5 ",
    "$",
    "\\boxed ",
    "\\boxed{1}{",
    "\\\\",
    "\\frac{1}{",
    "é",
    "$5$ ",
    "\ud800",
    "(",
    "^",
]


@pytest.mark.process
@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_takes_linear_time_and_earns_nothing(unit):
    spam = unit * (1_000_000 // len(unit))
    began = time.process_time()
    for completion in (spam, "\\boxed{" + spam, "\\boxed{" + spam + "}"):
        assert not tasks.grade("math", completion, r"\frac{1}{6}").strict
    assert time.process_time() - began < 10


def test_ten_thousand_boxes_and_ten_thousand_nested_ones():
    began = time.process_time()
    assert not tasks.grade("math", "".join(boxed(str(i)) for i in range(10_000)), "5").strict
    assert tasks.grade("math", boxed("5") * 10_000, "5").strict
    assert not tasks.grade("math", "\\boxed{" * 10_000 + "5" + "}" * 10_000, "6").strict
    assert time.process_time() - began < 5


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=300))
@example("\\boxed{")
@example("}{\\boxed{}}")
@example("\\boxed{\ud800}")
def test_no_text_raises_on_its_way_to_the_pool(text):
    for content in [*latex.boxes(text), text]:
        once = latex.normal(content)
        assert latex.same(once, once)
        latex.same("5", once)


@given(st.integers(-(10**12), 10**12))
def test_every_way_to_write_an_integer_is_the_same_number(number):
    for written in (
        f"{number}",
        f"{number:,}",
        f"{number}.0",
        f" {number}. ",
        f"\\${number}" if number >= 0 else f"{number}",
    ):
        assert tasks.grade("math", boxed(written), str(number)).strict


@pytest.mark.slow
@pytest.mark.process
def test_workers_end_with_their_process():
    code = (
        "import os, signal, sys\nfrom qrl import tasks\nfrom qrl.tasks.math import pool as math_pool\n"
        "assert tasks.grade('math', r'\\boxed{\\frac{2}{12}}', r'\\frac{1}{6}').strict\n"
        "print(*math_pool._pool()._pool_manager.worker_manager.workers, flush=True)\n"
        "os.kill(os.getpid(), int(sys.argv[1])) if int(sys.argv[1]) else None\n"
    )
    root = str(Path(qrl.__file__).parents[1])
    for signum in (0, 15, 9):
        done = subprocess.run(
            [sys.executable, "-c", code, str(signum)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=root,
            check=False,
        )
        assert done.returncode == -signum, done.stderr
        workers = [int(word) for word in done.stdout.split()]
        assert workers
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
@pytest.mark.process
def test_a_command_that_waits_for_bombs_stops_on_sigterm(tmp_path):
    rows = [
        {"completion": boxed(f"9^{{9^{{9^{{{i}}}}}}}"), "answer": r"\frac{1}{6}"} for i in range(9, 209)
    ]  # 10 min of CPU
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [sys.executable, "-m", "qrl", "grade", "--task", "math", "in.jsonl", "--out", "out.jsonl"]
    environment = os.environ | {"PYTHONPATH": str(Path(qrl.__file__).parents[1])}
    command = psutil.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    deadline, family = time.monotonic() + 60, []
    while len(family) < 3 and time.monotonic() < deadline:  # the server, a worker, and the resource tracker
        time.sleep(0.1)
        family = command.children(recursive=True)
    time.sleep(1)
    family = command.children(recursive=True)
    command.terminate()
    assert command.wait(20) == 143
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.process
def test_a_script_without_a_guard_grades_as_one_with_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from qrl import tasks\n"
        r"print(tasks.grade('math', r'\boxed{\frac{2}{12}}', r'\frac{1}{6}').strict)"
        "\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(qrl.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0 and done.stdout == "True\n", done.stderr[-2000:]  # once: no process ran it again


def test_an_empty_or_too_long_gold_answer_is_rejected():
    for gold in ("", " ", "$$", "1" * 1001):
        with pytest.raises(BadInput, match="gold answer"):
            tasks.grade("math", boxed("5"), gold)
