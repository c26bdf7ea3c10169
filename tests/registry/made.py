"""Versions and rows made without a model, for the tests of the registry."""

from pathlib import Path

import mlflow
import pandas as pd

from qrl import checkpoint, names, registry
from qrl.registry import versions
from qrl.tracking import reuse, runs

NAME = "qrl-tiny"


def version(
    variant: str = "base", scheme: str = "full", weights: str = "", parent: int | None = None
) -> versions.Version:
    """Register a version from a model of its own, made in the store; `weights` is the content of its weight file."""
    with runs.step("evaluate"):
        model = mlflow.initialize_logged_model(f"{variant}-{scheme}")
    folder = Path(model.artifact_location) / "model"
    folder.mkdir(parents=True)
    (folder.parent / "MLmodel").write_text("flavors: {}\n")
    (folder / "config.json").write_text("{}")
    (folder / checkpoint.WEIGHTS).write_text(weights or model.model_id)
    mlflow.finalize_logged_model(model.model_id, "READY")
    cell = {"digest": checkpoint.digest(folder), "variant": variant, "scheme": scheme}
    numbers = {"accuracy": 0.6, "stderr": 0.01, "n": 2000}
    return registry.register(NAME, f"models:/{model.model_id}", **cell, **numbers, parent_version=parent)


def log_rows(
    folder: Path, variant: str, scheme: str, right: int = 10, finish_reason: str = "stop", **facts: str
) -> None:
    """Log 20 rows of a cell in the active run, and seal them as its end does."""
    rows = pd.DataFrame({"question": [f"q{i:02}" for i in range(20)], "correct": [int(i < right) for i in range(20)]})
    told = {"parsed": "1", "finish_reason": finish_reason, "leaked": False, "fault": None, names.ENGINE: "transformers"}
    rows.assign(variant=variant, scheme=scheme, **told).to_parquet(folder / names.QUESTIONS)
    mlflow.log_artifact(str(folder / names.QUESTIONS))
    reuse.seal(folder / names.QUESTIONS, {"variant": variant, "scheme": scheme, **facts})
