"""Diagnose: what training and quantization did to the weights, layer by layer."""

import math
import tempfile
from dataclasses import asdict
from pathlib import Path

import click
import pandas as pd
from tqdm import tqdm

from qrl import checkpoint, figures, names
from qrl.diagnose import words
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.formats import stored
from qrl.recipe import Recipe
from qrl.steps import inputs, outcome
from qrl.tasks import prompt
from qrl.tracking import addresses, contents, keys, reuse, runs, store
from qrl.workspace import workspace, written, written_whole

PAGE = "weights.html"
Quantized = dict[str, dict[str, Path]]  # scheme → variant → checkpoint


def diagnose(recipe: Recipe, base: str, trained: str, *, quantized: str | None, out: str | None) -> None:
    """Measure both checkpoints' weights, how far training moved them and what quantized ones keep of it; draw figures.

    Args:
        recipe: the section `diagnose`.
        base: folder or model address, before training.
        trained: the same, after training.
        quantized: the same models quantized, `base:nf4=MODEL,grpo:nf4=MODEL,…`; None: the round-to-nearest proxy only.
        out: write the tables and figures there and touch no store; None logs them to MLflow.
    """
    full = {variant: _full(recipe, address) for variant, address in ((names.BASE, base), (names.GRPO, trained))}
    below = _quantized(recipe, quantized)
    if out is not None:
        with written(Path(out), "diagnosis", {}):  # errors of the inputs are BadInput already
            tempfile.TemporaryFile(dir=out).close()  # fails before minutes of work, not after them
            metrics = _measure(recipe, full, below, Path(out))
        lines = [f"{name:36} {value:.6g}" for name, value in metrics.items()]
        click.echo("\n".join([*lines, "", *words.glossary(metrics)]))
        made = {names.WEIGHTS: True, names.STORED: below, names.BEHAVIOUR: recipe.diagnose.behaviour}
        click.echo(f"Written to {out}: {', '.join(filter(made.get, made))}, {names.FIGURES}/.", err=True)
        return
    store.prepare()
    digests = {variant: checkpoint.digest(path) for variant, path in full.items()}
    of_cells = {f"{variant}:{scheme}": path for scheme, paths in below.items() for variant, path in paths.items()}
    cells = {cell: checkpoint.digest(path) for cell, path in of_cells.items()}
    key = keys.diagnosis(recipe, digests[names.BASE], digests[names.GRPO], cells)
    with (
        workspace(f"diagnose-{key[:16]}") as work,
        runs.step("diagnose", recipe, sections=("diagnose",), tags={names.TAG_CACHE_KEY: key}),
    ):
        metrics = _measure(recipe, full, below, work)
        contents.log_scores(metrics)
        contents.describe("\n".join(f"- {line}" for line in words.glossary(metrics)))
        contents.log_folder(work)
        reuse.record_outputs(artifacts=sorted(path.name for path in work.iterdir()), values={"metrics": metrics})
        outcome.diagnosed(base, trained, quantized)


def _check(recipe: Recipe, address: str) -> checkpoint.Checkpoint:
    """Return a checkpoint after its checks; its tokenizer matters only where models read texts."""
    folder, reads = addresses.folder(address), recipe.diagnose.behaviour > 0
    checked = checkpoint.check(folder, need_tokenizer=reads, need_chat_template=False)
    if reads:
        inputs.check_chat(recipe, folder)
    return checked


def _full(recipe: Recipe, address: str) -> Path:
    checked = _check(recipe, address)
    if checked.quantization:
        raise BadInput(
            f"{address} is quantized ({checked.quantization}), but a full-precision checkpoint was expected: "
            "give quantized ones with --quantized."
        )
    return checked.path


def _quantized(recipe: Recipe, text: str | None) -> Quantized:
    """Return the checkpoints of `variant:scheme=model,…`, by scheme."""
    by_scheme: Quantized = {}
    for cell, address in (inputs.pairs(text, "a cell and its model") if text else {}).items():
        variant, scheme = inputs.cell(cell)
        if variant not in (names.BASE, names.GRPO) or scheme == names.FULL:
            raise BadInput(
                f"'{cell}' is no quantized cell of the two checkpoints: "
                f"expected {names.BASE}:SCHEME or {names.GRPO}:SCHEME."
            )
        path = _check(recipe, address).path
        stored.names(path)
        by_scheme.setdefault(scheme, {})[variant] = path
    return by_scheme


def _measure(recipe: Recipe, full: dict[str, Path], quantized: Quantized, out: Path) -> dict[str, float]:
    """Write tables and figures; return metrics, the base's as `weights/…_base`, a scheme's as `weights/…_<scheme>`."""
    from qrl.diagnose import movement, schemes  # here and below: they load torch, which a reused step does not need

    movement.check_same(*full.values())
    frame, metrics = _weights(recipe, full)
    _write(frame, out / names.WEIGHTS)
    tables = []
    for scheme, paths in quantized.items():
        count = len(stored.names(next(iter(paths.values()))))
        with tqdm(total=count, desc=scheme, unit="matrix", leave=False) as bar:
            tables.append(schemes.measure(full, paths, scheme, progress=bar.update))
        for variant in dict.fromkeys(tables[-1]["variant"]):
            totals = schemes.totals(tables[-1], variant)
            metrics |= {f"weights/{name}_{_suffix(scheme, variant)}": value for name, value in totals.items()}
    of_schemes = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    if tables:
        _write(of_schemes, out / names.STORED)
    of_models = _behaviour(recipe, full, quantized) if recipe.diagnose.behaviour else pd.DataFrame()
    if len(of_models):
        _write(of_models, out / names.BEHAVIOUR)
        for row in of_models[of_models["layer"] < 0].itertuples():
            suffix = _suffix(row.scheme, row.variant)
            metrics[f"behaviour/kl_{suffix}"] = row.kl
            metrics[f"behaviour/top1_agreement_{suffix}"] = row.top1_agreement
            metrics["behaviour/n"] = row.n
    _draw(frame, of_schemes, of_models, recipe, out / names.FIGURES)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _suffix(scheme: str, variant: str) -> str:
    return names.in_metric(scheme, names.BASE) if variant == names.BASE else names.in_metric(scheme)


def _write(frame: pd.DataFrame, path: Path) -> None:
    with written_whole(path) as partial:
        frame.to_parquet(partial)


def _weights(recipe: Recipe, full: dict[str, Path]) -> tuple[pd.DataFrame, dict[str, float]]:
    """Return the table of the full-precision weights, and their metrics."""
    from qrl.diagnose import movement, weights

    settings = recipe.diagnose
    total = 3 * len(weights.matrices(full[names.BASE], settings.embeddings))
    with tqdm(total=total, desc="weights", unit="matrix", leave=False) as bar:
        how = {"device": devices.choose(recipe.device), "progress": bar.update}
        frames = {variant: weights.measure(path, variant, settings, **how) for variant, path in full.items()}
        moved = movement.movement(*full.values(), settings, **how)
    both = pd.concat(frames.values(), ignore_index=True)
    frame = both.merge(moved.drop(columns=["layer", "projection", "numel"]), on="tensor", how="left")
    metrics = {f"weights/{name}": value for name, value in weights.summary(frames[names.GRPO]).items()}
    metrics |= {f"weights/{name}_{names.BASE}": value for name, value in weights.summary(frames[names.BASE]).items()}
    return frame, metrics | {f"weights/{name}": value for name, value in movement.totals(moved).items()}


def _behaviour(recipe: Recipe, full: dict[str, Path], quantized: Quantized) -> pd.DataFrame:
    """Compare next-token distributions: every scheme, and full precision with one layer rounded (layer ≥ 0)."""
    from qrl.diagnose import behaviour, scan

    settings, device = recipe.diagnose, devices.choose(recipe.device)
    dtype = devices.compute_dtype(recipe.evaluate.dtype, device)
    questions = inputs.questions(recipe, "heldout", max(2, settings.behaviour))
    rows = []
    for variant, path in full.items():
        model, tokens = hf.load(path, device, dtype)
        rendered = (prompt.training_text(tokens, question, prompt.of(recipe)) for question in questions)
        texts = [tokens.encode(text, add_special_tokens=False) for text in rendered]
        layers = behaviour.sensitivity(model, texts, settings)
        own = {"variant": variant, "scheme": scan.proxy(settings.bits)}
        rows += [own | {"layer": layer} | asdict(measured) for layer, measured in layers.items()]
        for scheme, paths in quantized.items():
            if variant in paths:
                other, _ = hf.load(paths[variant], device, dtype)
                measured = behaviour.against(model, other, texts)
                rows.append({"variant": variant, "scheme": scheme, "layer": -1, **asdict(measured)})
    return pd.DataFrame(rows)


def _draw(frame: pd.DataFrame, of_schemes: pd.DataFrame, of_models: pd.DataFrame, recipe: Recipe, folder: Path) -> None:
    figures.layer_error(frame, folder / "layer_error.png")
    figures.movement(frame, folder / "weights_moved.png")
    figures.spread(frame, folder / "weights_spread.png", recipe.diagnose.outlier_multiplier)
    if len(of_schemes):
        figures.schemes(of_schemes, folder / "schemes_stored.png")
    if len(of_models):
        figures.behaviour(of_models, folder / "behaviour.png")
    figures.weights_page(frame, of_schemes, of_models, folder / PAGE)
