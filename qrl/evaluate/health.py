"""Whether a cell's answers are healthy: in the first study every answer was cut off, and nothing stopped it.

A limit counts as broken if the 95 % interval of the rate excludes it, so that one answer of 32 breaks none. At full
precision a broken limit voids the cell: prompt, template or length is wrong. If a variant is healthy at full precision
and not under a scheme, quantization did that: the cell counts, its unfinished answers are wrong, and it is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qrl import names, stats
from qrl.recipe import Evaluate
from qrl.stats.text import percent

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 2  # answers that broke a limit, in a message
_UNRENDERED = (
    "prompts not rendered with the model's chat template or with another prompt than it was trained on (--prompt), or "
)
_NO_END = f"{_UNRENDERED}an end token that the model was not trained on"
_TOO_LONG = "evaluate.max_new_tokens is too small for this model, or answers never end"
_NO_FORMAT = f"{_UNRENDERED}not asking for the format that the task grades, or weights damaged by quantization"
_NO_VERDICT = "expressions that the grader cannot evaluate, from weights damaged by training or quantization"


@dataclass(frozen=True)
class Limit:
    """A rate of answers, and the recipe's limit for it."""

    setting: str  # its name in the recipe; `min_…` is a least rate
    cause: str  # the likely one, if it is broken
    bad: str  # what its answers are, after "16 %"
    is_bad: Callable[[pd.DataFrame], pd.Series]  # which rows these are
    of_good: bool = False  # the rate is that of the other answers


def _unfinished(frame: pd.DataFrame) -> pd.Series:
    return frame["finish_reason"] != "stop"


LIMITS = {  # metric → its limit
    names.EOS_RATE: Limit("min_eos_rate", _NO_END, "unfinished", _unfinished, of_good=True),
    names.TRUNCATION_RATE: Limit("max_truncation_rate", _TOO_LONG, "unfinished", _unfinished),
    names.PARSE_RATE: Limit(
        "min_parse_rate", _NO_FORMAT, "unreadable", lambda frame: frame["parsed"].isna(), of_good=True
    ),
    names.PROMPT_LEAK_RATE: Limit(
        "max_prompt_leak_rate", _NO_END, "gone on with a new prompt", lambda frame: frame["leaked"] == 1
    ),
    names.GRADER_FAULT_RATE: Limit(
        "max_grader_fault_rate", _NO_VERDICT, "beyond the grader", lambda frame: frame["fault"].notna()
    ),
}


def limits(settings: Evaluate) -> dict[str, float]:
    """Return the limits of health by their names in the recipe."""
    return {limit.setting: getattr(settings, limit.setting) for limit in LIMITS.values()}


def rates(frame: pd.DataFrame) -> dict[str, float]:
    """Return the shares of answers that parse, end, are truncated, leak or break the grader, in 0..1 by metric name."""
    shares = {}
    for metric, limit in LIMITS.items():
        bad = float(limit.is_bad(frame).mean())
        shares[metric] = 1 - bad if limit.of_good else bad
    return shares


def broken(metrics: Mapping[str, float], settings: Evaluate, n: int) -> list[str]:
    """Return the metrics whose limits are broken: the 95 % interval of the rate excludes the limit.

    Args:
        metrics: as `rates` returns them.
        settings: the recipe's, with the limits.
        n: answers that the rates are of.
    """
    beyond = []
    for metric, limit in LIMITS.items():
        allowed = getattr(settings, limit.setting)
        known = stats.accuracy(round(metrics[metric] * n), n)
        if known.high < allowed if limit.of_good else known.low > allowed:
            beyond.append(metric)
    return beyond


def problems(metrics: Mapping[str, float], settings: Evaluate, n: int) -> list[str]:
    """Return a sentence for each broken limit, with rate, limit and likely cause; arguments as for `broken`."""
    sentences = []
    for metric in broken(metrics, settings, n):
        limit = LIMITS[metric]
        side = "below" if limit.of_good else "above"
        allowed = f"{side} the limit evaluate.{limit.setting} = {getattr(settings, limit.setting):g}"
        rate = f"{metric} is {metrics[metric]:.3f} (n = {n})"
        sentences.append(f"{rate}, and its 95 % interval is {allowed}; likely cause: {limit.cause}.")
    return sentences


def note(metrics: Mapping[str, float], full: Mapping[str, float], beyond: list[str]) -> str:
    """Return what quantization did to a cell's answers: `16 % unfinished, 3 % at full precision`.

    Args:
        metrics: of the quantized cell, as `rates` returns them.
        full: of the same variant at full precision.
        beyond: the metrics whose limits the cell breaks.
    """
    phrases = []
    for metric in beyond:
        limit = LIMITS[metric]
        here, there = (1 - values[metric] if limit.of_good else values[metric] for values in (metrics, full))
        phrases.append(f"{percent(here)} {limit.bad}, {percent(there)} at full precision")
    return "; ".join(dict.fromkeys(phrases))  # end tokens and cut answers are the same answers


def marked(frame: pd.DataFrame, note: str) -> pd.DataFrame:
    """Return a quantized cell's rows as an outcome: with the note, and unfinished answers as wrong.

    The grader's own verdict is kept in a column, so that other limits can judge the answers again.
    """
    counted = frame["correct"].where(~_unfinished(frame), 0)
    return frame.assign(**{names.GRADED: frame["correct"], "correct": counted, names.UNHEALTHY: note})


def unmarked(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows as they were graded, before `marked`."""
    if names.GRADED not in frame:
        return frame
    return frame.assign(correct=frame[names.GRADED]).drop(columns=[names.GRADED, names.UNHEALTHY])


def breaking(frame: pd.DataFrame, beyond: list[str]) -> list[str]:
    """Return answers that broke limits as lines for the terminal: two for each limit, fewer where one broke several.

    Args:
        frame: a row per answer, as `cells.graded` returns it.
        beyond: the metrics whose limits are broken.
    """
    chosen: list[int] = []
    for metric in beyond:
        bad = [place for place, is_bad in enumerate(LIMITS[metric].is_bad(frame)) if is_bad]
        lacking = SHOWN - len(set(chosen).intersection(bad))
        further = [place for place in bad if place not in chosen]
        chosen += further[: max(0, lacking)]
    return [_line(row) for row in frame.iloc[chosen].to_dict("records")]


def answers(frame: pd.DataFrame, n: int = SHOWN) -> list[str]:
    """Return n answers as lines for the terminal, of different kinds if there are: unreadable, wrong, right.

    Args:
        frame: a row per answer: question, correct (0/1), parsed, answer, completion.
        n: number of answers.
    """
    kinds = frame["correct"] + frame["parsed"].notna()
    first_of_each = frame.groupby(kinds).cumcount().to_frame("place").assign(kind=kinds)
    chosen = frame.loc[first_of_each.sort_values(["place", "kind"]).index[:n]]
    return [_line(row) for row in chosen.to_dict("records")]


def _line(row: dict) -> str:
    unfinished = "" if row.get("finish_reason", "stop") == "stop" else "; unfinished"
    return f"{row['question']} ({_judged(row)}{unfinished}): {_short(row['completion'])}"


def _judged(row: dict) -> str:
    if row["correct"]:
        return "right"
    return f"{'unreadable' if row['parsed'] is None else 'wrong'}, expected {row['answer']}"


def _short(answer: str, longest: int = 240) -> str:
    """Return an answer on one line, without its middle if it is long."""
    line = " ⏎ ".join(part.strip() for part in answer.splitlines() if part.strip()) or "(empty)"
    half = longest // 2
    return line if len(line) <= longest else f"{line[:half]} … {line[-half:]}"
