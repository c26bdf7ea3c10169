"""Ways to a small model side by side: what each one's cell scores, and how far it is from base and from full precision.

The table of seed 002: quantized after training, trained over codes, trained with quantized weights, distilled into them. A
method is a cell, and methods need not share their schemes; every difference is paired by question, training runs are a
random effect.
"""

from __future__ import annotations

import pandas as pd

from qrl import names
from qrl.compare.evidence import Questions
from qrl.compare.outcomes import check_columns, outcomes
from qrl.compare.text import interval, table
from qrl.errors import BadInput

FULL = (names.GRPO, names.FP16)  # what a quantized method is measured against
HEAD = ("method", "scheme", "accuracy", "gain over base", "error: method − grpo in full precision")


def markdown(frame: pd.DataFrame) -> str:
    """One row a method, best first, base and full precision among them.

    Args:
        frame: columns variant, scheme, question, correct (0/1), and optionally seed, sample, cluster, engine.

    Raises:
        BadInput: base or grpo in full precision is missing, or cells that cannot be compared.
    """
    check_columns(frame)
    cells = list(dict.fromkeys(zip(frame["variant"].astype(str), frame["scheme"].astype(str), strict=True)))
    for needed in ((names.BASE, names.FP16), FULL):
        if needed not in cells:
            raise BadInput(f"Cell {names.cell_name(*needed)} is missing: methods are measured from it.")
    labels = {cell: _label(cell) for cell in cells}
    alone = frame.assign(
        variant=[labels[cell] for cell in zip(frame["variant"].astype(str), frame["scheme"].astype(str), strict=True)],
        scheme=names.FP16,  # one scheme for all: no method has to stand under another's
    ).drop(columns=names.SETTINGS, errors="ignore")
    evidence = Questions(outcomes(alone))
    at = {cell: (label, names.FP16) for cell, label in labels.items()}
    accuracy = {cell: evidence.accuracy(at[cell]) for cell in cells}
    rows = []
    for cell in sorted(cells, key=lambda cell: -accuracy[cell].estimate):
        found = accuracy[cell]
        gain, error = (
            "reference" if cell == to else interval(evidence.contrast({at[cell]: 1, at[to]: -1}))
            for to in ((names.BASE, names.FP16), FULL)
        )
        rows.append((*cell, f"{found.estimate:.3f} ± {found.stderr:.3f}", gain, error))
    runs = (
        f", {len(evidence.runs)} training runs"
        if len(evidence.runs) > 1
        else ", one training run each, which speaks for itself only"
    )
    note = f"n = {evidence.n} held-out questions{runs}; ± is one standard error, brackets are 95 % intervals, paired."
    return "\n".join(["## Methods", "", *table(HEAD, rows), "", note, ""])


def _label(cell: tuple[str, str]) -> str:
    return names.BASE if cell == (names.BASE, names.FP16) else " ".join(cell)
