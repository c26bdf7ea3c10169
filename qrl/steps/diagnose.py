"""Diagnose: what training and quantization did to the weights, layer by layer.

Three measurements, a table each: the weights at full precision and how far training moved them; what each scheme stores
of them and of their update; and how far quantization moves next-token distributions, the only one that runs the models.
"""

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
from qrl.recipe import Recipe, lists
from qrl.steps import outcome
from qrl.tasks import prompt, question_sets
from qrl.tracking import addresses, contents, keys, reuse, runs, store
from qrl.workspace import workspace, write_atomically, written

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
    full = {names.BASE: _full(recipe, base), names.GRPO: _full(recipe, trained)}
    quantized_paths = _quantized(recipe, quantized)
    if out is not None:
        _write_report(recipe, full, quantized_paths, Path(out))
        return

    store.prepare()
    digests = {variant: checkpoint.digest(path) for variant, path in full.items()}
    cell_digests = {}
    for scheme, paths in quantized_paths.items():
        for variant, path in paths.items():
            cell_digests[f"{variant}:{scheme}"] = checkpoint.digest(path)
    key = keys.diagnosis(recipe, digests[names.BASE], digests[names.GRPO], cell_digests)
    with (
        workspace(f"diagnose-{key[:16]}") as work,
        runs.step("diagnose", recipe, sections=("diagnose",), tags={names.TAG_CACHE_KEY: key}),
    ):
        metrics = _measure(recipe, full, quantized_paths, work)
        contents.log_scores(metrics)
        contents.describe("\n".join(f"- {line}" for line in words.glossary(metrics)))
        contents.log_folder(work)
        reuse.record_outputs(artifacts=sorted(path.name for path in work.iterdir()), values={"metrics": metrics})
        outcome.print_diagnosed(base, trained, quantized)


def _write_report(recipe: Recipe, full: dict[str, Path], quantized: Quantized, out: Path) -> None:
    """Write tables and figures into a folder, and print the metrics with what they mean."""
    with written(out, "diagnosis", {}):  # errors of the inputs are BadInput already
        tempfile.TemporaryFile(dir=out).close()  # fails before minutes of work, not after them
        metrics = _measure(recipe, full, quantized, out)

    lines = [f"{name:36} {value:.6g}" for name, value in metrics.items()]
    click.echo("\n".join([*lines, "", *words.glossary(metrics)]))
    tables = [names.WEIGHTS]
    if quantized:
        tables.append(names.STORED)
    if recipe.diagnose.behaviour:
        tables.append(names.BEHAVIOUR)
    click.echo(f"Written to {out}: {', '.join(tables)}, {names.FIGURES}/.", err=True)


def _check(recipe: Recipe, address: str) -> checkpoint.Checkpoint:
    """Return a checkpoint after its checks; its tokenizer matters only where models read texts."""
    folder = addresses.folder(address)
    reads_texts = recipe.diagnose.behaviour > 0
    checked = checkpoint.check(folder, need_tokenizer=reads_texts, need_chat_template=False)
    if reads_texts:
        question_sets.check_chat(recipe, folder)
    return checked


def _full(recipe: Recipe, address: str) -> Path:
    """Return the folder of a checkpoint in full precision; raise BadInput if it is quantized."""
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
    if not text:
        return by_scheme
    for cell, address in lists.parse_pairs("The list of cells", text, "MODEL").items():
        variant, scheme = lists.parse_cell(cell)
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
    from qrl.diagnose import movement  # here and below: they load torch, which a reused step does not need

    movement.check_same(full[names.BASE], full[names.GRPO])
    # The only measurement that needs no quantized checkpoint: it rounds the weights itself, as a proxy.
    of_weights, metrics = _measure_weights(recipe, full)
    _write(of_weights, out / names.WEIGHTS)

    of_schemes, scheme_metrics = _measure_schemes(full, quantized)
    metrics |= scheme_metrics
    if quantized:
        _write(of_schemes, out / names.STORED)

    of_models = pd.DataFrame()
    if recipe.diagnose.behaviour:
        of_models = _measure_behaviour(recipe, full, quantized)
    if len(of_models):
        _write(of_models, out / names.BEHAVIOUR)
        metrics |= _behaviour_metrics(of_models)

    _draw(of_weights, of_schemes, of_models, recipe, out / names.FIGURES)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _suffix(scheme: str, variant: str) -> str:
    """Return the end of a metric's name; only the base is named there."""
    if variant == names.BASE:
        return names.in_metric(scheme, names.BASE)
    return names.in_metric(scheme)


def _write(frame: pd.DataFrame, path: Path) -> None:
    with write_atomically(path) as partial:
        frame.to_parquet(partial)


def _measure_weights(recipe: Recipe, full: dict[str, Path]) -> tuple[pd.DataFrame, dict[str, float]]:
    """Return the table of the full-precision weights, and their metrics."""
    from qrl.diagnose import movement, weights

    settings = recipe.diagnose
    device = devices.choose(recipe.device)
    # Each matrix is read once for each of the two models, and once for both.
    total = 3 * len(weights.matrices(full[names.BASE], settings.embeddings))
    with tqdm(total=total, desc="weights", unit="matrix", leave=False) as bar:
        frames = {
            variant: weights.measure(path, variant, settings, device=device, progress=bar.update)
            for variant, path in full.items()
        }
        moved = movement.movement(full[names.BASE], full[names.GRPO], settings, device=device, progress=bar.update)

    both_variants = pd.concat(frames.values(), ignore_index=True)
    frame = both_variants.merge(moved.drop(columns=["layer", "projection", "numel"]), on="tensor", how="left")
    metrics = {f"weights/{name}": value for name, value in weights.summary(frames[names.GRPO]).items()}
    metrics |= {f"weights/{name}_{names.BASE}": value for name, value in weights.summary(frames[names.BASE]).items()}
    metrics |= {f"weights/{name}": value for name, value in movement.totals(moved).items()}
    return frame, metrics


def _measure_schemes(full: dict[str, Path], quantized: Quantized) -> tuple[pd.DataFrame, dict[str, float]]:
    """Return the table of the stored weights, a row per scheme, variant and matrix, and their metrics."""
    from qrl.diagnose import schemes

    tables = []
    metrics = {}
    for scheme, paths in quantized.items():
        count = len(stored.names(next(iter(paths.values()))))
        with tqdm(total=count, desc=scheme, unit="matrix", leave=False) as bar:
            table = schemes.measure(full, paths, scheme, progress=bar.update)
        tables.append(table)
        for variant in dict.fromkeys(table["variant"]):
            totals = schemes.totals(table, variant)
            metrics |= {f"weights/{name}_{_suffix(scheme, variant)}": value for name, value in totals.items()}
    if not tables:
        return pd.DataFrame(), {}
    return pd.concat(tables, ignore_index=True), metrics


def _measure_behaviour(recipe: Recipe, full: dict[str, Path], quantized: Quantized) -> pd.DataFrame:
    """Compare next-token distributions: every scheme, and full precision with one layer rounded (layer ≥ 0)."""
    from qrl.diagnose import behaviour, scan

    settings = recipe.diagnose
    device = devices.choose(recipe.device)
    dtype = devices.compute_dtype(recipe.evaluate.dtype, device)
    questions = question_sets.load(recipe, "heldout", max(2, settings.behaviour))
    template = prompt.of_recipe(recipe)

    rows = []
    for variant, path in full.items():
        model, tokenizer = hf.load(path, device, dtype)
        rendered = (prompt.training_text(tokenizer, question, template) for question in questions)
        texts = [tokenizer.encode(text, add_special_tokens=False) for text in rendered]

        proxy = scan.proxy_prefix(settings.bits)
        for layer, divergence in behaviour.sensitivity(model, texts, settings).items():
            rows.append({"variant": variant, "scheme": proxy, "layer": layer, **asdict(divergence)})

        for scheme, paths in quantized.items():
            if variant in paths:
                quantized_model, _ = hf.load(paths[variant], device, dtype)
                divergence = behaviour.against(model, quantized_model, texts)
                rows.append({"variant": variant, "scheme": scheme, "layer": -1, **asdict(divergence)})
    return pd.DataFrame(rows)


def _behaviour_metrics(of_models: pd.DataFrame) -> dict[str, float]:
    """Return the metrics of whole models, which have a layer below 0."""
    metrics = {}
    for row in of_models[of_models["layer"] < 0].itertuples():
        suffix = _suffix(row.scheme, row.variant)
        metrics[f"behaviour/kl_{suffix}"] = row.kl
        metrics[f"behaviour/top1_agreement_{suffix}"] = row.top1_agreement
        metrics["behaviour/n"] = row.n
    return metrics


def _draw(
    of_weights: pd.DataFrame, of_schemes: pd.DataFrame, of_models: pd.DataFrame, recipe: Recipe, folder: Path
) -> None:
    figures.layer_error(of_weights, folder / "layer_error.png")
    figures.movement(of_weights, folder / "weights_moved.png")
    figures.spread(of_weights, folder / "weights_spread.png", recipe.diagnose.outlier_multiplier)
    if len(of_schemes):
        figures.schemes(of_schemes, folder / "schemes_stored.png")
    if len(of_models):
        figures.behaviour(of_models, folder / "behaviour.png")
    figures.weights_page(of_weights, of_schemes, of_models, folder / PAGE)
