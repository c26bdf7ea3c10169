"""Evaluate cells: every one asked the same questions in one process, a nested run for each."""

from __future__ import annotations

import json
from pathlib import Path

import click
from tqdm import tqdm

from qrl import checkpoint, names
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import UnhealthyCell
from qrl.evaluate import cells as room
from qrl.evaluate import groups, health, scores
from qrl.recipe import Recipe
from qrl.steps import inputs, outcome, record
from qrl.tasks import prompt
from qrl.tracking import contents, keys, lineage, models, reuse, runs, store
from qrl.workspace import workspace


def evaluate(recipe: Recipe, given: str | None) -> None:
    """Asks every cell the recipe's held-out questions and logs accuracy, health and a row per question.

    Raises:
        UnhealthyCell: after all cells were asked, with a sentence for each limit that one broke.
    """
    addresses, found = check(recipe, given)
    device = devices.choose(recipe.device)
    questions = inputs.questions(recipe, "heldout", recipe.evaluate.n)
    prompt.template_hash(recipe.prompt)  # an unknown template is refused before anything starts
    if copies := inputs.repeated(questions):
        click.secho(f"qrl: {copies}", fg="yellow", err=True)
    store.prepare()
    params = {"device": device}
    tags = {names.TAG_TASK: recipe.task}
    with runs.step("evaluate", recipe, sections=("evaluate",), params=params, tags=tags):
        broken, asked = [], {}
        for (variant, scheme), weights in found.items():
            try:
                asked[f"{variant}:{scheme}"] = _one(
                    recipe, variant, scheme, addresses[variant, scheme], weights, questions, device
                )
            except UnhealthyCell as error:
                click.secho(f"      {error}", fg="red", err=True)
                broken.append(str(error))
        if asked:
            outcome.evaluated(asked)
        if broken:
            unhealthy = UnhealthyCell(" ".join(broken))
            unhealthy.printed = True  # cell by cell, above
            raise unhealthy


def check(
    recipe: Recipe, given: str | None
) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], checkpoint.Checkpoint]]:
    """Cells' addresses and checkpoints, by variant and scheme.

    Raises:
        BadInput: not such a list, or weights that are stored otherwise than the cell says.
    """
    text = given or f"{names.BASE}:{names.FULL}={recipe.model}"
    addresses = {inputs.cell(cell): address for cell, address in inputs.pairs(text, "a cell and its model").items()}
    return addresses, {cell: inputs.stored_as(cell, address) for cell, address in addresses.items()}


def _one(
    recipe: Recipe,
    variant: str,
    scheme: str,
    address: str,
    weights: checkpoint.Checkpoint,
    questions: list,
    device: str,
) -> str:
    """Asks one cell; the id of its run."""
    settings = recipe.evaluate
    tags = {
        names.TAG_STEP: "evaluate",
        names.TAG_CACHE_KEY: keys.cell(recipe, variant, scheme, weights.digest, device),
        names.TAG_VARIANT: variant,
        names.TAG_SCHEME: scheme,
        names.TAG_TASK: recipe.task,
        names.TAG_DIGEST: weights.digest,
    }
    name = names.cell_name(variant, scheme)
    params = {
        "variant": variant,
        "scheme": scheme,
        "task": recipe.task,
        "prompt_hash": prompt.template_hash(recipe.prompt),
    }
    with (
        workspace(f"evaluate-{variant}-{scheme}", shared=True) as work,
        runs.child(name, params=params, tags=tags),
        tqdm(total=len(questions) * settings.samples, desc=name, unit="answer", leave=False) as bar,
    ):
        asked = room.ask(
            room.Cell(variant, scheme, weights.path),
            questions,
            task=recipe.task,
            template=recipe.prompt,
            device=device,
            dtype=settings.dtype,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            samples=settings.samples,
            temperature=settings.temperature,
            engine=settings.engine,
            deterministic=settings.deterministic,
            memory=settings.gpu_memory_utilization,
            seed=recipe.seed,
            progress=bar.update,
        )
        uri = record.given(recipe, address, weights, variant, scheme)
        digest = inputs.digest(questions)
        heldout = contents.log_dataset(
            f"{recipe.task}-heldout",
            digest=digest,
            context="heldout",
            n=len(questions),
            source=inputs.source_of(recipe),
        )
        found = scores.metrics(asked)
        contents.log_scores(found, model_uri=uri, dataset=heldout)
        stored_by = models.params(uri).get(names.SETTINGS, "")
        unreal = hf.simulated(weights.path, device) if settings.engine == hf.NAME else ""
        trained = lineage.training_seed(uri) if variant != names.BASE else None
        noted = {"simulated": unreal, "training_seed": trained}
        contents.log_params(
            {
                "dtype": asked.dtype,
                names.ENGINE: asked.receipt["engine"],
                **{key: value for key, value in noted.items() if value not in ("", None)},
            }
        )
        receipt = asked.receipt | {
            "weights": weights.digest,
            "prompt_hash": prompt.template_hash(recipe.prompt),
            "questions": digest,
        }
        (work / names.RECEIPT).write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
        _log_rows(asked, recipe, stored_by, work, recipe.seed if trained is None else trained)
        problems = health.problems(found, settings, len(asked.frame))
        if problems:
            raise UnhealthyCell(f"Cell {name} is unhealthy, so its accuracy does not count: {' '.join(problems)}")
        values = {"digest": weights.digest, "questions": digest, "accuracy": found[names.ACCURACY]}
        reuse.record_outputs(models={"model": uri}, artifacts=[names.QUESTIONS], values=values)
        bar.close()
        click.echo(
            f"      {name}: {found[names.ACCURACY]:.3f} ± {found[names.ACCURACY_STDERR]:.3f} (n = {len(questions)}{_sampled(found, settings.samples)}), "
            f"{asked.tokens_per_s:,.0f} tokens/s",
            err=True,
        )
        return runs.active_id()


def _sampled(found: dict[str, float], samples: int) -> str:
    """` × 4 samples, pass@4 0.812 ± 0.010`; nothing for a greedy cell."""
    if samples == 1:
        return ""
    key = names.pass_at(samples)
    return f" × {samples} samples, pass@{samples} {found[key]:.3f} ± {found[f'{key}_stderr']:.3f}"


def _log_rows(asked: room.Asked, recipe: Recipe, stored_by: str, work: Path, seed: int) -> None:
    """The rows, under the seed of the training whose weights answered; the seed that drew the questions stands apart."""
    origin = {names.ENGINE: asked.receipt["engine"], names.SETTINGS: stored_by}
    asked.frame.assign(seed=seed, question_seed=recipe.seed, **origin).to_parquet(work / names.QUESTIONS)
    if by_group := groups.markdown(asked.frame):
        (work / names.GROUPS_MD).write_text(by_group, encoding="utf-8")
    contents.log_folder(work)
    shown = ["question", "correct", "parsed", "answer", "finish_reason", "completion"]
    contents.log_table(asked.frame.head(recipe.evaluate.samples_logged)[shown], "completions")
