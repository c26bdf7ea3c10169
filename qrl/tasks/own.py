"""Files of Python that the user brings, loaded by path here and nowhere else: task files, and rewards.

A task file has two functions, `load(split, n, seed)` and `grade(completion, answer)`; a reward is a function of any
file. What they do wrong becomes a sentence with their line. Nothing that comes with a checkpoint is loaded as code.
"""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from hashlib import file_digest, sha256
from pathlib import Path
from random import Random
from types import ModuleType

from qrl.errors import BadInput, QrlError, first_line
from qrl.files import reading
from qrl.tasks import limits
from qrl.tasks.question import Question, Verdict

GRADE_S = 5.0  # longest time for one completion; a grader that needs more has probably hung
REWARD_S = 60.0  # for the completions of a step, or GRADE_S for each
SIGNATURES = {
    "load": "load(split, n, seed), which returns a list of qrl.tasks.Question",
    "grade": "grade(completion, answer), which returns True, False or a qrl.tasks.Verdict",
}
_sources: dict[str, bytes] = {}  # path → text
_digests: dict[str, str] = {}  # path → sha256
_LOADING = "__qrl_loading__"  # attribute of a module whose text is still executed
_CHECKED_SOLUTIONS = 8  # solutions of a split that must be graded as right
_SHOWN_CHARACTERS = 80  # last characters of a completion, shown where a grader returns only right or wrong
_ERROR = Verdict(None, False, False, "error")


def is_file(task: str) -> bool:
    """Return whether a task is a file of the user's and not a name of ours."""
    return task.endswith(".py")


def files(task: str, rewards: Sequence[str] = ()) -> list[str]:
    """Return the paths of the files that a task and rewards name, each once."""
    paths = [task] if is_file(task) else []
    for name in rewards:  # a reward of a file is FILE.py:FUNCTION, one of ours a name
        if ":" in name:
            paths.append(name.rpartition(":")[0])
    return list(dict.fromkeys(paths))


def digest(path: str) -> str:
    """Return the sha256 of a file and of the data files that it names in `FILES`; raise BadInput if one is missing."""
    if path not in _digests:
        total = sha256(_source(path))
        for data_file in _data_files(path):
            with data_file.open("rb") as content:
                total.update(file_digest(content, "sha256").digest())
        _digests[path] = total.hexdigest()
    return _digests[path]


def _data_files(path: str) -> list[Path]:
    """Return the paths of the data files that a file names in `FILES`; raise BadInput if one is not beside it."""
    file_names = getattr(_module(path, _source(path)), "FILES", ())
    if isinstance(file_names, str):
        file_names = [file_names]
    if not isinstance(file_names, list | tuple | set) or not all(isinstance(name, str) for name in file_names):
        raise BadInput(f"{path} has FILES = {file_names!r:.80}, but a tuple of file names was expected.")

    paths = []
    for name in file_names:
        data_file = Path(path).parent / name
        if Path(name).name != name or not os.path.isfile(data_file):
            absent = f"{path} names {name!r:.80} in FILES, but there is no file {str(data_file)[:200]}"
            raise BadInput(f"{absent}: put it there.")
        paths.append(data_file)
    return paths


def label(task: str) -> str:
    """Return the name under which results of a task are kept: a file's has its digest, so an edit makes another task.

    Raises:
        BadInput: there is no such file.
    """
    if not is_file(task):
        return task
    stem = re.sub(r"[^\w.-]", "_", Path(task).stem)  # MLflow refuses some names
    return f"{stem}-{digest(task)[:8]}"


def function(path: str, name: str, expected: str = "") -> Callable:
    """Return a function of a file; raise BadInput if the file cannot be loaded or has no such function."""
    attribute = getattr(_module(path, _source(path)), name, None)
    if not callable(attribute):
        raise BadInput(f"{path} has no function {name}: expected {SIGNATURES.get(name, expected)}.")
    return attribute


def check_task_file(task: str) -> None:
    """Read a task file anew; raise BadInput if it cannot be loaded, or lacks a function."""
    read_source(task)
    for name in SIGNATURES:
        function(task, name)


def load(task: str, split: str, n: int | None, seed: int) -> list[Question]:
    """Return the questions of a task file, n at most, with ids that tell tasks apart.

    Raises:
        BadInput: `load` fails, returns something else than different questions, or `grade` fails on a solution, or
            judges it to be wrong.
    """
    check_task_file(task)
    call = f"load({split!r}, {n}, {seed})"
    with blaming(task, call):
        questions = function(task, "load")(split, n, seed)
    _check_questions(task, call, questions)

    sample = questions
    if n is not None and n < len(questions):
        sample = Random(seed).sample(questions, n)
    _check_solutions(task, sample[:_CHECKED_SOLUTIONS])
    return [replace(question, id=f"{label(task)}-{split}-{question.id}") for question in sample]


def _check_questions(task: str, call: str, questions: object) -> None:
    """Raise BadInput if what `load` returned is not a list of different questions with all their texts."""
    if not isinstance(questions, list):
        raise _not_questions(task, f"a {type(questions).__name__}")
    for item in questions:
        if not isinstance(item, Question):
            raise _not_questions(task, f"a list with a {type(item).__name__}")
    for question in questions:
        for field in ("id", "question", "answer", "solution"):
            text = getattr(question, field)
            # A solution may be empty: not every data set has worked ones.
            if not isinstance(text, str) or not (text.strip() or field == "solution"):
                raise BadInput(f"{task}: question {question.id!r} has the {field} {text!r}, but a text was expected.")
    if not questions:
        raise BadInput(f"{task}: {call} returned none: return at least one.")
    if len({question.id for question in questions}) < len(questions):
        raise BadInput(f"{task}: {call} repeats the id of a question: give each its own.")


def _not_questions(task: str, returned: str) -> BadInput:
    return BadInput(f"{task}: load returned {returned}, but a list of qrl.tasks.Question was expected.")


def grade_many(
    task: str, completions: Sequence[str], answers: Sequence[str], progress: Callable[[int], object]
) -> list[Verdict]:
    """Return a verdict on each completion by a task file's `grade`; one that fails or hangs is wrong and has a `fault`.

    It runs in a process of its own, which its limit of time ends whatever it does.

    Raises:
        BadInput: the file cannot be loaded, or has no `grade`.
        QrlError: its process ended before it graded.
    """
    function(task, "grade")
    pairs = list(zip(completions, answers, strict=True))
    verdicts = []
    for verdict in limits.call_in_process(task, _source(task), begin, _graded, pairs, GRADE_S):
        if verdict is limits.LATE:
            verdicts.append(Verdict(None, False, False, "timeout", f"took longer than {GRADE_S:g} s"))
        elif isinstance(verdict, str):  # printed once for each line that raises it
            warnings.warn(f"{task}: grade failed, which counts as wrong ({verdict}).", stacklevel=2)
            verdicts.append(replace(_ERROR, fault_cause=verdict))
        else:
            verdicts.append(verdict)
        progress(1)
    return verdicts


def reward(path: str, name: str, completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return what a reward of a file gives to completions, from a process of its own.

    Raises:
        QrlError: it failed, or took longer than its time.
    """
    seconds = max(REWARD_S, GRADE_S * len(completions))
    arguments = (name, list(completions), list(answers))
    (rewards,) = limits.call_in_process(path, _source(path), begin, _rewarded, [arguments], seconds)
    if rewards is limits.LATE:
        duration = f"took longer than {seconds:g} s for {len(completions)} completions"
        raise QrlError(f"{path}: {name} {duration}: make it faster.")
    if isinstance(rewards, str):
        raise QrlError(f"{path}: {name} failed ({rewards}): correct it.")
    return rewards


@contextmanager
def blaming(path: str, call: str) -> Iterator[None]:
    """Raise what the user's code raises as BadInput, with its line; `call` names what was called."""
    try:
        yield
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"{path}: {call} failed ({reason(error, path)}): correct it.") from error


def reason(error: BaseException, path: str) -> str:
    """Return an error's kind and message, with the line of a file where it was raised or that called what raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno)
    position = f"line {lines[-1]}, " if lines else ""
    return f"{position}{type(error).__name__}: {first_line(error)[:200]}"


def _check_solutions(task: str, questions: Sequence[Question]) -> None:
    """Raise BadInput if `grade` fails on worked solutions, or judges one to be wrong."""
    pairs = [(question.solution or question.answer, question.answer) for question in questions]
    verdicts = limits.call_in_process(task, _source(task), begin, _graded, pairs, GRADE_S)
    for question, verdict in zip(questions, verdicts, strict=True):
        call = f"grade on the solution of question {question.id!r}"
        if verdict is limits.LATE:
            raise BadInput(f"{task}: {call} took longer than {GRADE_S:g} s: make it faster.")
        if isinstance(verdict, str):
            raise BadInput(f"{task}: {call} failed ({verdict}): correct it.")
        if question.solution.strip() and not verdict.strict:
            expected = "expected a solution that ends in the form that grade reads, or an empty one"
            raise BadInput(f"{task}: {call} is wrong, its answer being {question.answer[:80]!r}: {expected}.")


def _graded(path: str, completion: str, answer: str) -> Verdict | str:
    """Return a grader's verdict, or how it failed; in the file's process.

    Where it returns only True or False, any text counts as readable, since the form of an answer is unknown.
    """
    try:
        verdict = function(path, "grade")(completion, answer)
        if type(verdict).__name__ in ("bool", "bool_"):  # numpy's too
            return Verdict(completion.strip()[-_SHOWN_CHARACTERS:] or None, bool(verdict), bool(verdict))
        if not isinstance(verdict, Verdict):
            raise TypeError(f"grade returned {verdict!r:.80}, but True, False or a Verdict was expected")
        parsed = None if verdict.parsed is None else str(verdict.parsed)
        fault = verdict.fault if verdict.fault is None else str(verdict.fault)
        return Verdict(parsed, bool(verdict.strict), bool(verdict.flexible), fault)
    except (Exception, SystemExit) as error:  # of any kind
        return reason(error, path)


def _rewarded(path: str, name: str, completions: list[str], answers: list[str]) -> list[float] | str:
    """Return a reward's numbers, or how it failed; in the file's process."""
    try:
        return [float(value) for value in function(path, name)(completions, answers)]
    except (Exception, SystemExit) as error:
        return reason(error, path)


def begin(path: str, source: bytes) -> None:
    """Load a file's very text in the process that calls its functions; the first call reports an error in it."""
    _sources[path] = source
    with suppress(BadInput):
        _module(path, source)


def _source(path: str) -> bytes:
    return _sources[path] if path in _sources else read_source(path)


def read_source(path: str) -> bytes:
    """Read a file anew; between two calls this process uses the text that it has, so that no edit changes a run.

    Raises:
        BadInput: there is no such file, or it cannot be read.
    """
    _digests.pop(path, None)
    try:
        reading.check_regular_file(Path(path), reading.MIB)
        source = Path(path).read_bytes()
        reading.check_encoding(path, source)
        _sources[path] = source
    except OSError as error:
        hint = "a run that used one keeps it in its artifacts, below files/"
        raise BadInput(
            f"The file {path} cannot be read ({error.strerror}): give the path of a .py file; {hint}."
        ) from None
    return _sources[path]


@cache
def _module(path: str, source: bytes) -> ModuleType:
    """Return the module of the text that the digest is of; an import would read the file again, or a cache."""
    name = f"qrl_own_{sha256(source).hexdigest()[:16]}"
    if getattr(sys.modules.get(name), _LOADING, False):  # a script that is its own task file, and grades
        raise BadInput(f'{path} loads itself: put its main code below `if __name__ == "__main__":`.')
    module = ModuleType(name)
    module.__file__ = path
    setattr(module, _LOADING, True)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    with blaming(path, "loading it"):
        exec(compile(source, path, "exec"), module.__dict__)
    delattr(module, _LOADING)
    return module
