"""Plan a study before any GPU time."""

import json
import os
from pathlib import Path
from typing import Any

import click
import numpy as np

from qrl import figures, names, plan
from qrl.compare import from_questions, read_questions
from qrl.errors import BadInput
from qrl.plan import table
from qrl.stats.text import interval
from qrl.workspace import workspace, written

FIGURE = "plan.png"


def make(
    assumed: dict,
    *,
    pilot: str | None,
    scheme: str | None,
    reference: str | None,
    n: int | None,
    effect: float | None,
    power: float,
    seeds: int | None,
    out: str | None,
) -> None:
    """Print the plan; write it into `out`, and into the MLflow run that `mlflow run` opened, if there is one.

    Args:
        assumed: fields of `plan.Assumptions` as typed; missing ones come from the pilot, or are defaults.
        pilot: a file with per-question outcomes of an earlier study.
        scheme: one of the pilot's schemes; None for the one with the lowest gain survival.
        reference: the pilot's name for full precision; None if it is `full`.
        n, effect, power, seeds: as for `plan.make`.
        out: a folder.

    Raises:
        BadInput: as `plan.make` and `read_pilot`; a scheme is given without a pilot, or `out` cannot be written to.
    """
    if (scheme or reference) and not pilot:
        option = "--scheme" if scheme else "--reference"
        raise BadInput(f"{option} names a scheme of the pilot: give --pilot FILE with it, or omit it.")
    suggested = {}
    notes = []
    if pilot:
        suggested, notes = read_pilot(pilot, scheme, reference)

    assumptions = plan.Assumptions(**suggested | assumed)
    planned = plan.make(assumptions, n=n, effect=effect, power=power, seeds=seeds)
    text = "\n".join((table.as_markdown(planned), *notes))

    if out:
        _write(planned, text, Path(out))
    # Planning needs no store; only `mlflow run -e plan` has opened a run that would stay empty.
    if os.environ.get("MLFLOW_RUN_ID"):
        _log(planned, text)
    click.echo(text)
    if out:
        click.echo(f"Written to {out}: {names.TABLE_MD}, {names.TABLE_JSON}, {names.FIGURES}/{FIGURE}.", err=True)


def _log(planned: plan.Plan, text: str) -> None:
    """Log the plan to the run that `mlflow run` opened."""
    from qrl.tracking import contents, runs, store  # imports MLflow, which takes a second

    store.prepare()
    fields = {"power": planned.power, "n": planned.n, "effect": planned.effect, **table.as_json(planned)["assumed"]}
    params = {f"plan.{key}": value for key, value in fields.items() if value is not None}
    with workspace("plan", shared=True) as work, runs.step("plan", params=params):
        _write(planned, text, work)
        contents.log_folder(work)
        contents.describe(text)


def read_pilot(path: str, scheme: str | None, reference: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return fields of `plan.Assumptions` that a study's questions suggest, and sentences on how certain they are.

    Raises:
        BadInput: the file or scheme is missing, the outcomes are not comparable, or they show no gain.
    """
    comparison = from_questions(read_questions(path, reference=reference, whole=False))
    trained = comparison.variants[1]  # the first is base
    rows = {row.scheme: row for row, _, _ in comparison.judged() if row.variant == trained}
    if not rows or (scheme and scheme not in rows):
        raise BadInput(
            f"The pilot {path} has the quantized schemes {', '.join(rows) or 'none'}, "
            f"but {scheme or 'at least one'} is needed: name one of its own."
        )
    if scheme:
        row = rows[scheme]
    else:  # a plan for the scheme that loses most is enough for the others
        row = min(rows.values(), key=lambda row: row.gain_survival.estimate)
    gain = comparison.row(names.FULL, trained).delta
    survival = row.gain_survival
    if not gain.estimate > 0:
        raise BadInput(
            f"The pilot {path} shows no gain, {interval(gain)} on n = {gain.n}, so there is no survival to plan for: "
            "give --gain yourself."
        )

    def outcomes(variant: str, scheme: str) -> np.ndarray:
        return np.concatenate(comparison.evidence.cells[variant, scheme])

    assumed = plan.of_pilot(
        outcomes(names.BASE, names.FULL),
        outcomes(trained, names.FULL),
        outcomes(names.BASE, row.scheme),
        outcomes(trained, row.scheme),
    )
    if gain.runs:
        assumed |= {"between_gain": gain.runs.between_sd, "between_survival": survival.runs.between_sd}
    notes = [
        f"Pilot {path}, {trained} under {row.scheme}, n = {comparison.n}: gain {interval(gain)}, "
        f"gain survival {interval(survival)}.",
        "Simulated questions have the pilot's own combinations of outcomes, as often as it has them.",
        "A pilot's gain is an estimate, and often a lucky one. For a safe plan, use its lower bound: "
        f"--gain {max(gain.low, 0.001):.3f}.",
    ]
    return assumed, notes


def _write(planned: plan.Plan, text: str, out: Path) -> None:
    document = json.dumps(table.as_json(planned), indent=2) + "\n"
    with written(out, "plan", {names.TABLE_MD: text, names.TABLE_JSON: document}) as figure_folder:
        figures.chances(planned, figure_folder / FIGURE)
