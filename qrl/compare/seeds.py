"""Several training runs as tables: what each says alone, and how far they differ beyond their questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qrl.stats.text import interval, table

if TYPE_CHECKING:
    from qrl.compare import Comparison, Row
    from qrl.stats import Estimate


def sections(comparison: Comparison) -> list[str]:
    """Markdown lines; none where there is one run."""
    if len(comparison.runs) < 2:
        return []
    lines = []
    for variant in comparison.variants[1:]:
        rows = [row for row in comparison.rows if row.variant == variant]
        lines += [f"## Seed by seed: {variant}", "", *_alone(rows), "", *_spread(rows), ""]
    return [*lines, *_notes(comparison), ""]


def _alone(rows: list[Row]) -> list[str]:
    body = []
    for row in rows:
        survival = row.gain_survival.runs.values if row.gain_survival else [None] * len(row.delta.runs.labels)
        for label, delta, survived in zip(row.delta.runs.labels, row.delta.runs.values, survival, strict=True):
            body.append(
                (row.scheme, label, str(delta.n), interval(delta), interval(survived) if survived else "not defined")
            )
    return table(("scheme", "seed", "n", "delta", "gain survival"), body)


def _spread(rows: list[Row]) -> list[str]:
    body = []
    for row in rows:
        for name, value in (("delta", row.delta), ("gain survival", row.gain_survival)):
            if value is not None:
                runs = value.runs
                body.append((row.scheme, name, interval(value), between(value), f"{runs.within_sd:.3f}"))
    count = len(rows[0].delta.runs.labels)
    return table(("scheme", "difference", f"mean of {count} seeds", "between-seed sd", "within-seed sd"), body)


def between(value: Estimate) -> str:
    """The spread between runs; 0 says that it was truncated there."""
    return "0 (truncated)" if value.runs.between_variance < 0 else f"{value.runs.between_sd:.3f}"


def _notes(comparison: Comparison) -> list[str]:
    count = len(comparison.runs)
    asked = sum(len(groups) for groups in comparison.evidence.outcomes.groups)
    if asked == count * comparison.n:
        design = f"All {count} seeds answered the same questions, so what the questions' choice adds to the error does not shrink with more seeds."
    elif asked == comparison.n:
        design = "Each seed answered questions of its own, so both spreads shrink with more seeds."
    else:
        design = "The seeds share some of their questions; the error counts in what they share."
    lines = [
        f"A seed's own interval is its questions' alone. The mean over seeds treats the training run as a random effect. {design}",
        "*between-seed sd*: of the runs' true values, by the method of moments; *within-seed sd*: the error that its questions give to one run.",
    ]
    estimates = [value for row in comparison.rows for value in (row.delta, row.gain_survival) if value is not None]
    if any(value.runs.between_variance < 0 for value in estimates):
        lines.append(
            f"*truncated*: the runs differ less than their questions alone would make them; the variance counts as 0, which {count} seeds cannot show it to be."
        )
    if count < 5:
        freedom = "1 degree" if count == 2 else f"{count - 1} degrees"
        lines.append(
            f"{count} seeds say little of the spread between seeds (t with {freedom} of freedom), and the intervals are as wide as that asks for."
        )
    return lines
