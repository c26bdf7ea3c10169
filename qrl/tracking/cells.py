"""Evaluated cells, read back from their runs: what a gate and a comparison look at."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from mlflow.entities import Run

from qrl import names, process
from qrl.errors import BadInput, QrlError, first_line
from qrl.tracking import contents, models, origin, reuse, runs, store


@dataclass(frozen=True)
class Evaluated:
    """One cell's evaluation."""

    run_id: str
    variant: str
    scheme: str
    digest: str  # of the weights that answered
    parent: str  # digest of the weights that they were made from; empty for a base
    model: str  # "models:/m-…"; empty if the evaluation did not finish
    accuracy: float
    stderr: float
    n: int
    broken: tuple[str, ...]  # sentences on the limits that it broke, or why it ended early; empty if healthy
    questions: str = ""  # digest of the held-out questions
    task: str = ""  # empty if the run does not say
    settings: Mapping[str, str] = field(default_factory=dict)  # of the `evaluate` step, by key of the recipe, as text
    limits: Mapping[str, object] = field(default_factory=dict)  # of health, by name, as nobody can edit them
    unhealthy: str = ""  # what quantization did to its answers, where they broke a limit and the cell counts
    rows: str = ""  # sha256 of its rows, recorded when it ended; empty without such a record
    step: str = ""  # run of the `evaluate` step that it belongs to; empty if there is none

    @property
    def chat(self) -> str:
        """The variables that chats were rendered with: `chat.template_kwargs` as JSON."""
        return self.settings.get("chat.template_kwargs", "{}")


def read(run_id: str) -> Evaluated:
    """Return the evaluation that a run holds.

    Raises:
        BadInput: the run does not exist, was deleted, or is not a cell's evaluation.
    """
    run = contents.run(run_id, "a cell's evaluation")
    if run.info.lifecycle_stage == "deleted":
        raise BadInput(
            f"Run '{run_id}' was deleted: restore it (mlflow runs restore --run-id {run_id}), or evaluate again."
        )
    tags = run.data.tags
    metrics = run.data.metrics
    if tags.get(names.TAG_STEP) != "evaluate" or names.TAG_DIGEST not in tags or names.ACCURACY not in metrics:
        raise BadInput(
            f"Run '{run_id}' ({run.info.run_name}) is not a cell's evaluation: give a run below an `evaluate` step."
        )

    # What the cell's end sealed counts before what the run shows: tags can be edited, and inputs added, later.
    seal = reuse.sealed(run)
    model = seal.get("model") or _first_model(run)
    step_id = seal.get("step") or tags.get(runs.PARENT)
    step = contents.run(step_id) if step_id else None
    step_params = step.data.params if step else {}
    broken: tuple[str, ...] = ()
    if run.info.status != "FINISHED":
        broken = (tags.get(names.TAG_REASON, f"its run ended as {run.info.status}"),)
    return Evaluated(
        run_id=run_id,
        variant=seal.get("variant", tags[names.TAG_VARIANT]),
        scheme=names.scheme(seal.get("scheme", tags[names.TAG_SCHEME])),
        digest=seal.get("digest", tags[names.TAG_DIGEST]),
        parent=models.params(model).get("parent", "") if model else "",
        model=model,
        accuracy=metrics[names.ACCURACY],
        stderr=metrics.get(names.ACCURACY_STDERR, math.nan),
        n=_whole_number(metrics.get(names.N, 0)),
        broken=broken,
        questions=seal.get("questions") or _digest_of_questions(run),
        settings=origin.values(step) if step else {},
        limits=seal.get("limits") or {key.removeprefix("evaluate."): text for key, text in step_params.items()},
        unhealthy=seal.get("unhealthy", ""),
        rows=seal.get("rows", ""),
        step=step_id or "",
        task=seal.get("task", tags.get(names.TAG_TASK, "")),
    )


def _first_model(run: Run) -> str:
    """Return the model that a run evaluated, "models:/m-…"; empty if it has none."""
    inputs = run.inputs.model_inputs if run.inputs else []
    return f"models:/{inputs[0].model_id}" if inputs else ""


def _digest_of_questions(run: Run) -> str:
    """Return the digest of the data set that a run logged; empty if it has none."""
    datasets = run.inputs.dataset_inputs if run.inputs else []
    for dataset in datasets:
        for tag in dataset.tags:
            if tag.key == "digest":
                return tag.value
    return ""


def _whole_number(metric: float) -> int:
    return int(metric) if math.isfinite(metric) else 0


def find_sealed(variant: str, scheme: str) -> Iterator[Evaluated]:
    """Yield every finished evaluation of a cell in the store with sealed rows, the newest first."""
    is_of_variant = f"tags.`{names.TAG_STEP}` = 'evaluate' and tags.`{names.TAG_VARIANT}` = '{variant}'"
    for run in contents.find_runs(is_of_variant, status="FINISHED"):
        is_cell = names.ACCURACY in run.data.metrics and names.TAG_DIGEST in run.data.tags
        if is_cell and names.scheme(run.data.tags.get(names.TAG_SCHEME, "")) == scheme:
            cell = read(run.info.run_id)
            if cell.rows:
                yield cell


def files(run_ids: Sequence[str]) -> list[Path]:
    """Return where the rows of evaluated cells are: parquet files, one row per cell and question.

    Raises:
        BadInput: a run does not exist, or has no rows.
        QrlError: rows have changed since they were logged.
    """
    store.prepare()
    paths = [contents.artifact(run_id, names.QUESTIONS) for run_id in run_ids]
    for run_id, path in zip(run_ids, paths, strict=True):
        if reuse.sealed(contents.run(run_id)).get("rows") not in (None, process.file_digest(path)):
            raise QrlError(
                f"{names.QUESTIONS} of run {run_id} is not what was logged: its bytes have changed. Run its step "
                "again; damaged results are not reused."
            )
    return paths


def rows(run_ids: Sequence[str]) -> pd.DataFrame:
    """Return the rows of evaluated cells, by the runs of their evaluations: one per cell and question.

    Raises:
        BadInput, QrlError: as `files`; a file cannot be read.
    """
    frames = []
    for run_id, path in zip(run_ids, files(run_ids), strict=True):
        try:
            frames.append(pd.read_parquet(path))
        except (OSError, ValueError) as error:  # pyarrow's errors are both
            message = f"{names.QUESTIONS} of run {run_id} cannot be read ({first_line(error)[:120]})"
            raise QrlError(f"{message}: evaluate the cell again.") from None
    rows = pd.concat(frames, ignore_index=True)
    return rows.assign(scheme=rows["scheme"].map(names.scheme))
