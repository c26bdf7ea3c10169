"""Plan a study before any GPU time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import numpy as np

from qrl import compare as room
from qrl import figures, names, plan
from qrl.errors import BadInput
from qrl.plan import table
from qrl.stats.text import interval
from qrl.tracking import contents, runs, store
from qrl.workspace import workspace

FIGURE = "plan.png"


def make(
    assumed: dict,
    *,
    pilot: str | None,
    scheme: str | None,
    n: int | None,
    effect: float | None,
    power: float,
    seeds: int | None,
    out: str | None,
) -> None:
    """Prints the plan; writes it into `out`, and into the MLflow run that `mlflow run` opened, where there is one.

    Args:
        assumed: fields of `plan.Assumptions` as typed; what is not there comes from the pilot, or is the default.
        pilot: per-question outcomes of a study that there is already.
        scheme: which of the pilot's; None takes the one under which its gain survives least.
        n, effect, power, seeds: as for `plan.make`.
        out: a folder.
    """
    said = []
    if pilot:
        suggested, said = read_pilot(pilot, scheme)
        assumed = suggested | assumed
    elif scheme:
        raise BadInput("--scheme names a scheme of the pilot: give --pilot FILE with it, or leave it out.")
    made = plan.make(plan.Assumptions(**assumed), n=n, effect=effect, power=power, seeds=seeds)
    text = "\n".join((table.as_markdown(made), *said))
    if out:
        _write(made, text, Path(out))
    if os.environ.get("MLFLOW_RUN_ID"):
        store.prepare()
        with workspace(f"plan-{os.getpid()}") as work, runs.step("plan", params=_params(made)):
            _write(made, text, work)
            contents.log_folder(work)
            contents.describe(text)
    click.echo(text)
    if out:
        click.echo(f"Written to {out}: {names.TABLE_MD}, {names.TABLE_JSON}, {names.FIGURES}/{FIGURE}.", err=True)


def read_pilot(path: str, scheme: str | None) -> tuple[dict[str, float], list[str]]:
    """Assumptions as a study's questions suggest them, and sentences on how sure they are.

    Raises:
        BadInput: no such file or scheme, outcomes that cannot be compared, or no gain in them.
    """
    comparison = room.from_questions(room.read_questions(path))
    rows = {row.scheme: row for row in comparison.rows if row.gain_survival and row.variant == comparison.variants[1]}
    if not rows or (scheme and scheme not in rows):
        raise BadInput(
            f"The pilot {path} has the quantized schemes {', '.join(rows) or 'none'}, but {scheme or 'one beside full'} is needed: name one of its own."
        )
    row = rows[scheme] if scheme else min(rows.values(), key=lambda row: row.gain_survival.estimate)
    gain = comparison.row(names.FULL, row.variant).delta
    if not gain.estimate > 0:
        raise BadInput(
            f"The pilot {path} shows no gain, {interval(gain)} on n = {gain.n}: nothing to plan the survival of; give --gain yourself."
        )
    order = [(variant, kind) for kind in (names.FULL, row.scheme) for variant in (names.BASE, row.variant)]
    cells = comparison.evidence.outcomes.cells
    each = [plan.of_pilot(*(cells[cell][run] for cell in order)) for run in range(len(comparison.runs))]
    suggested = {key: float(np.mean([values[key] for values in each])) for key in each[0]}
    if gain.runs:
        suggested |= {"between_gain": gain.runs.between_sd, "between_survival": row.gain_survival.runs.between_sd}
    said = [
        f"From the pilot {path}, {row.variant} under {row.scheme}, n = {comparison.n}: gain {interval(gain)}, gain survival {interval(row.gain_survival)}.",
        "The correlation under quantization is the one that gives gain survival the spread which it has there.",
        f"A pilot's gain is an estimate, and often a lucky one: with --gain {max(gain.low, 0.001):.3f}, its lower bound, the plan is a safe one.",
    ]
    return suggested, said


def _write(made: plan.Plan, text: str, out: Path) -> None:
    try:
        (out / names.FIGURES).mkdir(parents=True, exist_ok=True)
        figures.chances(made, out / names.FIGURES / FIGURE)
        for name, content in (
            (names.TABLE_MD, text),
            (names.TABLE_JSON, json.dumps(table.as_json(made), indent=2) + "\n"),
        ):
            (out / f".{name}.partial").write_text(content, encoding="utf-8")
            os.replace(out / f".{name}.partial", out / name)
    except OSError as error:
        raise BadInput(
            f"The plan cannot be written to {out} ({error.strerror or error}): give a folder that is writable and has space."
        ) from None


def _params(made: plan.Plan) -> dict[str, object]:
    given = {"power": made.power, "n": made.n, "effect": made.effect}
    return {
        f"plan.{key}": value for key, value in (given | table.as_json(made)["assumed"]).items() if value is not None
    }
