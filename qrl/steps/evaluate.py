"""Evaluate cells: all of them on the same questions in one process, a nested run for each.

Cells at full precision come first, since they decide what the others mean. A quantized cell that breaks a limit of
health counts if its variant is healthy at full precision (quantization did that), and is void otherwise (the evaluation
is at fault). Answers that the store has already are judged again instead of being generated again.
"""

import json
import sys
from collections.abc import Mapping
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
from qrl.evaluate import cells, check_gpus, check_kv, engines, groups, health, scores
from qrl.formats import groups as groups_of_codes
from qrl.recipe import Recipe, lists
from qrl.steps import answers, endings, outcome, record, stored
from qrl.tasks import prompt, question_sets
from qrl.tracking import addresses, contents, keys, lineage, models, projects, reuse, runs, store
from qrl.workspace import workspace

_COLUMNS_SHOWN = ["question", "correct", "parsed", "answer", "finish_reason", "completion"]


@dataclass(frozen=True)
class Evaluation:
    """One cell to evaluate: its labels, where its weights are, and the questions to answer."""

    recipe: Recipe
    variant: str
    scheme: str
    address: str
    weights: checkpoint.Checkpoint
    digest: str  # of the weights, before they were loaded
    questions: list
    device: str

    @property
    def name(self) -> str:
        return names.cell_name(self.variant, self.scheme)

    @property
    def label(self) -> str:
        return f"{self.variant}:{self.scheme}"

    @property
    def answers_key(self) -> str:
        """What the answers depend on."""
        return keys.answers(self.recipe, self.variant, self.scheme, self.digest, self.device)

    @property
    def cache_key(self) -> str:
        """What the result depends on: the answers, and the limits of health that judge them."""
        return keys.cell(self.recipe, self.variant, self.scheme, self.digest, self.device)


def evaluate(recipe: Recipe, cells_text: str | None) -> None:
    """Evaluate every cell on the recipe's held-out questions; log accuracy, health and a row per question.

    Args:
        recipe: its `evaluate` section and task.
        cells_text: cells as typed, `variant:scheme=model,…`; None for the recipe's model.

    Raises:
        UnhealthyCell: cells are void, a sentence for each: one at full precision broke a limit of health, or one under
            a scheme whose variant is not known to be healthy at full precision. Raised after the base at full
            precision, or after all cells were evaluated.
    """
    checkpoints = check_cells(recipe, cells_text)
    # The digest that is recorded must be that of the files that are loaded, so they are hashed first.
    digests = {cell: weights.digest for cell, (_, weights) in checkpoints.items()}
    device = devices.choose(recipe.device)
    questions = question_sets.load_evaluated(recipe)
    repeated_questions = question_sets.describe_repeated(questions)
    if repeated_questions:
        click.secho(f"qrl: {repeated_questions}", fg="yellow", err=True)
    store.prepare()

    params = {"device": device}
    tags = {names.TAG_TASK: tasks.label(recipe.task)}
    with runs.step("evaluate", recipe, sections=("evaluate",), params=params, tags=tags):
        endings.tell(weights.path for _, weights in checkpoints.values())
        evaluations = [
            Evaluation(recipe, variant, scheme, address, weights, digests[variant, scheme], questions, device)
            for (variant, scheme), (address, weights) in checkpoints.items()
        ]
        run_ids, void_cells = _evaluate_all(_ordered(evaluations))

        if run_ids:
            addresses = {evaluation.label: evaluation.address for evaluation in evaluations}
            outcome.print_evaluated(recipe, addresses, run_ids)
        if void_cells:
            count = f"{len(void_cells)} of {len(checkpoints)} cells are void"
            click.echo(f"qrl: {count}, so accuracy there does not count: see above.", err=True)
            raise UnhealthyCell(" ".join(void_cells), is_printed=True)  # cell by cell, above


def check_cells(recipe: Recipe, cells_text: str | None) -> dict[tuple[str, str], tuple[str, checkpoint.Checkpoint]]:
    """Return the cells' addresses and checkpoints, by variant and scheme.

    Raises:
        BadInput: all that is wrong: the list is malformed, the engine cannot run a cell, weights are not stored as the
            cell names them, or a chat template has no variable that `chat.template_kwargs` sets.
    """
    text = cells_text or f"{names.BASE}:{names.FULL}={recipe.model}"
    engine = recipe.evaluate.engine
    gpus = recipe.evaluate.tensor_parallel
    objections = Objections()
    objections.keep(lambda: check_gpus(gpus, engine, devices.choose(recipe.device)))

    checkpoints = {}
    for label, address in lists.parse_pairs("The list of cells", text, "MODEL").items():
        cell = objections.keep(lists.parse_cell, label)
        if cell is None:
            continue
        _, scheme = cell
        objections.keep(check_kv, [scheme], engine)
        weights = objections.keep(addresses.stored_as, cell, address)
        if weights:
            objections.keep(question_sets.check_chat, recipe, weights.path)
            checkpoints[cell] = (address, weights)
    objections.insist()
    return checkpoints


def _ordered(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Return the cells in the order of their evaluation."""
    ordered = list(evaluations)
    if ordered and ordered[0].recipe.evaluate.engine != hf.NAME:
        # Cells that one vLLM engine can answer follow each other: to start an engine takes 20 s.
        ordered.sort(key=lambda cell: cells.engine_sort_key(cell.weights.path, cell.scheme, cell.recipe))
    ordered.sort(key=lambda cell: cell.scheme != names.FULL)  # the others are judged by these
    return ordered


def _evaluate_all(evaluations: list[Evaluation]) -> tuple[dict[str, str], list[str]]:
    """Evaluate cells in order; return the run of each that counts, by its label, and why the others are void."""
    run_ids: dict[str, str] = {}
    void_cells: list[str] = []
    full_precision: dict[str, stored.FullPrecision] = {}

    stored_answers = {evaluation.label: _stored_answers(evaluation) for evaluation in evaluations}
    unanswered = [evaluation for evaluation in evaluations if not stored_answers[evaluation.label]]
    plan = _plan(unanswered)
    with (
        cells.Engines() as kept_engines,
        answers.in_processes(
            partial(_ask, kept_engines, cache_gib=plan.cache_gib), unanswered, plan.processes, fresh=plan.fresh
        ) as ask,
    ):
        for evaluation in evaluations:
            try:
                if full_precision.get(evaluation.variant, stored.UNKNOWN).problems:
                    raise _void_like_variant(evaluation)
                run_id = _evaluate_cell(evaluation, ask, stored_answers[evaluation.label], full_precision)
                run_ids[evaluation.label] = run_id
            except UnhealthyCell as error:
                void_cells.append(str(error))
                if (evaluation.variant, evaluation.scheme) == (names.BASE, names.FULL):
                    break  # every other cell is measured against this one
    return run_ids, void_cells


@dataclass(frozen=True)
class _Plan:
    """How many processes answer the cells."""

    processes: int = 1
    fresh: bool = False  # each cell has a process of its own
    cache_gib: float | None = None  # of vLLM's engines, where several share a GPU


def _plan(evaluations: list[Evaluation]) -> _Plan:
    """Plan how many processes answer the cells; transformers on a GPU, and vLLM on a CPU, are used by one alone."""
    if len(evaluations) < 2:
        return _Plan()
    on_cpu = evaluations[0].device == "cpu"
    if evaluations[0].recipe.evaluate.engine == hf.NAME:
        largest_bytes = max(evaluation.weights.bytes for evaluation in evaluations)
        return _Plan(answers.processes(len(evaluations), largest_bytes) if on_cpu else 1)
    together = None if on_cpu else _engines_together(evaluations)
    if together is None:
        return _Plan()
    click.echo(f"      {together.count} engines start and answer side by side", err=True)
    return _Plan(together.count, fresh=True, cache_gib=together.cache_gib)


def _engines_together(evaluations: list[Evaluation]) -> engines.Together | None:
    """Return how vLLM's engines share the GPU; None for one after the other."""
    first = evaluations[0]
    recipe = first.recipe
    if recipe.evaluate.tensor_parallel > 1 or not cells.can_fork_engines():
        return None
    try:
        free_bytes = answers.in_fork(memory.free_bytes, first.device)
    except RuntimeError:  # this process has used the GPU
        return None
    window = cells.read_inputs(first.weights.path, hf.tokenizer(first.weights.path), first.questions, recipe).window
    paths = [evaluation.weights.path for evaluation in evaluations]
    return engines.together(paths, recipe.evaluate, window, free_bytes=free_bytes, host_bytes=memory.free_bytes("cpu"))


def _stored_answers(cell: Evaluation) -> stored.StoredAnswers | None:
    """Return answers that the store has of a cell, to judge them again; None if they are to be generated."""
    stored_answers = stored.answers(cell.answers_key)
    # A finished result is there, and nothing launched this command to reuse it: the user repeats it on purpose.
    if stored_answers and stored_answers.judged_by(cell.cache_key) and not runs.is_launched():
        return None
    return stored_answers


def _void_like_variant(cell: Evaluation) -> UnhealthyCell:
    """Return the error of a cell under a scheme if its variant is void at full precision; it is not answered."""
    void = f"Cell {cell.name} is void, as {cell.variant} at full precision is: nothing is measured against that."
    click.secho(f"      {void}", fg="red", err=True)
    return UnhealthyCell(void)


def _evaluate_cell(
    cell: Evaluation,
    ask: answers.Ask,
    stored_answers: stored.StoredAnswers | None,
    full_precision: dict[str, stored.FullPrecision],
) -> str:
    """Evaluate one cell in a nested run; return the run's id.

    Args:
        cell: the cell to evaluate.
        ask: obtains its answers.
        stored_answers: answers of an earlier run, which are judged again instead.
        full_precision: what is known of each variant at full precision; this cell's is added.

    Raises:
        UnhealthyCell: the cell is void; its run keeps the answers.
    """
    settings = cell.recipe.evaluate
    labels = {"variant": cell.variant, "scheme": cell.scheme, "task": tasks.label(cell.recipe.task)}
    prompt_hash = prompt.template_hash(prompt.of_recipe(cell.recipe))
    questions_digest = question_sets.digest(cell.questions)
    with (
        workspace(f"evaluate-{cell.variant}-{cell.scheme}", shared=True) as work,
        runs.child(cell.name, params=labels | {"prompt_hash": prompt_hash}, tags=_tags(cell)),
        tqdm(total=len(cell.questions) * settings.samples, desc=cell.name, unit="answer", leave=False) as bar,
    ):
        if stored_answers:
            cell_answers = stored_answers.read()
            click.echo(f"      {cell.name}: the answers of run {stored_answers.run_id[:8]} are judged again", err=True)
        else:
            cell_answers = ask(cell, bar.update)

        # A user's checkpoint is copied into the store only now, when there are answers to log with it.
        uri = record.log_given(cell.recipe, cell.address, cell.weights, cell.variant, names.stored(cell.scheme))
        judgement = _judge(cell, cell_answers, uri, full_precision)
        if judgement.note:
            cell_answers = replace(cell_answers, frame=health.with_note(cell_answers.frame, judgement.note))

        # Logged under the model too: a registered version shows no metrics of its own.
        metrics = scores.metrics(cell_answers)
        _log_scores(cell, metrics, uri, questions_digest)
        training_seed = None  # base has none
        if cell.variant != names.BASE:
            training_seed = lineage.training_seed(uri)
        _log_conditions(cell, cell_answers, training_seed)

        receipt = cell_answers.receipt | {
            "weights": cell.digest,
            "prompt_hash": prompt_hash,
            "questions": questions_digest,
        }
        (work / names.RECEIPT).write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
        seed = cell.recipe.seed if training_seed is None else training_seed
        _log_rows(cell_answers, cell, models.params(uri), work, seed)

        # The seal comes before the verdict: the answers of a void cell are kept, to be judged by other limits.
        values = {"digest": cell.digest, "questions": questions_digest, "accuracy": metrics[names.ACCURACY]}
        facts = {"model": uri, "step": runs.parent_id(), "limits": health.limits(settings)}
        if judgement.note:
            facts["unhealthy"] = judgement.note
        reuse.seal(work / names.QUESTIONS, labels | values | facts)
        if judgement.broken_limits:
            bar.close()
            _report_health(cell, judgement, cell_answers)
        reuse.record_outputs(models={"model": uri}, artifacts=[names.QUESTIONS], values=values)

        bar.close()
        click.echo(f"      {_summary(cell, metrics)}, {cell_answers.tokens_per_s:,.0f} tokens/s", err=True)
        return runs.active_id()


def _tags(cell: Evaluation) -> dict[str, str]:
    return {
        names.TAG_STEP: "evaluate",
        names.TAG_CACHE_KEY: cell.cache_key,
        names.TAG_DIGEST: cell.digest,
        names.TAG_ANSWERS_KEY: cell.answers_key,
        names.TAG_VARIANT: cell.variant,
        names.TAG_SCHEME: cell.scheme,
        names.TAG_TASK: tasks.label(cell.recipe.task),
    }


def _log_scores(cell: Evaluation, metrics: dict[str, float], uri: str, questions_digest: str) -> None:
    """Log the metrics under the cell's model and the held-out questions."""
    dataset = contents.log_dataset(
        f"{tasks.label(cell.recipe.task)}-heldout",
        digest=questions_digest,
        context="heldout",
        n=len(cell.questions),
        source=question_sets.describe_source(cell.recipe),
    )
    contents.log_scores(metrics, model_uri=uri, dataset=dataset)


def _log_conditions(cell: Evaluation, cell_answers: cells.Answers, training_seed: int | None) -> None:
    """Log how the answers were computed; mark, and print, where that differs from what the labels promise."""
    simulated = cell_answers.receipt.get("simulated", "")
    if cell_answers.receipt.get("unpacked"):
        simulated = "weights unpacked"
    params = {
        "dtype": cell_answers.dtype,
        "simulated": simulated,
        "training_seed": training_seed,
        names.ENGINE: cell_answers.receipt["engine"],
    }
    contents.log_params({key: value for key, value in params.items() if value not in ("", None)})

    batch_size = cell.recipe.evaluate.batch_size
    actual_batch_size = cell_answers.receipt.get("batch_size", batch_size)
    if actual_batch_size < batch_size:
        contents.tag(f"{names.TAG_WATCH}memory", f"evaluate.batch_size {batch_size} → {actual_batch_size}")
    if simulated.startswith("activations not rounded"):
        contents.tag(f"{names.TAG_WATCH}activations", simulated)
        tqdm.write(click.style(f"qrl: {cell.name}: {simulated}", fg="yellow"), file=sys.stderr)


def _summary(cell: Evaluation, metrics: dict[str, float]) -> str:
    """Return `grpo · awq: 0.712 ± 0.010 (n = 2000)`, with how rows were selected and sampled."""
    settings = cell.recipe.evaluate
    accuracy = f"{metrics[names.ACCURACY]:.3f} ± {metrics[names.ACCURACY_STDERR]:.3f}"
    selection = ", the first rows" if settings.selection == "first" else ""
    return f"{cell.name}: {accuracy} (n = {len(cell.questions)}{selection}{_sampled(metrics, settings.samples)})"


@dataclass(frozen=True)
class _Judgement:
    """A cell's health."""

    broken_limits: list[str]  # metrics
    problems: list[str]  # a sentence for each
    note: str = ""  # what quantization did to the answers, if it is to blame: the cell counts
    full: stored.FullPrecision = stored.UNKNOWN  # of the same variant, for a cell under a scheme


def _judge(
    cell: Evaluation, cell_answers: cells.Answers, uri: str, full_precision: dict[str, stored.FullPrecision]
) -> _Judgement:
    """Judge a cell's answers by its variant at full precision; arguments as for `_variant_at_full_precision`."""
    settings = cell.recipe.evaluate
    rates = health.rates(cell_answers.frame)
    n = len(cell_answers.frame)
    broken_limits = health.broken_metrics(rates, settings, n)
    problems = health.problems(rates, settings, n)

    if cell.scheme == names.FULL:
        full_precision[cell.variant] = stored.FullPrecision(rates, tuple(problems))
        return _Judgement(broken_limits, problems)
    if not broken_limits:
        return _Judgement([], [])

    full = _variant_at_full_precision(cell, uri, full_precision)
    note = ""
    is_healthy_at_full_precision = bool(full.rates) and not full.problems
    if is_healthy_at_full_precision:  # so quantization is to blame, and the cell counts
        note = health.note(rates, full.rates, broken_limits)
    return _Judgement(broken_limits, problems, note, full)


def _variant_at_full_precision(
    cell: Evaluation, uri: str, full_precision: dict[str, stored.FullPrecision]
) -> stored.FullPrecision:
    """Return what is known of a quantized cell's variant at full precision: from this step, or from the store.

    Args:
        cell: under a scheme.
        uri: of its model, which was made from the variant at full precision.
        full_precision: what is known already, by variant.
    """
    if cell.variant in full_precision:
        return full_precision[cell.variant]

    parent_digest = models.params(uri).get("parent", "")
    if names.stored(cell.scheme) == names.FULL:  # the same weights with another key-value cache
        parent_digest = cell.digest
    if not parent_digest:
        return stored.UNKNOWN
    stored_answers = stored.answers(keys.answers(cell.recipe, cell.variant, names.FULL, parent_digest, cell.device))
    if not stored_answers:
        return stored.UNKNOWN
    return stored_answers.at_full_precision(cell.recipe.evaluate)


def _report_health(cell: Evaluation, judgement: _Judgement, cell_answers: cells.Answers) -> None:
    """Print which limits a cell broke, with answers that did, and mark a cell that counts.

    Raises:
        UnhealthyCell: the cell is void.
    """
    rows_path = f"All its answers are in {projects.artifact_location(runs.active_id())}/{names.QUESTIONS}."
    examples = [
        "Answers that broke it:",
        *health.lines_of_broken(cell_answers.frame, judgement.broken_limits),
        rows_path,
    ]
    if judgement.note:
        contents.tag(names.TAG_UNHEALTHY, judgement.note)
        message = (
            f"{cell.name}: {judgement.note}. Quantization did that: the cell counts, its unfinished answers are wrong, "
            "and no gate lets it pass."
        )
        click.secho("      " + "\n      ".join([message, *examples]), fg="yellow", err=True)
        return

    void = f"Cell {cell.name} is void, so its accuracy does not count:"
    sentences = [void, *judgement.problems, *_why_void(cell, judgement.full)]
    click.secho("      " + "\n      ".join([*sentences, *examples]), fg="red", err=True)
    raise UnhealthyCell(" ".join([*sentences, rows_path]))


def _why_void(cell: Evaluation, full: stored.FullPrecision) -> list[str]:
    """Return why a cell under a scheme is void; nothing more about one at full precision."""
    if cell.scheme == names.FULL:
        return []
    if full.problems:
        return [f"{cell.variant} breaks limits at full precision too."]
    unknown = f"Nothing shows that quantization did that: {cell.variant} is not known to be healthy at full precision"
    return [f"{unknown}. Evaluate {cell.variant}:{names.FULL} with the same settings, then this cell again."]


def _ask(
    kept_engines: cells.Engines, evaluation: Evaluation, progress: answers.Progress, *, cache_gib: float | None = None
) -> cells.Answers:
    """Return a cell's answers; if memory runs out, all of them again in batches of half the size.

    Args:
        kept_engines: keeps vLLM's engine for a next cell of this process.
        evaluation: the cell.
        progress: called with the number of answers since the last call.
        cache_gib: size of the engine's key-value cache, where several share a GPU; default: the recipe's.
    """
    cell = cells.Cell(evaluation.variant, evaluation.scheme, evaluation.weights.path)
    settings = evaluation.recipe.evaluate
    sizes = {} if cache_gib is None else {"kv_cache_gib": cache_gib}
    answered = 0

    def count(n: int) -> None:
        nonlocal answered
        answered += n
        progress(n)

    def ask(batch_size: int) -> cells.Answers:
        count(-answered)  # the bar begins again with each attempt
        sized = settings.model_copy(update=sizes | {"batch_size": batch_size})
        recipe = evaluation.recipe.model_copy(update={"evaluate": sized})
        return cells.answer_questions(
            cell, evaluation.questions, recipe, evaluation.device, progress=count, engines=kept_engines
        )

    def warn(text: str) -> None:
        click.secho(f"qrl: {evaluation.name}: {text}", fg="yellow", err=True)

    return memory.halved(ask, settings.batch_size, "evaluate.batch_size", say=warn)


def _sampled(metrics: dict[str, float], samples: int) -> str:
    """Return ` × 4 samples, pass@4 0.812 ± 0.010`; nothing for a greedy cell."""
    if samples == 1:
        return ""
    key = names.pass_at(samples)
    return f" × {samples} samples, pass@{samples} {metrics[key]:.3f} ± {metrics[f'{key}_stderr']:.3f}"


def _log_rows(cell_answers: cells.Answers, cell: Evaluation, made: Mapping[str, str], work: Path, seed: int) -> None:
    """Log the rows under the seed of the training that made the weights; the questions' seed has a column too.

    Args:
        cell_answers: graded, a row each.
        cell: its recipe and weights.
        made: params of the model: the digest of the settings with which it was quantized, and its layers in few bits.
        work: folder for the files.
        seed: of the training.
    """
    recipe = cell.recipe
    group_size = groups_of_codes.stored(checkpoint.config(cell.weights.path).get("quantization_config"))
    columns = {
        "seed": seed,
        "question_seed": recipe.seed,
        names.ENGINE: cell_answers.receipt["engine"],
        names.SETTINGS: made.get(names.SETTINGS, ""),
        names.GROUP_SIZE: pd.array([group_size] * len(cell_answers.frame), dtype="Int64"),
        names.PROMPT_HASH: prompt.template_hash(prompt.of_recipe(recipe)),
    }
    if names.LAYERS in made:
        columns[names.LAYERS] = made[names.LAYERS]
    cell_answers.frame.assign(**columns).to_parquet(work / names.QUESTIONS)
    by_group = groups.markdown(cell_answers.frame)
    if by_group:
        (work / names.GROUPS_MD).write_text(by_group, encoding="utf-8")
    contents.log_folder(work)
    contents.log_table(cell_answers.frame.head(recipe.evaluate.samples_logged)[_COLUMNS_SHOWN], "completions")
