"""Diagnose: what training did to the weights, layer by layer."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import click
from tqdm import tqdm

from qrl import checkpoint, figures, keys, names
from qrl.diagnose import movement
from qrl.diagnose import weights as room
from qrl.engine import device as devices
from qrl.errors import BadInput
from qrl.recipe import Recipe
from qrl.steps import inputs
from qrl.tracking import reuse, runs, store
from qrl.workspace import workspace

WEIGHTS = "weights.parquet"


def diagnose(recipe: Recipe, base: str, trained: str, *, out: str | None) -> None:
    """Measures outliers and 4-bit error of both checkpoints and how many codes moved; draws what it found.

    Args:
        recipe: the section `diagnose`.
        base: folder or model address, before training.
        trained: the same, after training.
        out: write weights.parquet and figures there and touch no store; None logs them to MLflow.
    """
    found = {variant: _checked(address) for variant, address in ((names.BASE, base), (names.GRPO, trained))}
    if out is not None:
        folder = _made(Path(out))
        measured = _measure(recipe, found, folder)
        click.echo("\n".join(f"{name:32} {value:.6g}" for name, value in measured.items()))
        click.echo(f"Written to {out}: {WEIGHTS}, {names.FIGURES}/.", err=True)
        return
    store.prepare()
    digests = {variant: checkpoint.digest(path) for variant, path in found.items()}
    key = keys.diagnosis(recipe, digests[names.BASE], digests[names.GRPO])
    with (
        workspace(f"diagnose-{key[:16]}") as work,
        runs.step("diagnose", recipe, sections=("diagnose",), tags={names.TAG_CACHE_KEY: key}),
    ):
        measured = _measure(recipe, found, work)
        runs.log_scores(measured)
        runs.log_folder(work)
        reuse.record_outputs(artifacts=[WEIGHTS, names.FIGURES], values={"metrics": measured})


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"The folder {folder} cannot be made ({error.strerror}): give one that is writable.") from None
    return folder


def _checked(address: str) -> Path:
    found = checkpoint.check(inputs.folder(address), need_chat_template=False)
    if found.quantization:
        raise BadInput(f"{address} is stored in {found.quantization}: diagnose reads full-precision weights.")
    return found.path


def _measure(recipe: Recipe, found: dict[str, Path], out: Path) -> dict[str, float]:
    """Writes weights.parquet and figures; returns metrics by name, the base's under `weights/…_base`."""
    import pandas as pd

    settings, device = recipe.diagnose, devices.choose(recipe.device)
    chosen = {"bits": settings.bits, "group_size": settings.group_size, "embeddings": settings.embeddings, "device": device}
    matrices = room.count(found[names.BASE], settings.embeddings)
    movement.check_same(*found.values())
    with tqdm(total=3 * matrices, desc="weights", unit="matrix", leave=False) as bar:
        frames = {
            variant: room.measure(
                path, variant, **chosen, outlier_multiplier=settings.outlier_multiplier, progress=bar.update
            )
            for variant, path in found.items()
        }
        moved = movement.movement(*found.values(), **chosen, ranks=settings.effective_rank, progress=bar.update)
    both = pd.concat(frames.values(), ignore_index=True)
    frame = both.merge(moved.drop(columns=["layer", "projection", "numel"]), on="tensor", how="left")
    shutil.rmtree(out / names.FIGURES, ignore_errors=True)
    (out / names.FIGURES).mkdir()
    frame.to_parquet(out / WEIGHTS)
    figures.layer_error(frame, out / names.FIGURES / "layer_error.png")
    trained = {f"weights/{name}": value for name, value in room.summary(frames[names.GRPO]).items()}
    base = {f"weights/{name}_{names.BASE}": value for name, value in room.summary(frames[names.BASE]).items()}
    return trained | base | {f"weights/{name}": value for name, value in movement.totals(moved).items() if not math.isnan(value)}
