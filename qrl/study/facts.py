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
    """Return the head of a study's report: label → text, empty if unknown; `table` is as `table.json` holds it."""
    run = runs.opened(run_id)
    any_scheme = next(iter(table.values()))
    any_cell = next(iter(any_scheme["cells"].values()))
    seeds = any_scheme.get("seeds") or 1
    started = datetime.fromtimestamp(run.info.start_time / 1000).astimezone()

    task = tasks.label(recipe.task)
    if recipe.data:
        task += f", {recipe.data}"
    questions = f"{any_cell['n']:,} held-out"
    if recipe.evaluate.selection == "first":
        questions += ", the first rows"
    versions = [f"{name} {process.installed(name) or 'not installed'}" for name in LIBRARIES]
    return {
        "Model": recipe.model,
        "Task": task,
        "Training": f"{recipe.train.title}, {recipe.train.steps} steps of {recipe.train.batch}",
        "Questions": questions,
        "Seed": str(recipe.seed) if seeds == 1 else f"{seeds} seeds",
        "Date": started.strftime("%Y-%m-%d %H:%M %Z"),
        "Commit": run.data.tags.get("mlflow.source.git.commit", "")[:12],
        "Machine": _machine(run.data.params.get("device", "")),
        "Versions": ", ".join([f"qrl {__version__}", *versions, f"Python {platform.python_version()}"]),
    }


def _machine(device: str) -> str:
    import psutil

    parts = [f"{platform.system()} {platform.machine()}", _processor(), f"{os.cpu_count()} cores"]
    parts.append(f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory")
    if device == "cuda":
        import torch

        parts.append(torch.cuda.get_device_name())
    machine = ", ".join(part for part in parts if part)
    return f"{machine}; device {device}" if device else machine


def _processor() -> str:
    """Return the processor's name; empty if the system does not give it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def cells(launcher: Launcher) -> dict[str, tuple[str, int | None]]:
    """Return the models that the steps made: address → `variant:scheme`, and bytes of weights, None if unknown."""
    cell_of_address = {}
    is_local = models.local(runs.opened(launcher.run_id).info.artifact_uri)
    for obtained in launcher.results:
        address = obtained.result.outputs.models.get("model", "")
        if not address.startswith("models:/"):
            continue
        params = models.params(address)
        cell = f"{params.get('variant')}:{names.scheme(params.get('scheme', ''))}"
        size_bytes = params.get("bytes")
        if size_bytes is None and is_local:  # from a remote store, nothing is downloaded for this
            folder = models.local_path(address)
            size_bytes = sum((folder / name).stat().st_size for name in checkpoint.shards(folder))
        cell_of_address[address] = (cell, None if size_bytes is None else int(size_bytes))
    return cell_of_address
