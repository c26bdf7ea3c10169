"""Whether a cell's accuracy counts. In the first study every answer was truncated, and nothing stopped its table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrl import names
from qrl.recipe import Evaluate

if TYPE_CHECKING:
    import pandas as pd


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


def problems(metrics: dict[str, float], limits: Evaluate, n: int) -> list[str]:
    """Return a sentence for each broken limit, with the rate, the limit and the likely cause; empty if healthy."""
    unrendered = (
        "prompts not rendered with the model's chat template, or an end token that the model was not trained on"
    )
    unparsed = (
        "prompts not rendered with the model's chat template, or not asking for the format that the task grades, "
        "or weights damaged by quantization"
    )
    endless = "expressions that the grader cannot evaluate, from weights damaged by training or quantization"
    checks = {
        names.EOS_RATE: ("min_eos_rate", unrendered),
        names.TRUNCATION_RATE: (
            "max_truncation_rate",
            "evaluate.max_new_tokens is too small for this model, or answers never end",
        ),
        names.PARSE_RATE: ("min_parse_rate", unparsed),
        names.PROMPT_LEAK_RATE: ("max_prompt_leak_rate", unrendered),
        names.GRADER_FAULT_RATE: ("max_grader_fault_rate", endless),
    }
    sentences = []
    for metric, (setting, cause) in checks.items():
        rate, limit, least = metrics[metric], getattr(limits, setting), setting.startswith("min_")
        if (rate < limit) if least else (rate > limit):
            sentences.append(
                f"{metric} is {rate:.3f} (n = {n}), {'below' if least else 'above'} the limit "
                f"evaluate.{setting} = {limit:g}; likely cause: {cause}."
            )
    return sentences
