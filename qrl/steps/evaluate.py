"""Evaluate cells: all of them on the same questions in one process, a nested run for each."""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import pandas as pd
from tqdm import tqdm

from qrl import checkpoint, names, tasks
from qrl.engine import device as devices
from qrl.engine import hf, memory
from qrl.errors import UnhealthyCell
from qrl.evaluate import cells as room
from qrl.evaluate import check_gpus, check_kv, groups, scores
from qrl.formats import groups as groups_of_codes
from qrl.recipe import Recipe
from qrl.steps import answers, inputs, outcome, record
from qrl.tasks import prompt
from qrl.tracking import contents, keys, lineage, models, projects, reuse, runs, store
from qrl.workspace import workspace


@dataclass(frozen=True)
class Evaluation:
    """One cell to evaluate: its labels, where its weights are, and what it is asked."""

    recipe: Recipe
    variant: str
    scheme: str
    address: str
    weights: checkpoint.Checkpoint
    questions: list
    device: str

    @property
    def name(self) -> str:
        return names.cell_name(self.variant, self.scheme)


def evaluate(recipe: Recipe, given: str | None) -> None:
    """Evaluate every cell on the recipe's held-out questions; log accuracy, health and a row per question.

    Args:
        recipe: its `evaluate` section and task.
        given: cells as typed, `variant:scheme=model,…`; None for the recipe's model.

    Raises:
        UnhealthyCell: cells broke a limit, a sentence for each; raised after the first such cell of the base, or after
            all cells were evaluated.
    """
    cells = check(recipe, given)
    _ = [weights.digest for _, weights in cells.values()]  # of what will be loaded, before it is
    device = devices.choose(recipe.device)
    questions = inputs.evaluated(recipe)
    if copies := inputs.repeated(questions):
        click.secho(f"qrl: {copies}", fg="yellow", err=True)
    store.prepare()
    params, tags = {"device": device}, {names.TAG_TASK: tasks.label(recipe.task)}
    with runs.step("evaluate", recipe, sections=("evaluate",), params=params, tags=tags):
        broken, run_ids = [], {}
        evaluations = [Evaluation(recipe, *cell, *stored, questions, device) for cell, stored in cells.items()]
        if recipe.evaluate.engine != hf.NAME:
            evaluations.sort(key=lambda cell: room.engine_of(cell.weights.path, cell.scheme, recipe))
        with (
            room.Engines() as engines,
            answers.in_processes(partial(_ask, engines), evaluations, _processes(evaluations)) as ask,
        ):
            for evaluation in evaluations:
                try:
                    run_ids[f"{evaluation.variant}:{evaluation.scheme}"] = _evaluate_cell(evaluation, ask)
                except UnhealthyCell as error:
                    broken.append(str(error))
                    if evaluation.variant == names.BASE:  # the others are measured against it
                        break
        if run_ids:
            models = {":".join(cell): address for cell, (address, _) in cells.items()}
            outcome.evaluated(recipe, models, run_ids)
        if broken:
            count = f"{len(broken)} of {len(cells)} cells broke a health limit"
            click.echo(f"qrl: {count}, so accuracy there does not count: see above.", err=True)
            unhealthy = UnhealthyCell(" ".join(broken))
            unhealthy.printed = True  # cell by cell, above
            raise unhealthy


def check(recipe: Recipe, given: str | None) -> dict[tuple[str, str], tuple[str, checkpoint.Checkpoint]]:
    """Return the cells' addresses and checkpoints, by variant and scheme.

    Raises:
        BadInput: the list is malformed, the engine cannot run a cell, weights are not stored as the cell names them,
            or a chat template has no variable that `chat.template_kwargs` sets.
    """
    text = given or f"{names.BASE}:{names.FULL}={recipe.model}"
    addresses = {inputs.cell(cell): address for cell, address in inputs.pairs(text, "a cell and its model").items()}
    check_kv((scheme for _, scheme in addresses), recipe.evaluate.engine)
    check_gpus(recipe.evaluate.tensor_parallel, recipe.evaluate.engine, devices.choose(recipe.device))
    cells = {cell: (address, inputs.stored_as(cell, address)) for cell, address in addresses.items()}
    for _, weights in cells.values():
        inputs.check_chat(recipe, weights.path)
    return cells


def _processes(cells: list[Evaluation]) -> int:
    """Return how many processes answer the cells; vLLM and a GPU are used by one alone."""
    if cells[0].device != "cpu" or cells[0].recipe.evaluate.engine != hf.NAME:
        return 1
    return answers.processes(len(cells), max(cell.weights.bytes for cell in cells))


def _evaluate_cell(cell: Evaluation, ask: answers.Ask) -> str:
    """Evaluate one cell in a nested run with the answers that `ask` obtains; return the run's id."""
    recipe, settings, prompt_hash = cell.recipe, cell.recipe.evaluate, prompt.template_hash(prompt.of(cell.recipe))
    task = tasks.label(recipe.task)
    labels = {"variant": cell.variant, "scheme": cell.scheme, "task": task}
    key = keys.cell(recipe, cell.variant, cell.scheme, cell.weights.digest, cell.device)
    tags = {names.TAG_STEP: "evaluate", names.TAG_CACHE_KEY: key, names.TAG_DIGEST: cell.weights.digest}
    tags |= {names.TAG_VARIANT: cell.variant, names.TAG_SCHEME: cell.scheme, names.TAG_TASK: task}
    with (
        workspace(f"evaluate-{cell.variant}-{cell.scheme}", shared=True) as work,
        runs.child(cell.name, params=labels | {"prompt_hash": prompt_hash}, tags=tags),
        tqdm(total=len(cell.questions) * settings.samples, desc=cell.name, unit="answer", leave=False) as bar,
    ):
        asked = ask(cell, bar.update)
        uri = record.given(recipe, cell.address, cell.weights, cell.variant, names.stored(cell.scheme))
        digest = inputs.digest(cell.questions)
        origin = {"digest": digest, "n": len(cell.questions), "source": inputs.source_of(recipe)}
        heldout = contents.log_dataset(f"{task}-heldout", context="heldout", **origin)
        metrics = scores.metrics(asked)
        contents.log_scores(metrics, model_uri=uri, dataset=heldout)
        training_seed = lineage.training_seed(uri) if cell.variant != names.BASE else None
        simulated = "weights unpacked" if asked.receipt.get("unpacked") else asked.receipt.get("simulated", "")
        params = {"dtype": asked.dtype, "simulated": simulated, "training_seed": training_seed}
        params[names.ENGINE] = asked.receipt["engine"]
        contents.log_params({key: value for key, value in params.items() if value not in ("", None)})
        receipt = asked.receipt | {"weights": cell.weights.digest, "prompt_hash": prompt_hash, "questions": digest}
        (work / names.RECEIPT).write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
        stored_by = models.params(uri).get(names.SETTINGS, "")
        if (batch := asked.receipt.get("batch_size", settings.batch_size)) < settings.batch_size:
            contents.tag(f"{names.TAG_WATCH}memory", f"evaluate.batch_size {settings.batch_size} → {batch}")
        if simulated.startswith("activations not rounded"):
            contents.tag(f"{names.TAG_WATCH}activations", simulated)
            tqdm.write(click.style(f"qrl: {cell.name}: {simulated}", fg="yellow"), file=sys.stderr)
        seed = recipe.seed if training_seed is None else training_seed
        group_size = groups_of_codes.stored(checkpoint.config(cell.weights.path).get("quantization_config"))
        _log_rows(asked, recipe, {names.SETTINGS: stored_by, names.GROUP_SIZE: group_size}, work, seed)
        if problems := scores.problems(metrics, settings, len(asked.frame)):
            bar.close()
            problems.insert(0, f"Cell {cell.name} is unhealthy, so its accuracy does not count:")
            where = f"All its answers are in {projects.artifact_place(runs.active_id())}/{names.QUESTIONS}."
            lines = "\n      ".join([*problems, "Two of its answers:", *scores.answers(asked.frame), where])
            click.secho(f"      {lines}", fg="red", err=True)
            raise UnhealthyCell(" ".join([*problems, where]))
        values = {"digest": cell.weights.digest, "questions": digest, "accuracy": metrics[names.ACCURACY]}
        facts = {"model": uri, "step": runs.parent_id(), "limits": scores.limits(settings)}
        reuse.seal(work / names.QUESTIONS, labels | values | facts)
        reuse.record_outputs(models={"model": uri}, artifacts=[names.QUESTIONS], values=values)
        bar.close()
        accuracy = f"{metrics[names.ACCURACY]:.3f} ± {metrics[names.ACCURACY_STDERR]:.3f}"
        first = ", the first rows" if settings.selection == "first" else ""
        n = f"(n = {len(cell.questions)}{first}{_sampled(metrics, settings.samples)})"
        click.echo(f"      {cell.name}: {accuracy} {n}, {asked.tokens_per_s:,.0f} tokens/s", err=True)
        return runs.active_id()


def _ask(engines: room.Engines, cell: Evaluation, progress: answers.Progress) -> room.Asked:
    """Return a cell's answers; if memory runs out, all of them again in batches of half the size."""
    asked, recipe, done = room.Cell(cell.variant, cell.scheme, cell.weights.path), cell.recipe, 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        progress(n)

    def ask(size: int) -> room.Asked:
        count(-done)
        sized = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"batch_size": size})})
        return room.ask(asked, cell.questions, sized, cell.device, progress=count, engines=engines)

    say = partial(click.secho, fg="yellow", err=True)
    return memory.halved(
        ask, recipe.evaluate.batch_size, "evaluate.batch_size", say=lambda text: say(f"qrl: {cell.name}: {text}")
    )


def _sampled(metrics: dict[str, float], samples: int) -> str:
    """Return ` × 4 samples, pass@4 0.812 ± 0.010`; nothing for a greedy cell."""
    if samples == 1:
        return ""
    key = names.pass_at(samples)
    return f" × {samples} samples, pass@{samples} {metrics[key]:.3f} ± {metrics[f'{key}_stderr']:.3f}"


def _log_rows(asked: room.Asked, recipe: Recipe, stored: dict[str, Any], work: Path, seed: int) -> None:
    """Log the rows under the seed of the training that made the weights, and the seed of the questions beside it.

    Args:
        asked: a cell's answers.
        recipe: of the evaluation.
        stored: how the weights are stored: the digest of the settings, and the size of groups, or None.
        work: folder for the files.
        seed: of the training.
    """
    origin = {names.ENGINE: asked.receipt["engine"], names.SETTINGS: stored[names.SETTINGS]}
    origin[names.GROUP_SIZE] = pd.array([stored[names.GROUP_SIZE]] * len(asked.frame), dtype="Int64")
    origin[names.PROMPT_HASH] = prompt.template_hash(prompt.of(recipe))
    asked.frame.assign(seed=seed, question_seed=recipe.seed, **origin).to_parquet(work / names.QUESTIONS)
    if by_group := groups.markdown(asked.frame):
        (work / names.GROUPS_MD).write_text(by_group, encoding="utf-8")
    contents.log_folder(work)
    shown = ["question", "correct", "parsed", "answer", "finish_reason", "completion"]
    contents.log_table(asked.frame.head(recipe.evaluate.samples_logged)[shown], "completions")
