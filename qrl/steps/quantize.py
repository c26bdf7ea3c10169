"""Quantize checkpoints under one scheme: a nested run, a logged model, for each."""

from __future__ import annotations

from pathlib import Path

import click

from qrl import checkpoint, keys, names, process
from qrl import quantize as room
from qrl.engine import device as devices
from qrl.errors import BadInput
from qrl.quantize import staging
from qrl.recipe import Recipe
from qrl.steps import inputs, record
from qrl.tasks import prompt
from qrl.tracking import reuse, runs, store
from qrl.workspace import workspace


def check_scheme(scheme: str) -> None:
    """Refuses a scheme that `quantize` does not make."""
    inputs.check_scheme(scheme, names.QUANTIZED_SCHEMES)


def sources(recipe: Recipe, given: str | None) -> dict[str, checkpoint.Checkpoint]:
    """The full-precision checkpoint of every variant: those of `variant=model,…`, or the recipe's model as base.

    Raises:
        BadInput: not such a list, no checkpoint, or one that is quantized already.
    """
    chosen = inputs.pairs(given, "a variant and its model") if given else {names.BASE: recipe.model}
    found = {inputs.check_variant(variant): checkpoint.check(inputs.folder(address)) for variant, address in chosen.items()}
    for variant, each in found.items():
        if each.quantization:
            raise BadInput(f"{chosen[variant]} is quantized already ({each.quantization}): give full-precision weights.")
    return found


def quantize(recipe: Recipe, scheme: str, given: str | None) -> None:
    """Stores each model in few bits, all with the same settings and calibration texts, and logs what came out."""
    checkpoints = sources(recipe, given)
    process.hush_transformers()
    device = devices.choose(recipe.device)
    asked = inputs.questions(recipe, "train", recipe.quantize.calibration_samples) if scheme == names.AWQ else []
    store.prepare()
    tags = {names.TAG_SCHEME: scheme, names.TAG_TASK: recipe.task}
    with (
        workspace(f"quantize-{scheme}", shared=True) as work,
        runs.step("quantize", recipe, sections=("quantize",), params={"scheme": scheme, "device": device}, tags=tags),
    ):
        if asked:
            runs.log_dataset(
                f"{recipe.task}-calibration",
                digest=inputs.digest(asked),
                context="calibration",
                n=len(asked),
                source=inputs.source_of(recipe),
            )
        for variant, found in checkpoints.items():
            _one(recipe, scheme, variant, found, asked, device, work)


def _one(recipe: Recipe, scheme: str, variant: str, found: checkpoint.Checkpoint, asked: list, device: str, work: Path) -> None:
    """One checkpoint: its own nested run, found again by its own key."""
    key = keys.quantized(recipe, scheme, found.digest, device)
    tags = {
        names.TAG_STEP: "quantize",
        names.TAG_CACHE_KEY: key,
        names.TAG_VARIANT: variant,
        names.TAG_SCHEME: scheme,
        names.TAG_PARENT_DIGEST: found.digest,
    }
    name = names.cell_name(variant, scheme)
    with runs.child(name, params={"variant": variant, "scheme": scheme, "task": recipe.task}, tags=tags):
        tokens = staging.tokenizer(found.path) if asked else None
        made = room.run(
            scheme,
            found.path,
            work / variant,
            calibration=[prompt.training_text(tokens, question, recipe.prompt) for question in asked],
            group_size=recipe.quantize.group_size,
            max_tokens=recipe.quantize.calibration_max_tokens,
            seed=recipe.seed,
            device=device,
        )
        uri, digest = record.own(
            recipe,
            made.path,
            variant,
            scheme,
            parent=found.digest,
            bytes=made.bytes,
            bits_per_weight=round(made.bits_per_weight, 3),
        )
        runs.log_scores(
            {
                "quantize/bytes": made.bytes,
                "quantize/bits_per_weight": made.bits_per_weight,
                "quantize/bits_per_parameter": made.bits_per_parameter,
                "quantize/seconds": made.seconds,
            },
            model_uri=uri,
        )
        reuse.record_outputs(models={"model": uri}, values={"digest": digest, "parent": found.digest})
        click.echo(
            f"      {name}: {made.bytes / 1e6:.2f} MB, {made.bits_per_weight:.2f} bits a weight, {made.seconds:.1f} s", err=True
        )
