"""The facts that head a study's report: settings, date, commit, versions, machine, and the sizes of its models."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl import __version__, checkpoint, names, process, tasks
from qrl.recipe import Recipe
from qrl.tracking import models, runs

if TYPE_CHECKING:
    from qrl.study.launch import Launcher

LIBRARIES = ("torch", "transformers", "trl", "mlflow")


def head(recipe: Recipe, run_id: str, table: Mapping[str, Any]) -> dict[str, str]:
    """Return the head of a study's report: label → text, empty where unknown; `table` is as `table.json` holds it."""
    run = runs.opened(run_id)
    entry = next(iter(table.values()))
    cell = next(iter(entry["cells"].values()))
    seeds, training = entry.get("seeds") or 1, recipe.train
    libraries = [f"{name} {process.installed(name) or 'not installed'}" for name in LIBRARIES]
    return {
        "Model": recipe.model,
        "Task": tasks.label(recipe.task) + (f", {recipe.data}" if recipe.data else ""),
        "Training": f"{training.title}, {training.steps} steps of {training.batch}",
        "Questions": f"{cell['n']:,} held-out{', the first rows' * (recipe.evaluate.selection == 'first')}",
        "Seed": str(recipe.seed) if seeds == 1 else f"{seeds} seeds",
        "Date": datetime.fromtimestamp(run.info.start_time / 1000).astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "Commit": run.data.tags.get("mlflow.source.git.commit", "")[:12],
        "Machine": _machine(run.data.params.get("device", "")),
        "Versions": ", ".join([f"qrl {__version__}", *libraries, f"Python {platform.python_version()}"]),
    }


def _machine(device: str) -> str:
    import psutil

    parts = [f"{platform.system()} {platform.machine()}", _processor(), f"{os.cpu_count()} cores"]
    parts.append(f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory")
    if device == "cuda":
        import torch

        parts.append(torch.cuda.get_device_name())
    return ", ".join(filter(None, parts)) + (f"; device {device}" if device else "")


def _processor() -> str:
    """Return the processor's name; empty where the system does not give it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def cells(launcher: Launcher) -> dict[str, tuple[str, int | None]]:
    """Return the models that the steps made: address → `variant:scheme`, and bytes of weights, None where unknown."""
    made, local = {}, models.local(runs.opened(launcher.run_id).info.artifact_uri)
    for _, result in launcher.results:
        address = result.outputs.models.get("model", "")
        if address.startswith("models:/"):
            facts = models.params(address)
            size = facts.get("bytes")
            if size is None and local:  # of a remote store, nothing is downloaded for this
                folder = models.local_path(address)
                size = sum((folder / name).stat().st_size for name in checkpoint.shards(folder))
            cell = f"{facts.get('variant')}:{names.scheme(facts.get('scheme', ''))}"
            made[address] = (cell, None if size is None else int(size))
    return made
