"""Whether a cell's answers are healthy: in the first study every answer was cut off, and no check stopped it.

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
_CUT = f"answers longer than evaluate.max_new_tokens, {_NO_END}"
_TOO_LONG = "evaluate.max_new_tokens is too small for this model, or answers never end"
_NO_FORMAT = f"{_UNRENDERED}not asking for the format that the task grades, or weights damaged by quantization"
_NO_VERDICT = "expressions that the grader cannot evaluate, from weights damaged by training or quantization"


@dataclass(frozen=True)
class Limit:
    """A rate of answers, and the recipe's limit for it."""

    setting: str  # its name in the recipe: `min_…` for a lowest rate, `max_…` for a highest
    cause: str  # the likely one, if it is broken
    bad: str  # what the bad answers are called, after "16 %"
    is_bad: Callable[[pd.DataFrame], pd.Series]  # which rows they are
    of_good: bool = False  # the rate is that of the good answers, and the limit its lowest value

    def excluded_by(self, rate: stats.Estimate, limit: float) -> bool:
        """Return whether the 95 % interval of a rate is wholly on the wrong side of the limit."""
        if self.of_good:
            return rate.high < limit
        return rate.low > limit

    def bad_share(self, rate: float) -> float:
        """Return the share of bad answers of a rate, which may be that of the good ones."""
        return 1 - rate if self.of_good else rate


def _unfinished(frame: pd.DataFrame) -> pd.Series:
    return frame["finish_reason"] != "stop"


def _unreadable(frame: pd.DataFrame) -> pd.Series:
    return frame["parsed"].isna()


def _leaked(frame: pd.DataFrame) -> pd.Series:
    return frame["leaked"] == 1


def _beyond_grader(frame: pd.DataFrame) -> pd.Series:
    return frame["fault"].notna()


LIMITS = {  # metric → its limit
    names.EOS_RATE: Limit("min_eos_rate", _CUT, "unfinished", _unfinished, of_good=True),
    names.TRUNCATION_RATE: Limit("max_truncation_rate", _TOO_LONG, "unfinished", _unfinished),
    names.PARSE_RATE: Limit("min_parse_rate", _NO_FORMAT, "unreadable", _unreadable, of_good=True),
    names.PROMPT_LEAK_RATE: Limit("max_prompt_leak_rate", _NO_END, "gone on with a new prompt", _leaked),
    names.GRADER_FAULT_RATE: Limit("max_grader_fault_rate", _NO_VERDICT, "beyond the grader", _beyond_grader),
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


def broken_metrics(metrics: Mapping[str, float], settings: Evaluate, n: int) -> list[str]:
    """Return the metrics whose limits are broken: the 95 % interval of the rate excludes the limit.

    Args:
        metrics: as `rates` returns them.
        settings: the recipe's, with the limits.
        n: answers that the rates are of.
    """
    broken_metrics = []
    for metric, limit in LIMITS.items():
        rate = stats.accuracy(round(metrics[metric] * n), n)
        if limit.excluded_by(rate, getattr(settings, limit.setting)):
            broken_metrics.append(metric)
    return broken_metrics


def problems(metrics: Mapping[str, float], settings: Evaluate, n: int) -> list[str]:
    """Return a sentence for each broken limit, with rate, limit and likely cause; arguments as for `broken`."""
    sentences = []
    for metric in broken_metrics(metrics, settings, n):
        limit = LIMITS[metric]
        side = "below" if limit.of_good else "above"
        setting = f"evaluate.{limit.setting} = {getattr(settings, limit.setting):g}"
        rate = f"{metric} is {metrics[metric]:.3f} (n = {n})"
        sentences.append(f"{rate}, and its 95 % interval is {side} the limit {setting}; likely cause: {limit.cause}.")
    return sentences


def note(metrics: Mapping[str, float], full: Mapping[str, float], broken_metrics: list[str]) -> str:
    """Return what quantization did to a cell's answers: `16 % unfinished, 3 % at full precision`.

    Args:
        metrics: of the quantized cell, as `rates` returns them.
        full: of the same variant at full precision.
        broken_metrics: the metrics whose limits the cell breaks.
    """
    phrases = []
    for metric in broken_metrics:
        limit = LIMITS[metric]
        share = percent(limit.bad_share(metrics[metric]))
        share_at_full = percent(limit.bad_share(full[metric]))
        phrases.append(f"{share} {limit.bad}, {share_at_full} at full precision")
    return "; ".join(dict.fromkeys(phrases))  # end tokens and cut answers are the same answers


def with_note(frame: pd.DataFrame, note: str) -> pd.DataFrame:
    """Return a quantized cell's rows as an outcome: with the note, and unfinished answers as wrong.

    The grader's own verdict is kept in a column, so that other limits can judge the answers again.
    """
    correct = frame["correct"].where(~_unfinished(frame), 0)
    return frame.assign(**{names.GRADED: frame["correct"], "correct": correct, names.UNHEALTHY: note})


def without_note(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows as they were graded, before `marked`."""
    if names.GRADED not in frame:
        return frame
    return frame.assign(correct=frame[names.GRADED]).drop(columns=[names.GRADED, names.UNHEALTHY])


def lines_of_broken(frame: pd.DataFrame, broken_metrics: list[str]) -> list[str]:
    """Return answers that broke limits as lines for the terminal: two for each limit, fewer where one broke several.

    Args:
        frame: a row per answer, as `cells.graded_frame` returns it.
        broken_metrics: the metrics whose limits are broken.
    """
    selected: list[int] = []
    for metric in broken_metrics:
        bad = [index for index, is_bad in enumerate(LIMITS[metric].is_bad(frame)) if is_bad]
        already_shown = len(set(selected).intersection(bad))
        new = [index for index in bad if index not in selected]
        selected += new[: max(0, SHOWN - already_shown)]
    return [_line(row) for row in frame.iloc[selected].to_dict("records")]


def lines_of_answers(frame: pd.DataFrame, n: int = SHOWN) -> list[str]:
    """Return n answers as lines for the terminal, of different kinds if there are: unreadable, wrong, right.

    Args:
        frame: a row per answer: question, correct (0/1), parsed, answer, completion.
        n: number of answers.
    """
    kinds = frame["correct"] + frame["parsed"].notna()
    # The first answer of each kind, then the second of each, and so on.
    ranks = frame.groupby(kinds).cumcount().to_frame("rank").assign(kind=kinds)
    rows = frame.loc[ranks.sort_values(["rank", "kind"]).index[:n]]
    return [_line(row) for row in rows.to_dict("records")]


def _line(row: dict) -> str:
    unfinished = "" if row.get("finish_reason", "stop") == "stop" else "; unfinished"
    return f"{row['question']} ({_judged(row)}{unfinished}): {_short(row['completion'])}"


def _judged(row: dict) -> str:
    if row["correct"]:
        return "right"
    judgement = "unreadable" if row["parsed"] is None else "wrong"
    return f"{judgement}, expected {row['answer']}"


def _short(answer: str, longest: int = 240) -> str:
    """Return an answer on one line, without its middle if it is long."""
    parts = [part.strip() for part in answer.splitlines() if part.strip()]
    line = " ⏎ ".join(parts) or "(empty)"
    if len(line) <= longest:
        return line
    half = longest // 2
    return f"{line[:half]} … {line[-half:]}"
