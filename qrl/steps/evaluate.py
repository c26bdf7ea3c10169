"""Evaluate cells: all of them on the same questions in one process, a nested run for each."""

import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
import pandas as pd
from tqdm import tqdm

from qrl import checkpoint, names, tasks
from qrl.engine import device as devices
from qrl.engine import hf, memory
from qrl.errors import Objections, UnhealthyCell
from qrl.evaluate import check_gpus, check_kv, groups, health, scores
from qrl.evaluate.cells import Asked, Cell, Engines, ask, engine_of
from qrl.formats import groups as groups_of_codes
from qrl.recipe import Recipe
from qrl.steps import answers, inputs, outcome, record, stored
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

    @property
    def label(self) -> str:
        return f"{self.variant}:{self.scheme}"


def evaluate(recipe: Recipe, given: str | None) -> None:
    """Evaluate every cell on the recipe's held-out questions; log accuracy, health and a row per question.

    Args:
        recipe: its `evaluate` section and task.
        given: cells as typed, `variant:scheme=model,…`; None for the recipe's model.

    Raises:
        UnhealthyCell: cells are void, a sentence for each: one at full precision broke a limit of health, or one under
            a scheme whose variant is not known to be healthy at full precision. Raised after the base at full
            precision, or after all cells were evaluated.
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
        evaluations = [Evaluation(recipe, *cell, *weights, questions, device) for cell, weights in cells.items()]
        if recipe.evaluate.engine != hf.NAME:
            evaluations.sort(key=lambda cell: engine_of(cell.weights.path, cell.scheme, recipe))
        evaluations.sort(key=lambda cell: cell.scheme != names.FULL)  # what the others are judged beside
        answered = {cell.label: found for cell in evaluations if (found := _stored(cell))}
        asked = [cell for cell in evaluations if cell.label not in answered]
        variants: dict[str, stored.FullPrecision] = {}
        with Engines() as engines, answers.in_processes(partial(_ask, engines), asked, _processes(asked)) as answer:
            for evaluation in evaluations:
                try:
                    if variants.get(evaluation.variant, stored.UNKNOWN).problems:
                        raise _void_beside(evaluation)
                    found = answered.get(evaluation.label)
                    run_ids[evaluation.label] = _evaluate_cell(evaluation, answer, found, variants)
                except UnhealthyCell as error:
                    broken.append(str(error))
                    if (evaluation.variant, evaluation.scheme) == (names.BASE, names.FULL):
                        break  # the others are measured against it
        if run_ids:
            models = {":".join(cell): address for cell, (address, _) in cells.items()}
            outcome.evaluated(recipe, models, run_ids)
        if broken:
            count = f"{len(broken)} of {len(cells)} cells are void"
            click.echo(f"qrl: {count}, so accuracy there does not count: see above.", err=True)
            raise UnhealthyCell(" ".join(broken), is_printed=True)  # cell by cell, above


def check(recipe: Recipe, given: str | None) -> dict[tuple[str, str], tuple[str, checkpoint.Checkpoint]]:
    """Return the cells' addresses and checkpoints, by variant and scheme.

    Raises:
        BadInput: all that is wrong: the list is malformed, the engine cannot run a cell, weights are not stored as the
            cell names them, or a chat template has no variable that `chat.template_kwargs` sets.
    """
    text = given or f"{names.BASE}:{names.FULL}={recipe.model}"
    objections = Objections()
    engine, parallel = recipe.evaluate.engine, recipe.evaluate.tensor_parallel
    objections.check(lambda: check_gpus(parallel, engine, devices.choose(recipe.device)))
    cells = {}
    for label, address in inputs.pairs(text, "a cell and its model").items():
        cell = objections.check(inputs.cell, label)
        if cell is None:
            continue
        objections.check(check_kv, [cell[1]], engine)
        if weights := objections.check(inputs.stored_as, cell, address):
            objections.check(inputs.check_chat, recipe, weights.path)
            cells[cell] = (address, weights)
    objections.insist()
    return cells


def _processes(cells: list[Evaluation]) -> int:
    """Return how many processes answer the cells; vLLM and a GPU are used by one alone."""
    if not cells or cells[0].device != "cpu" or cells[0].recipe.evaluate.engine != hf.NAME:
        return 1
    return answers.processes(len(cells), max(cell.weights.bytes for cell in cells))


def _stored(cell: Evaluation) -> stored.Answers | None:
    """Return answers that the store has of a cell, to judge them again; None where it is to be answered."""
    where = (cell.recipe, cell.variant, cell.scheme, cell.weights.digest, cell.device)
    found = stored.answers(keys.answers(*where))
    if found and found.judged_by(keys.cell(*where)) and not runs.is_launched():
        return None  # somebody repeats a command whose result is there
    return found


def _void_beside(cell: Evaluation) -> UnhealthyCell:
    """Return the error of a cell under a scheme whose variant is void at full precision; it is not answered."""
    void = f"Cell {cell.name} is void, as {cell.variant} at full precision is: nothing is measured against that."
    click.secho(f"      {void}", fg="red", err=True)
    return UnhealthyCell(void)


def _evaluate_cell(
    cell: Evaluation, answer: answers.Ask, found: stored.Answers | None, variants: dict[str, stored.FullPrecision]
) -> str:
    """Evaluate one cell in a nested run; return the run's id.

    Args:
        cell: what is evaluated.
        answer: obtains its answers.
        found: answers of an earlier run, which are judged again instead.
        variants: what is known of each variant at full precision; this cell's is added.

    Raises:
        UnhealthyCell: the cell is void; its run keeps the answers.
    """
    recipe, settings, prompt_hash = cell.recipe, cell.recipe.evaluate, prompt.template_hash(prompt.of(cell.recipe))
    task = tasks.label(recipe.task)
    labels = {"variant": cell.variant, "scheme": cell.scheme, "task": task}
    key = keys.cell(recipe, cell.variant, cell.scheme, cell.weights.digest, cell.device)
    of_answers = keys.answers(recipe, cell.variant, cell.scheme, cell.weights.digest, cell.device)
    tags = {names.TAG_STEP: "evaluate", names.TAG_CACHE_KEY: key, names.TAG_DIGEST: cell.weights.digest}
    tags[names.TAG_ANSWERS_KEY] = of_answers
    tags |= {names.TAG_VARIANT: cell.variant, names.TAG_SCHEME: cell.scheme, names.TAG_TASK: task}
    with (
        workspace(f"evaluate-{cell.variant}-{cell.scheme}", shared=True) as work,
        runs.child(cell.name, params=labels | {"prompt_hash": prompt_hash}, tags=tags),
        tqdm(total=len(cell.questions) * settings.samples, desc=cell.name, unit="answer", leave=False) as bar,
    ):
        asked = found.read() if found else answer(cell, bar.update)
        if found:
            click.echo(f"      {cell.name}: the answers of run {found.run_id[:8]} are judged again", err=True)
        uri = record.given(recipe, cell.address, cell.weights, cell.variant, names.stored(cell.scheme))
        judged = _judge(cell, asked, uri, variants)
        if judged.note:
            asked = replace(asked, frame=health.marked(asked.frame, judged.note))
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
        _log_rows(asked, cell, stored_by, work, recipe.seed if training_seed is None else training_seed)
        values = {"digest": cell.weights.digest, "questions": digest, "accuracy": metrics[names.ACCURACY]}
        facts = {"model": uri, "step": runs.parent_id(), "limits": health.limits(settings)}
        facts |= {"unhealthy": judged.note} if judged.note else {}
        reuse.seal(work / names.QUESTIONS, labels | values | facts)
        if judged.beyond:
            bar.close()
            _tell(cell, judged, asked)
        reuse.record_outputs(models={"model": uri}, artifacts=[names.QUESTIONS], values=values)
        bar.close()
        accuracy = f"{metrics[names.ACCURACY]:.3f} ± {metrics[names.ACCURACY_STDERR]:.3f}"
        first = ", the first rows" if settings.selection == "first" else ""
        n = f"(n = {len(cell.questions)}{first}{_sampled(metrics, settings.samples)})"
        click.echo(f"      {cell.name}: {accuracy} {n}, {asked.tokens_per_s:,.0f} tokens/s", err=True)
        return runs.active_id()


@dataclass(frozen=True)
class _Judged:
    """A cell's health."""

    beyond: list[str]  # metrics whose limits are broken
    problems: list[str]  # a sentence for each
    note: str = ""  # what quantization did to the answers, where it is to blame: the cell counts
    full: stored.FullPrecision = stored.UNKNOWN  # of the same variant, for a cell under a scheme


def _judge(cell: Evaluation, asked: Asked, uri: str, variants: dict[str, stored.FullPrecision]) -> _Judged:
    """Judge a cell's answers, beside its variant at full precision; arguments as for `_full_precision`."""
    settings, rates, n = cell.recipe.evaluate, health.rates(asked.frame), len(asked.frame)
    beyond, problems = health.broken(rates, settings, n), health.problems(rates, settings, n)
    if cell.scheme == names.FULL:
        variants[cell.variant] = stored.FullPrecision(rates, tuple(problems))
        return _Judged(beyond, problems)
    if not beyond:
        return _Judged([], [])
    full = _full_precision(cell, uri, variants)
    did_quantization = bool(full.rates) and not full.problems
    note = health.note(rates, full.rates, beyond) if did_quantization else ""
    return _Judged(beyond, problems, note, full)


def _full_precision(cell: Evaluation, uri: str, variants: dict[str, stored.FullPrecision]) -> stored.FullPrecision:
    """Return what is known of a quantized cell's variant at full precision: from this step, or from the store.

    Args:
        cell: under a scheme.
        uri: of its model, whose parent is the variant at full precision.
        variants: what is known already.
    """
    if cell.variant in variants:
        return variants[cell.variant]
    parent = models.params(uri).get("parent", "")
    if names.stored(cell.scheme) == names.FULL:  # the same weights with another key-value cache
        parent = cell.weights.digest
    key = keys.answers(cell.recipe, cell.variant, names.FULL, parent, cell.device)
    found = stored.answers(key) if parent else None
    return found.at_full_precision(cell.recipe.evaluate) if found else stored.UNKNOWN


def _tell(cell: Evaluation, judged: _Judged, asked: Asked) -> None:
    """Print which limits a cell broke, with answers that did, and mark a cell that counts.

    Raises:
        UnhealthyCell: the cell is void.
    """
    where = f"All its answers are in {projects.artifact_place(runs.active_id())}/{names.QUESTIONS}."
    shown = ["Answers that broke it:", *health.breaking(asked.frame, judged.beyond), where]
    if judged.note:
        contents.tag(names.TAG_UNHEALTHY, judged.note)
        outcome_of = f"{cell.name}: {judged.note}. Quantization did that"
        told = f"{outcome_of}: the cell counts, its unfinished answers are wrong, and no gate lets it pass."
        click.secho("      " + "\n      ".join([told, *shown]), fg="yellow", err=True)
        return
    void = f"Cell {cell.name} is void, so its accuracy does not count:"
    sentences = [void, *judged.problems, *_beside(cell, judged.full)]
    click.secho("      " + "\n      ".join([*sentences, *shown]), fg="red", err=True)
    raise UnhealthyCell(" ".join([*sentences, where]))


def _beside(cell: Evaluation, full: stored.FullPrecision) -> list[str]:
    """Return why a cell under a scheme is void; of one at full precision, nothing more."""
    if cell.scheme == names.FULL:
        return []
    if full.problems:
        return [f"{cell.variant} breaks limits at full precision too."]
    unknown = f"Nothing shows that quantization did that: {cell.variant} is not known to be healthy at full precision"
    return [f"{unknown}. Evaluate {cell.variant}:{names.FULL} with the same settings, then this cell again."]


def _ask(engines: Engines, cell: Evaluation, progress: answers.Progress) -> Asked:
    """Return a cell's answers; if memory runs out, all of them again in batches of half the size."""
    asked, recipe, done = Cell(cell.variant, cell.scheme, cell.weights.path), cell.recipe, 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        progress(n)

    def ask_in_batches(size: int) -> Asked:
        count(-done)
        sized = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"batch_size": size})})
        return ask(asked, cell.questions, sized, cell.device, progress=count, engines=engines)

    say = partial(click.secho, fg="yellow", err=True)
    return memory.halved(
        ask_in_batches,
        recipe.evaluate.batch_size,
        "evaluate.batch_size",
        say=lambda text: say(f"qrl: {cell.name}: {text}"),
    )


def _sampled(metrics: dict[str, float], samples: int) -> str:
    """Return ` × 4 samples, pass@4 0.812 ± 0.010`; nothing for a greedy cell."""
    if samples == 1:
        return ""
    key = names.pass_at(samples)
    return f" × {samples} samples, pass@{samples} {metrics[key]:.3f} ± {metrics[f'{key}_stderr']:.3f}"


def _log_rows(asked: Asked, cell: Evaluation, stored_by: str, work: Path, seed: int) -> None:
    """Log the rows under the seed of the training that made the weights, and the seed of the questions beside it.

    Args:
        asked: the cell's answers.
        cell: its recipe and weights.
        stored_by: digest of the settings with which the weights were quantized.
        work: folder for the files.
        seed: of the training.
    """
    recipe = cell.recipe
    group_size = groups_of_codes.stored(checkpoint.config(cell.weights.path).get("quantization_config"))
    origin = {names.ENGINE: asked.receipt["engine"], names.SETTINGS: stored_by}
    origin[names.GROUP_SIZE] = pd.array([group_size] * len(asked.frame), dtype="Int64")
    origin[names.PROMPT_HASH] = prompt.template_hash(prompt.of(recipe))
    asked.frame.assign(seed=seed, question_seed=recipe.seed, **origin).to_parquet(work / names.QUESTIONS)
    if by_group := groups.markdown(asked.frame):
        (work / names.GROUPS_MD).write_text(by_group, encoding="utf-8")
    contents.log_folder(work)
    shown = ["question", "correct", "parsed", "answer", "finish_reason", "completion"]
    contents.log_table(asked.frame.head(recipe.evaluate.samples_logged)[shown], "completions")
