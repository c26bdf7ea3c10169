"""When an accuracy counts. The seed study's first table was void: every answer had been cut, and nothing stopped it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrl import names
from qrl.recipe import Evaluate

if TYPE_CHECKING:
    import pandas as pd


def rates(frame: pd.DataFrame) -> dict[str, float]:
    """Shares of a cell's N answers that parse, end, are cut, leak, and that the grader failed on; each in 0..1, by metric name."""
    stopped = frame["finish_reason"] == "stop"
    return {
        names.PARSE_RATE: float(frame["parsed"].notna().mean()),
        names.EOS_RATE: float(stopped.mean()),
        names.TRUNCATION_RATE: float((~stopped).mean()),
        names.PROMPT_LEAK_RATE: float(frame["leaked"].mean()),
        names.GRADER_FAULT_RATE: float(frame["fault"].notna().mean()),
    }


def problems(found: dict[str, float], limits: Evaluate, n: int) -> list[str]:
    """The limits that a cell broke, a sentence each: the limit, the rate, the likely cause; empty is healthy."""
    unrendered = (
        "prompts not rendered through the model's chat template, or an end token that the model was not trained on"
    )
    checks = [
        (names.EOS_RATE, "evaluate.min_eos_rate", limits.min_eos_rate, True, unrendered),
        (names.TRUNCATION_RATE, "evaluate.max_truncation_rate", limits.max_truncation_rate, False,
         "evaluate.max_new_tokens too small for this model, or answers that never end"),
        (names.PARSE_RATE, "evaluate.min_parse_rate", limits.min_parse_rate, True,
         "prompts not rendered through the model's chat template or not asking for the format that the task grades, or "
         "weights damaged by quantization"),
        (names.PROMPT_LEAK_RATE, "evaluate.max_prompt_leak_rate", limits.max_prompt_leak_rate, False, unrendered),
        (names.GRADER_FAULT_RATE, "evaluate.max_grader_fault_rate", limits.max_grader_fault_rate, False,
         "answers that are expressions without end, from weights damaged by training or quantization"),
    ]  # fmt: skip
    return [
        f"{metric} is {found[metric]:.3f} (n = {n}), {'below' if least else 'above'} the limit {key} = {limit:g}; "
        f"likely cause: {cause}."
        for metric, key, limit, least, cause in checks
        if (found[metric] < limit if least else found[metric] > limit)
    ]
