"""Diagnose: what training did to the weights, layer by layer."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path

import click
import pandas as pd
from tqdm import tqdm

from qrl import checkpoint, figures, names
from qrl.diagnose import behaviour, movement
from qrl.diagnose import schemes as schemes_room
from qrl.diagnose import weights as room
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.formats import stored
from qrl.recipe import Recipe
from qrl.steps import inputs
from qrl.tasks import prompt
from qrl.tracking import addresses, contents, keys, reuse, runs, store
from qrl.workspace import workspace

WEIGHTS, SCHEMES, BEHAVIOUR = names.WEIGHTS, names.STORED, names.BEHAVIOUR
PAGE = "weights.html"
Quantized = dict[str, dict[str, Path]]  # scheme → variant → checkpoint


def diagnose(recipe: Recipe, base: str, trained: str, *, quantized: str | None, out: str | None) -> None:
    """Measures both checkpoints' weights, how far training moved them and what quantized ones kept of it; draws what it found.

    Args:
        recipe: the section `diagnose`.
        base: folder or model address, before training.
        trained: the same, after training.
        quantized: the same models quantized, `base:nf4=MODEL,grpo:nf4=MODEL,…`; None: the 4-bit proxy only.
        out: write the tables and figures there and touch no store; None logs them to MLflow.
    """
    found = {variant: _checked(address) for variant, address in ((names.BASE, base), (names.GRPO, trained))}
    schemes = _quantized(quantized)
    if out is not None:
        folder = _made(Path(out))
        try:
            measured = _measure(recipe, found, schemes, folder)
        except OSError as error:  # inputs' own are told where they are read
            raise _unwritable(folder, error.strerror or str(error)) from None
        click.echo("\n".join(f"{name:36} {value:.6g}" for name, value in measured.items()))
        tables = [WEIGHTS, *([SCHEMES] if schemes else []), *([BEHAVIOUR] if recipe.diagnose.behaviour else [])]
        click.echo(f"Written to {out}: {', '.join(tables)}, {names.FIGURES}/.", err=True)
        return
    store.prepare()
    digests = {variant: checkpoint.digest(path) for variant, path in found.items()}
    below = {
        f"{variant}:{scheme}": checkpoint.digest(path)
        for scheme, paths in schemes.items()
        for variant, path in paths.items()
    }
    key = keys.diagnosis(recipe, digests[names.BASE], digests[names.GRPO], below)
    with (
        workspace(f"diagnose-{key[:16]}") as work,
        runs.step("diagnose", recipe, sections=("diagnose",), tags={names.TAG_CACHE_KEY: key}),
    ):
        measured = _measure(recipe, found, schemes, work)
        contents.log_scores(measured)
        contents.log_folder(work)
        reuse.record_outputs(artifacts=sorted(path.name for path in work.iterdir()), values={"metrics": measured})


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"The folder {folder} cannot be made ({error.strerror}): give one that is writable.") from None
    if not os.access(folder, os.W_OK):  # told before minutes of work
        raise _unwritable(folder, "no permission")
    return folder


def _unwritable(folder: Path, why: str) -> BadInput:
    return BadInput(
        f"Tables and figures cannot be written to {folder} ({why}): give a folder that is writable, on a disk with room."
    )


def _checked(address: str) -> Path:
    found = checkpoint.check(addresses.folder(address), need_chat_template=False)
    if found.quantization:
        raise BadInput(f"{address} is stored in {found.quantization}: diagnose reads full-precision weights.")
    return found.path


def _quantized(text: str | None) -> Quantized:
    """The checkpoints of `variant:scheme=model,…`, by scheme."""
    found: Quantized = {}
    for cell, address in (inputs.pairs(text, "a cell and its model") if text else {}).items():
        variant, scheme = inputs.cell(cell)
        if variant not in (names.BASE, names.GRPO) or scheme == names.FULL:
            raise BadInput(
                f"'{cell}' is no quantized cell of the two checkpoints: expected {names.BASE}:SCHEME or {names.GRPO}:SCHEME."
            )
        path = checkpoint.check(addresses.folder(address), need_chat_template=False).path
        stored.names(path)
        found.setdefault(scheme, {})[variant] = path
    return found


def _measure(recipe: Recipe, found: dict[str, Path], quantized: Quantized, out: Path) -> dict[str, float]:
    """Writes tables and figures; returns metrics by name, the base's under `weights/…_base`, a scheme's under `weights/…_<scheme>`."""
    movement.check_same(*found.values())
    frame, measured = _full(recipe, found)
    rows = [_scheme(scheme, found, paths) for scheme, paths in quantized.items()]
    every = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()
    for scheme, table in zip(quantized, rows, strict=True):
        for variant in dict.fromkeys(table["variant"]):
            suffix = f"{scheme}_{names.BASE}" if variant == names.BASE else scheme
            measured |= {
                f"weights/{name}_{suffix}": value for name, value in schemes_room.totals(table, variant).items()
            }
    _write(frame, out / WEIGHTS)
    if rows:
        _write(every, out / SCHEMES)
    said = _behaviour(recipe, found, quantized) if recipe.diagnose.behaviour else pd.DataFrame()
    if len(said):
        _write(said, out / BEHAVIOUR)
        for row in said[said["layer"] < 0].itertuples():
            suffix = f"{row.scheme}_{names.BASE}" if row.variant == names.BASE else row.scheme
            measured |= {
                f"behaviour/kl_{suffix}": row.kl,
                f"behaviour/top1_agreement_{suffix}": row.top1_agreement,
                "behaviour/n": row.n,
            }
    _draw(frame, every, said, recipe, out / names.FIGURES)
    return {name: value for name, value in measured.items() if math.isfinite(value)}


def _write(frame: pd.DataFrame, path: Path) -> None:
    """By rename: whoever kills this leaves the table that was there, or none, never half of one."""
    partial = path.with_name(f".{path.name}.partial")
    frame.to_parquet(partial)
    os.replace(partial, path)


def _full(recipe: Recipe, found: dict[str, Path]) -> tuple[pd.DataFrame, dict[str, float]]:
    """The table of the full-precision weights, and their metrics."""
    settings = recipe.diagnose
    chosen = {"bits": settings.bits, "group_size": settings.group_size, "embeddings": settings.embeddings}
    chosen["device"] = devices.choose(recipe.device)
    with tqdm(
        total=3 * room.count(found[names.BASE], settings.embeddings), desc="weights", unit="matrix", leave=False
    ) as bar:
        frames = {
            variant: room.measure(
                path, variant, **chosen, outlier_multiplier=settings.outlier_multiplier, progress=bar.update
            )
            for variant, path in found.items()
        }
        moved = movement.movement(*found.values(), **chosen, ranks=settings.effective_rank, progress=bar.update)
    both = pd.concat(frames.values(), ignore_index=True)
    frame = both.merge(moved.drop(columns=["layer", "projection", "numel"]), on="tensor", how="left")
    measured = {f"weights/{name}": value for name, value in room.summary(frames[names.GRPO]).items()}
    measured |= {f"weights/{name}_{names.BASE}": value for name, value in room.summary(frames[names.BASE]).items()}
    return frame, measured | {f"weights/{name}": value for name, value in movement.totals(moved).items()}


def _scheme(scheme: str, full: dict[str, Path], quantized: dict[str, Path]) -> pd.DataFrame:
    with tqdm(total=len(stored.names(next(iter(quantized.values())))), desc=scheme, unit="matrix", leave=False) as bar:
        return schemes_room.measure(full, quantized, scheme, progress=bar.update)


def _behaviour(recipe: Recipe, full: dict[str, Path], quantized: Quantized) -> pd.DataFrame:
    """Next-token distributions of every scheme against full precision, and of full precision with one layer rounded (layer ≥ 0)."""
    settings, device = recipe.diagnose, devices.choose(recipe.device)
    asked = inputs.questions(recipe, "heldout", max(2, settings.behaviour))
    rows = []
    for variant, path in full.items():
        model, tokens = hf.load(path, device, devices.compute_dtype(recipe.evaluate.dtype, device))
        texts = [
            tokens.encode(prompt.training_text(tokens, question, recipe.prompt), add_special_tokens=False)
            for question in asked
        ]
        alone = behaviour.sensitivity(model, texts, bits=settings.bits, group_size=settings.group_size)
        rows += [{"variant": variant, "scheme": "w4", "layer": layer, **asdict(each)} for layer, each in alone.items()]
        for scheme, paths in quantized.items():
            if variant in paths:
                other, _ = hf.load(paths[variant], device, devices.compute_dtype(recipe.evaluate.dtype, device))
                rows.append(
                    {
                        "variant": variant,
                        "scheme": scheme,
                        "layer": -1,
                        **asdict(behaviour.against(model, other, texts)),
                    }
                )
    return pd.DataFrame(rows)


def _draw(frame: pd.DataFrame, every: pd.DataFrame, said: pd.DataFrame, recipe: Recipe, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    figures.layer_error(frame, folder / "layer_error.png")
    figures.movement(frame, folder / "weights_moved.png")
    figures.spread(frame, folder / "weights_spread.png", recipe.diagnose.outlier_multiplier)
    if len(every):
        figures.schemes(every, folder / "schemes_stored.png")
    if len(said):
        figures.behaviour(said, folder / "behaviour.png")
    figures.weights_page(frame, every, said, folder / PAGE)
