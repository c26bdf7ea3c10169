"""Ways to a small model side by side: what each one's cell scores, and how far it is from base and from full precision.

The table of seed 002: quantized after training, trained over codes, trained with quantized weights, distilled into them. A
method is a cell, and methods need not share their schemes; every difference is paired by question, training runs are a
random effect. Where GRPO's model and the base stand under a method's own scheme too, it is held against them: did training
with quantization beat quantizing afterwards, and did it learn?
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from qrl import names
from qrl.compare.convergence import Convergence
from qrl.compare.evidence import Cell, Questions
from qrl.compare.outcomes import check_columns, outcomes
from qrl.errors import BadInput
from qrl.stats import LEVEL, Estimate, holm
from qrl.stats.text import interval, table

PLAIN, FULL = (names.BASE, names.FULL), (names.GRPO, names.FULL)  # what a method is measured from, and against
METHODS_MD, METHODS_JSON = "methods.md", "methods.json"
HEAD = (
    "method",
    "scheme",
    "accuracy",
    "gain over base",
    "error: method − grpo in full precision",
    "over grpo in its scheme",
)


@dataclass(frozen=True)
class Method:
    """One cell; differences are None where they would be the cell's own to itself, or the other cell is not there."""

    variant: str
    scheme: str
    accuracy: Estimate
    gain: Estimate | None  # over base in full precision
    error: Estimate | None  # against grpo in full precision
    over_grpo: Estimate | None  # against grpo quantized afterwards in the same scheme
    over_base: Estimate | None  # against base in the same scheme

    @property
    def quantized(self) -> bool:
        """Whether it is a trained model that lies, or was trained, in few bits."""
        return self.variant != names.BASE and (self.variant, self.scheme) != FULL


@dataclass(frozen=True)
class Methods:
    """All cells, best first.

    Attributes:
        behind: quantized method → p-value of "the best of them is no better", by Holm over all pairs of quantized methods:
            the best was chosen by what it scored, so that any pair could have been the one that is claimed.
        trained: method → p-value of "training with quantized weights made no difference to quantizing grpo afterwards in the
            same scheme", by Holm over all methods of which this is asked.
    """

    rows: tuple[Method, ...]
    n: int
    runs: int
    behind: dict[Cell, float]
    trained: dict[Cell, float]

    @property
    def best(self) -> Method | None:
        """The quantized method with the highest accuracy."""
        return next((row for row in self.rows if row.quantized), None)


def measure(frame: pd.DataFrame) -> Methods:
    """Every cell's accuracy and its differences, from a row per cell and question.

    Args:
        frame: columns variant, scheme, question, correct (0/1), and optionally seed, sample, cluster, engine.

    Raises:
        BadInput: base or grpo in full precision is missing, or cells that cannot be compared.
    """
    check_columns(frame)
    pairs = list(zip(frame["variant"].astype(str), frame["scheme"].astype(str), strict=True))
    cells = list(dict.fromkeys(pairs))
    for needed in (PLAIN, FULL):
        if needed not in cells:
            raise BadInput(f"Cell {names.cell_name(*needed)} is missing: methods are measured from it.")
    labels = {cell: names.BASE if cell == PLAIN else " ".join(cell) for cell in cells}
    alone = frame.assign(
        variant=[labels[cell] for cell in pairs], scheme=names.FULL
    )  # one scheme for all: none has to stand under another's
    evidence = Questions(outcomes(alone.drop(columns=names.SETTINGS, errors="ignore")))

    def difference(cell: Cell, to: Cell) -> Estimate | None:
        return (
            None
            if cell == to or to not in cells
            else evidence.contrast({(labels[cell], names.FULL): 1, (labels[to], names.FULL): -1})
        )

    rows = []
    for cell in cells:
        alike = [(variant, cell[1]) for variant in (names.GRPO, names.BASE)]
        trained = cell[0] not in (names.BASE, names.GRPO)
        beside = [difference(cell, to) if trained and cell[1] != names.FULL else None for to in alike]
        rows.append(
            Method(
                *cell,
                evidence.accuracy((labels[cell], names.FULL)),
                difference(cell, PLAIN),
                difference(cell, FULL),
                *beside,
            )
        )
    rows.sort(key=lambda row: -row.accuracy.estimate)
    small = [(row.variant, row.scheme) for row in rows if row.quantized]
    pairs = list(combinations(small, 2))
    together = dict(zip(pairs, holm([difference(*pair).p_two_sided for pair in pairs]), strict=True))
    asked = {(row.variant, row.scheme): row.over_grpo.p_two_sided for row in rows if row.over_grpo}
    behind = {cell: together[small[0], cell] for cell in small[1:]}
    return Methods(
        tuple(rows), evidence.n, len(evidence.runs), behind, dict(zip(asked, holm(list(asked.values())), strict=True))
    )


def markdown(found: Methods, converged: Sequence[Convergence] = (), failed: Sequence[str] = ()) -> str:
    """One row a method, best first; what follows from it; which trainings converged; what failed."""
    body = []
    for row in found.rows:
        gain, error = (interval(each) if each else "reference" for each in (row.gain, row.error))
        accuracy = f"{row.accuracy.estimate:.3f} ± {row.accuracy.stderr:.3f}"
        body.append((row.variant, row.scheme, accuracy, gain, error, interval(row.over_grpo) if row.over_grpo else ""))
    runs = (
        f", {found.runs} training runs" if found.runs > 1 else ", one training run each, which speaks for itself only"
    )
    note = f"n = {found.n} held-out questions{runs}; ± is one standard error, brackets are 95 % intervals, paired."
    lines = ["## Methods", "", *table(HEAD, body), "", note, "", *(f"- {each}" for each in findings(found)), ""]
    if converged:
        over = "seeds" if found.runs > 1 else "the steps of the one seed"
        head = (
            "method",
            "its cell − base in its scheme",
            "what training optimizes, first quarter → last, difference",
            "converged",
        )
        lines += ["## Converged", "", *table(head, [each.row() for each in converged]), ""]
        lines += [
            f"The difference's interval is over {over}; the rule looks at the two means alone, as it was fixed beforehand.",
            "",
        ]
    if failed:
        lines += ["## Did not count", "", *(f"- {each}" for each in failed), ""]
    return "\n".join(lines)


def findings(found: Methods) -> list[str]:
    """What the table shows, in sentences: the best method and those behind it, and training against quantizing afterwards."""
    if found.best is None:
        return []
    told_apart = {cell: p < 1 - LEVEL for cell, p in found.behind.items()}
    behind, beside = (
        [names.cell_name(*cell) for cell, apart in told_apart.items() if apart is wanted] for wanted in (True, False)
    )
    best = names.cell_name(found.best.variant, found.best.scheme)
    told = [f"Of {len(found.behind) + 1} quantized methods {best} scores highest, {found.best.accuracy.estimate:.3f}"]
    told += [f"shown ahead of {', '.join(behind)}"] if behind else []
    told += [f"not told apart from {', '.join(beside)}"] if beside else []
    lines = ["; ".join(told) + " (95 %, Holm's correction over all pairs)."]
    for row in found.rows:
        if row.over_grpo is not None:
            p = found.trained[row.variant, row.scheme]
            word = "beats" if row.over_grpo.estimate > 0 else "is behind"
            says = word if p < 1 - LEVEL else "is not told apart from"
            lines.append(
                f"{row.variant} {says} grpo quantized afterwards in {row.scheme}: {interval(row.over_grpo)}, p = {p:.2g} after Holm's correction."
            )
    return lines


def as_json(found: Methods, converged: Sequence[Convergence] = (), failed: Sequence[str] = ()) -> dict[str, Any]:
    """The table as a document."""

    def numbers(value: Estimate | None) -> dict[str, float] | None:
        return value and {"estimate": value.estimate, "stderr": value.stderr, "low": value.low, "high": value.high}

    rows = [
        {"variant": row.variant, "scheme": row.scheme}
        | {key: numbers(getattr(row, key)) for key in ("accuracy", "gain", "error", "over_grpo", "over_base")}
        | {
            "p_behind_best": found.behind.get((row.variant, row.scheme)),
            "p_over_grpo": found.trained.get((row.variant, row.scheme)),
        }
        for row in found.rows
    ]
    trained = [
        {
            "variant": each.variant,
            "scheme": each.scheme,
            "converged": each.converged,
            "reason": each.reason,
            "measure": each.measure,
        }
        | {"first": each.first, "last": each.last, "change": numbers(each.change)}
        for each in converged
    ]
    return {
        "n": found.n,
        "runs": found.runs,
        "findings": findings(found),
        "methods": rows,
        "converged": trained,
        "failed": list(failed),
    }


def write(found: Methods, out: str | Path, converged: Sequence[Convergence] = (), failed: Sequence[str] = ()) -> str:
    """Writes methods.md, methods.json and figures/methods.png into a folder; the text of the first.

    Raises:
        BadInput: `out` cannot be written to.
    """
    from qrl import figures

    out, text = Path(out), markdown(found, converged, failed)
    document = json.dumps(as_json(found, converged, failed), indent=1) + "\n"
    finding = findings(found)[0] if found.best else "No quantized method"
    try:
        (out / names.FIGURES).mkdir(parents=True, exist_ok=True)
        (out / METHODS_MD).write_text(text, encoding="utf-8")
        (out / METHODS_JSON).write_text(document, encoding="utf-8")
        figures.methods(found, finding, out / names.FIGURES / "methods.png")
    except OSError as error:
        raise BadInput(
            f"The methods cannot be written to {out} ({error.strerror or error}): give a folder that is writable and has space."
        ) from None
    return text


def metrics(found: Methods) -> dict[str, float]:
    """`methods/accuracy_<variant>_<scheme>` of every cell, and `methods/error_…` with `_low` and `_high`."""
    scores = {}
    for row in found.rows:
        name = f"{row.variant}_{row.scheme}"
        scores[f"methods/accuracy_{name}"] = row.accuracy.estimate
        if row.error is not None:
            values = {"": row.error.estimate, "_low": row.error.low, "_high": row.error.high}
            scores |= {f"methods/error_{name}{end}": value for end, value in values.items()}
    return scores
