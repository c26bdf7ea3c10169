"""Rewards by the grader that also evaluates: training and evaluation agree on what is right. And the user's own."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from qrl import tasks
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.recipe import Train, reward_name
from qrl.tasks import number, own, thinking
from qrl.tasks.question import leaked
from qrl.tasks.thinking import TAGS, Tags

TIMEOUTS, ERRORS = "grader_timeout_rate", "grader_error_rate"  # shares of a step's completions, as TRL logs them
LEAK = -0.25
_OVERLONG_SHARE = 5  # DAPO punishes within the last fifth of the allowed length: 4,096 of 20,480 tokens
_EXPECTED = "NAME(completions, answers), which returns a list with a number for each completion"
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_PHRASE = re.compile(r"\banswer(?:\s+is\b|\s*[:=])\s*:?\s*([^\n]{1,200}?)(?=\.?\s*(?:\n|$)|\.\s)", re.IGNORECASE)
_FORMULA = re.compile(r"(?<!\\)\$([^$]+)\$")
_CHECKED = 2  # solutions that a reward of the user's is tried on before the run


def check(settings: Train, questions: Sequence[tasks.Question]) -> None:
    """Raise BadInput if a function of the user's cannot be loaded, or fails on solutions.

    Args:
        questions: to try the functions on; none only loads them.
    """
    for path in own.files("", settings.rewards):
        own.read_source(path)
    for name in filter(_is_own, settings.rewards):
        reward, tried = _own(name), questions[:_CHECKED]
        if tried:
            try:
                reward([item.solution or item.answer for item in tried], [item.answer for item in tried])
            except QrlError as error:
                raise BadInput(str(error)) from error


def functions(
    task: str, names: Sequence[str] = ("correct",), settings: Train | None = None, tokens: Any = None, tags: Tags = TAGS
) -> list[Callable[..., list[float]]]:
    """Return TRL's reward functions of a task, which grade each batch once between them.

    None of ours reads what a model thinks before its answer; a function of the user's gets the whole completion.

    Args:
        task: a task; the training rows carry the columns `answer` and `question`.
        names: `correct` is 1.0 where the strict verdict is right, `format` 1.0 where the answer has the required form,
            right or wrong, `flexible` 1.0 where the answer is right wherever it is (`_claimed`), else 0.0; `leak` is
            -0.25 where a completion has chat markers or repeats the question, as evaluation counts it, else 0.0;
            `soft_overlong` falls from 0.0 to -1.0 over the last tokens that are allowed. FILE.py:FUNCTION is a
            function of the user's.
        settings: the lengths for `soft_overlong`, in tokens, the end token included; default: a recipe's own.
        tokens: the tokenizer, for `leak`, and for tags that are special tokens.
        tags: the model's tags around its thinking.

    Source: soft_overlong is equation 13 of DAPO (arXiv 2503.14476), as TRL computes it.
    """
    graded: dict[tuple, list[tasks.Verdict]] = {}
    tags_are_special = tokens is not None and bool(tags.tokens(tokens.all_special_tokens))

    def texts(completions: list, completion_ids: list[list[int]] | None) -> list[str]:
        """Return completions with the tags around their thinking: TRL drops special tokens."""
        plain = _texts(completions)
        if not tags_are_special or completion_ids is None:
            return plain
        raw = tokens.batch_decode(completion_ids, skip_special_tokens=False)
        special = tokens.all_special_tokens
        return [tags.text(*pair, special) for pair in zip(plain, raw, strict=True)]

    def verdicts(completions: list, answers: list[str], completion_ids: list[list[int]] | None) -> list[tasks.Verdict]:
        key = (tuple(texts(completions, completion_ids)), tuple(answers))
        if key not in graded:
            graded.clear()
            graded[key] = tasks.grade_many(task, *key, tags=tags)
        return graded[key]

    def correct(
        completions: list,
        answer: list[str],
        completion_ids: list[list[int]] | None = None,
        log_metric: Callable | None = None,
        **_,
    ) -> list[float]:
        batch = verdicts(completions, answer, completion_ids)
        if log_metric is not None:
            for name, fault in ((TIMEOUTS, "timeout"), (ERRORS, "error")):
                log_metric(name, sum(verdict.fault == fault for verdict in batch) / len(batch))
        return [float(verdict.strict) for verdict in batch]

    def format(  # TRL logs a reward under its function's name
        completions: list, answer: list[str], completion_ids: list[list[int]] | None = None, **_
    ) -> list[float]:
        batch = verdicts(completions, answer, completion_ids)
        return [float(verdict.parsed is not None) for verdict in batch]

    def flexible(
        completions: list, answer: list[str], completion_ids: list[list[int]] | None = None, **_
    ) -> list[float]:
        batch = verdicts(completions, answer, completion_ids)
        answer_parts = [thinking.answer(text, tags) for text in texts(completions, completion_ids)]
        claims = [_claimed(task, *pair) for pair in zip(answer_parts, batch, strict=True)]
        indices = [index for index, claim in enumerate(claims) if claim is not None]
        claim_verdicts = tasks.grade_many(
            task, [claims[index] for index in indices], [answer[index] for index in indices]
        )
        is_right = {index: verdict.strict for index, verdict in zip(indices, claim_verdicts, strict=True)}
        return [float(is_right.get(index, verdict.flexible)) for index, verdict in enumerate(batch)]

    def leak(completions: list, completion_ids: list[list[int]], question: list[str], **_) -> list[float]:
        special, markers = set(tokens.all_special_ids), [token for token in tokens.all_special_tokens if token]
        bodies = (ids[:-1] if special.intersection(ids[-1:]) else ids for ids in completion_ids)  # TRL keeps the end
        answers = (hf.completion(tokens, ids, set(), special) for ids in bodies)
        rewards = []
        for text, answer in zip(question, answers, strict=True):
            is_leak = leaked(text, answer.text, answer.raw, markers, tags)
            rewards.append(LEAK if is_leak else 0.0)
        return rewards

    built_in = {"correct": correct, "format": format, "flexible": flexible, "leak": leak}
    if "soft_overlong" in names:
        built_in["soft_overlong"] = _soft_overlong(settings or Train())
    return [_as_trl(name) if _is_own(name) else built_in[name] for name in names]


def _claimed(task: str, completion: str, verdict: tasks.Verdict) -> str | None:
    """Return what a completion claims, in the form that its task grades; None where the flexible verdict decides.

    The completion comes without its thinking. The claim is the content of the last <answer>; else the strict answer;
    else what follows the last "answer is"; else the flexible verdict judges the last number or box. A file's grader
    judges flexibly by its own rules.
    """
    if own.is_file(task):
        return None
    is_boxed = task in tasks.BOXED
    tags = _TAG.findall(completion)
    tagged = tags[-1].strip() if tags else ""
    if tagged:
        return rf"\boxed{{{tagged}}}" if is_boxed else f"#### {tagged}"
    if verdict.parsed is not None:
        return completion
    phrases = _PHRASE.findall(completion)
    if not phrases:
        return None
    return _boxed_phrase(phrases[-1]) if is_boxed else _numbered_phrase(phrases[-1])


def _boxed_phrase(phrase: str) -> str:
    """Return what follows "answer is" as a box: its formula, if it has one."""
    formula = _FORMULA.search(phrase)
    content = formula[1] if formula else phrase.strip(" $")
    return rf"\boxed{{{content}}}"


def _numbered_phrase(phrase: str) -> str | None:
    """Return the first number of what follows "answer is", behind the last equals sign; None without one."""
    values = number.numbers(number.tidy(phrase.rpartition("=")[2]))
    if values and values[0] is not None:
        return f"#### {number.text(values[0])}"
    return None


def _soft_overlong(settings: Train) -> Callable[..., list[float]]:
    from trl.rewards import get_soft_overlong_punishment

    longest = settings.max_completion_tokens
    punish = get_soft_overlong_punishment(longest, settings.soft_overlong_tokens or max(1, longest // _OVERLONG_SHARE))
    punish.__name__ = "soft_overlong"
    return punish


def _is_own(name: str) -> bool:
    return ":" in name


def _own(name: str) -> Callable[[list[str], list[str]], list[float]]:
    """Return the function of FILE.py:FUNCTION, whose faults are sentences.

    Raises:
        BadInput: the file cannot be loaded, or has no such function.
    """
    path, _, called = name.rpartition(":")
    own.function(path, called, _EXPECTED.replace("NAME", called))

    def checked(completions: list[str], answers: list[str]) -> list[float]:
        values = own.reward(path, called, completions, answers)
        if len(values) != len(completions):
            wrong = f"returned {len(values)} rewards for {len(completions)} completions: return one for each"
            raise QrlError(f"{path}: {called} {wrong}.")
        if not all(map(math.isfinite, values)):
            first = next(value for value in values if not math.isfinite(value))
            raise QrlError(f"{path}: {called} returned {first}, but finite numbers were expected: correct it.")
        return values

    return checked


def _as_trl(name: str) -> Callable[..., list[float]]:
    """Return a function of the user's with TRL's signature, and the name that TRL logs it by."""
    reward = _own(name)

    def adapted(completions: list, answer: list[str], **_) -> list[float]:
        return reward(_texts(completions), list(answer))

    adapted.__name__ = reward_name(name)
    return adapted


def _texts(completions: list) -> list[str]:
    """Return completions as texts, which TRL hands over as conversations."""
    return [item[0]["content"] if isinstance(item, list) else item for item in completions]
