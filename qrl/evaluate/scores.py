"""A cell's scores, and whether they count: in the first study every answer was truncated, and nothing stopped it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from qrl import names, stats
from qrl.errors import BadInput
from qrl.evaluate.cells import Asked
from qrl.recipe import Evaluate

if TYPE_CHECKING:
    import pandas as pd

_UNRENDERED = (
    "prompts not rendered with the model's chat template or with another prompt than it was trained on (--prompt), or "
)
_NO_END = f"{_UNRENDERED}an end token that the model was not trained on"
_TOO_LONG = "evaluate.max_new_tokens is too small for this model, or answers never end"
_NO_FORMAT = f"{_UNRENDERED}not asking for the format that the task grades, or weights damaged by quantization"
_NO_VERDICT = "expressions that the grader cannot evaluate, from weights damaged by training or quantization"
# rate → the recipe's limit, and the likely cause if it is broken
_LIMITS = {
    names.EOS_RATE: ("min_eos_rate", _NO_END),
    names.TRUNCATION_RATE: ("max_truncation_rate", _TOO_LONG),
    names.PARSE_RATE: ("min_parse_rate", _NO_FORMAT),
    names.PROMPT_LEAK_RATE: ("max_prompt_leak_rate", _NO_END),
    names.GRADER_FAULT_RATE: ("max_grader_fault_rate", _NO_VERDICT),
}


def metrics(asked: Asked) -> dict[str, float]:
    """Return accuracy with stderr and n, pass@k, health rates, speed and grader failures of one cell, by metric name.

    n counts questions. With several samples, accuracy is pass@1: the mean over questions of the mean over a question's
    samples.
    """
    frame = asked.frame
    accuracy, right, samples = _accuracy(frame)
    by_k = {k: stats.rate(stats.pass_at(k, right["sum"], samples)) for k in stats.every_k(samples)}
    return {
        names.ACCURACY: accuracy.estimate,
        names.ACCURACY_STDERR: accuracy.stderr,
        names.ACCURACY_FLEXIBLE: float(frame["correct_flexible"].mean()),
        names.N: float(len(right)),
        **{names.pass_at(k): value.estimate for k, value in by_k.items()},
        **{f"{names.pass_at(k)}_stderr": value.stderr for k, value in by_k.items()},
        names.TOKENS_PER_S: asked.tokens_per_s,
        names.GRADER_TIMEOUTS: float((frame["fault"] == "timeout").sum()),
        names.GRADER_ERRORS: float((frame["fault"] == "error").sum()),
        names.TOKENS_PER_ANSWER: float(frame["n_tokens"].mean()),
        **_reached(frame),
        **_references(frame),
        **rates(frame),
    }


def _accuracy(frame: pd.DataFrame) -> tuple[stats.Estimate, pd.DataFrame, int]:
    """Return accuracy, right answers by question (sum), and samples a question."""
    right = frame.groupby("question", sort=False)["correct"].agg(["sum", "size"])
    samples = int(right["size"].iloc[0])
    per_sample = right["sum"] / samples
    return (
        stats.accuracy(int(right["sum"].sum()), len(right)) if samples == 1 else stats.rate(per_sample),
        right,
        samples,
    )


def limits(settings: Evaluate) -> dict[str, float]:
    """Return the limits of health by their names in the recipe."""
    return {name: getattr(settings, name) for name, _ in _LIMITS.values()}


def again(frame: pd.DataFrame, limits: Mapping[str, object]) -> tuple[stats.Estimate, list[str]]:
    """Return a cell's accuracy and broken limits, computed again from its rows.

    Args:
        frame: as `evaluate` logged it.
        limits: by name; one that is not among them has its default, other settings are left out.

    Raises:
        BadInput: the rows lack what health is read from.
    """
    needed = ["question", "correct", "parsed", "finish_reason", "leaked"]
    if lacking := [column for column in needed if column not in frame] + ["a row"] * frame.empty:
        raise BadInput(f"The rows of the cell have no {', '.join(lacking)}: evaluate it again.")
    known = {name: limits[name] for name, _ in _LIMITS.values() if name in limits}
    shown = rates(frame if "fault" in frame else frame.assign(fault=None))
    return _accuracy(frame)[0], problems(shown, Evaluate.model_validate(known), len(frame))


def _reached(frame: pd.DataFrame) -> dict[str, float]:
    return {names.REACHED_RATE: float(frame["reached"].mean())} if frame["reached"].notna().all() else {}


def _references(frame: pd.DataFrame) -> dict[str, float]:
    """Return the mean log-likelihood of the worked solutions and the perplexity, where they were read."""
    if names.REFERENCE_LOGPROB not in frame:
        return {}
    mean = float(frame[names.REFERENCE_LOGPROB].mean())
    return {names.REFERENCE_LIKELIHOOD: mean, names.REFERENCE_PERPLEXITY: math.exp(min(700.0, -mean))}


def rates(frame: pd.DataFrame) -> dict[str, float]:
    """Return the shares of answers that parse, end, are truncated, leak or break the grader, in 0..1 by metric name."""
    stopped = frame["finish_reason"] == "stop"
    return {
        names.PARSE_RATE: float(frame["parsed"].notna().mean()),
        names.EOS_RATE: float(stopped.mean()),
        names.TRUNCATION_RATE: float((~stopped).mean()),
        names.PROMPT_LEAK_RATE: float(frame["leaked"].mean()),
        names.GRADER_FAULT_RATE: float(frame["fault"].notna().mean()),
    }


def problems(metrics: dict[str, float], limits: Evaluate, n: int, *, sure: bool = False) -> list[str]:
    """Return a sentence for each broken limit, with the rate, the limit and the likely cause; empty if healthy.

    Args:
        metrics: as `rates` returns them.
        limits: the recipe's.
        n: answers that the rates are of.
        sure: count a limit as broken only if the rate's 95 % interval excludes it, for a small n.
    """
    sentences = []
    for metric, (setting, cause) in _LIMITS.items():
        rate, limit, least = metrics[metric], getattr(limits, setting), setting.startswith("min_")
        known = stats.accuracy(round(rate * n), n) if sure else None
        low, high = (known.low, known.high) if known else (rate, rate)
        if (high < limit) if least else (low > limit):
            side = "below" if least else "above"
            allowed = f"{side} the limit evaluate.{setting} = {limit:g}"
            sentences.append(f"{metric} is {rate:.3f} (n = {n}), {allowed}; likely cause: {cause}.")
    return sentences


def answers(frame: pd.DataFrame, n: int = 2) -> list[str]:
    """Return n answers as lines for the terminal, of different kinds if there are: unreadable, wrong, right.

    Args:
        frame: a row per answer: question, correct (0/1), parsed, answer, completion.
        n: number of answers.
    """
    kinds = frame["correct"] + frame["parsed"].notna()
    first_of_each = frame.groupby(kinds).cumcount().to_frame("place").assign(kind=kinds)
    chosen = frame.loc[first_of_each.sort_values(["place", "kind"]).index[:n]]
    return [f"{row['question']} ({_judged(row)}): {_short(row['completion'])}" for row in chosen.to_dict("records")]


def _judged(row: dict) -> str:
    if row["correct"]:
        return "right"
    return f"{'unreadable' if row['parsed'] is None else 'wrong'}, expected {row['answer']}"


def _short(answer: str, longest: int = 240) -> str:
    """Return an answer on one line, without its middle if it is long."""
    line = " ⏎ ".join(part.strip() for part in answer.splitlines() if part.strip()) or "(empty)"
    half = longest // 2
    return line if len(line) <= longest else f"{line[:half]} … {line[-half:]}"
