"""What a study or a sweep checks before it builds an environment or trains anything."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qrl import checkpoint, cluster, names, source, tasks
from qrl import recipe as recipes
from qrl.errors import Objections
from qrl.formats.kind import FEW_BITS
from qrl.recipe import Recipe
from qrl.study import auto
from qrl.study.launch import DryRun

if TYPE_CHECKING:
    from qrl.study.forecast import Shape
    from qrl.study.trial import Trial

LAST_STEPS = 3  # diagnose, compare and promote, which a `DryRun` does not reach
LONGEST = 50  # questions whose length is checked: those with the most characters
_ANYWAY = "To start the study anyway, add --yes (with mlflow run: -P yes=true)."


def check(
    recipe: Recipe,
    overrides: dict[str, str],
    *,
    beside: Sequence[str] = (),
    yes: bool = False,
    objections: Objections | None = None,
) -> tuple[str, str]:
    """Refuse what a later step could not do, and warn of settings that have no effect.

    Args:
        recipe: the resolved settings.
        overrides: as typed.
        beside: schemes that the study makes too, beyond the recipe's.
        yes: only warn if the recipe is sized for another machine.
        objections: gets what is wrong, for somebody who looks at more; default: it is raised here.

    Returns:
        The device that models run on, cpu or cuda, and the digest of the base model; empty if that cannot be read.

    Raises:
        BadInput: the prompt, the model, a scheme, the rollouts or the machine do not fit the rest; all that is wrong.
    """
    found = Objections() if objections is None else objections
    device, name = auto.device_of(recipe.device), overrides.get("recipe", recipes.DEFAULT)
    _check_settings(recipe, overrides, beside, found)
    if device == "cpu" and recipes.needs_gpu(name):
        fitting = f"use a machine with one, or recipe={_smaller(name, recipe)}"
        doubted = [f"Recipe {name} is sized for a GPU, but this study would run on a CPU: {fitting}."]
        _doubt(found, doubted, yes=yes)
    digest = found.check(_check_base, recipe, found)
    _check_machine(recipe, device, found)
    if objections is None:
        found.insist()
    return device, digest or ""


def _check_settings(recipe: Recipe, overrides: dict[str, str], beside: Sequence[str], found: Objections) -> None:
    """Look at what settings and files say by themselves."""
    from qrl import evaluate
    from qrl.quantize import settings as choices
    from qrl.registry import signing
    from qrl.study import report
    from qrl.tasks import prompt, question_sets
    from qrl.train import reward, verl

    found.check(signing.keys, recipe.promote)
    found.check(tasks.check, recipe.task)
    found.check(prompt.check, recipe.task, recipe.prompt)
    found.check(evaluate.kv_schemes, recipe)
    quantized, qat = recipe.quantize, recipe.train.qat
    unheeded = found.check(choices.unheeded, quantized, quantized.schemes, overrides, beside, qat) or []
    report.warn(unheeded + evaluate.unheeded(recipe.evaluate) + _unstored(recipe, beside))
    packed = recipe.evaluate.engine == "vllm" and not recipe.evaluate.unpacked
    if packed and (few := set(FEW_BITS) & {*recipe.quantize.schemes, *beside}):
        listed = ", ".join(sorted(few))
        remedy = "set evaluate.unpacked=true, or evaluate.engine=transformers"
        found.add(f"vLLM has no kernel for {listed}: {remedy}.")
    if recipe.train.trainer == "verl":
        found.check(verl.check_recipe, recipe.train, recipe.rollout, recipe.watch)
    found.check(reward.check, recipe.train, ())
    if recipe.data:  # what is wrong with it is said before an environment is asked for
        found.check(question_sets.load_training, recipe)
        found.check(question_sets.load_all_heldout, recipe)


def _check_base(recipe: Recipe, found: Objections) -> str:
    """Look at the base and what is to be made of it; return its digest.

    Raises:
        BadInput: there is no such model, or it is damaged.
    """
    from qrl.tasks import question_sets

    base = checkpoint.check(source.locate(recipe.model))
    found.check(question_sets.check_chat, recipe, base.path)
    check_schemes(recipe, base.path, found)
    return base.digest


def _check_machine(recipe: Recipe, device: str, found: Objections) -> None:
    """Look at whether this machine, or the cluster's nodes, can train and evaluate as the recipe says."""
    from qrl import evaluate
    from qrl.train import parallel, rollout, verl

    nodes = cluster.chosen()
    gpus = {step: nodes.resources(step).gpus if nodes else None for step in ("train", "evaluate")}
    if nodes and (several := nodes.resources("train").nodes) > 1:
        gpus["train"] *= several
    found.check(parallel.check, recipe.train, device, gpus["train"])
    if recipe.train.trainer == "verl":
        shared = nodes.processes() if nodes else 1
        count = max(shared, parallel.processes(recipe.train, device, gpus["train"]))
        found.check(verl.check_gpus, recipe.train, count)
    asked_of = (recipe.evaluate.tensor_parallel, recipe.evaluate.engine, device, gpus["evaluate"])
    found.check(evaluate.check_gpus, *asked_of)
    found.check(rollout.check, recipe.rollout, device, recipe.train)


def _smaller(name: str, recipe: Recipe) -> str:
    """Return the recipe for a CPU: a file's own, NAME-cpu.yaml beside NAME.yaml, or a named one."""
    beside = Path(name).with_name(f"{Path(name).stem}-cpu{Path(name).suffix}")
    if Path(name).is_file() and beside.is_file():
        return str(beside)
    return recipes.default({"model": recipe.model, "task": recipe.task}, device="cpu")


def _unstored(recipe: Recipe, beside: Sequence[str]) -> list[str]:
    """Return a sentence where the study stores its trained weights in other formats than they were trained for."""
    qat, schemes = recipe.train.qat, recipe.quantize.schemes
    if qat == "none" or (scheme := names.rounded(qat)) in {*schemes, *beside}:
        return []
    other = f"quantize.schemes = {', '.join(schemes)}"
    return [f"train.qat = {qat} is stored by {scheme}, which is not in {other}: that format is not evaluated."]


def check_schemes(recipe: Recipe, base: Path, objections: Objections | None = None) -> None:
    """Check that every scheme can store the model, whose folder is `base`, with the recipe's settings.

    Raises:
        BadInput: schemes cannot, and there are no `objections` to keep the sentences.
    """
    from qrl import quantize
    from qrl.quantize import settings as choices

    found = Objections() if objections is None else objections
    for scheme in recipe.quantize.schemes:
        settings = found.check(choices.of, scheme, recipe.quantize, recipe.seed)
        if settings and recipe.model not in source.SHIPPED:  # which fits every scheme; the check imports torch
            found.check(quantize.check_fit, base, settings)
    if objections is None:
        found.insist()


def _doubt(found: Objections, doubts: list[str], *, yes: bool) -> None:
    """Object with what `--yes` passes over; with `yes`, only warn of it."""
    from qrl.study import report

    if yes:
        report.warn(doubts)
    else:
        found.add(*(f"{doubt} {_ANYWAY}" for doubt in doubts))


def rehearse(
    recipe: Recipe,
    device: str,
    ahead: DryRun | None,
    *,
    yes: bool,
    methods: int = 1,
    objections: Objections | None = None,
) -> None:
    """Check data and lengths, ask the base 20 questions, and print their answers and what the study will take.

    A base that a finished run has evaluated already is not asked again: it was healthy.

    Args:
        recipe: the resolved settings.
        device: cpu or cuda.
        ahead: what the store lacks; None if that is not known, because of an objection.
        yes: only warn of what speaks against the study.
        methods: how many are trained and evaluated like the recipe's.
        objections: what others have found; they are raised with those to data and lengths, before a model is loaded.

    Raises:
        BadInput: held-out questions are among the training ones, a text is too long, the memory is too small, or the
            base's answers are unhealthy or all wrong.
    """
    from qrl.study import forecast, trial

    found = Objections() if objections is None else objections
    answered = ahead is not None and f"{names.BASE}:{names.FULL}" not in ahead.missing.get("evaluate", ())
    if not answered:
        found.check(_check_contamination, recipe)
        doubts = found.check(_without_room, recipe, found)
        _doubt(found, doubts or [], yes=yes)
    found.insist()
    if answered or ahead is None:
        return
    base = source.locate(recipe.model)
    shape = forecast.Shape.of(base)
    nodes = cluster.chosen()
    if nodes and device == "cuda" and not nodes.resources("main").gpus:
        click.echo(
            "      no trial: the study's own job has no GPU; steps.main.gpus in cluster.yaml gives it one", err=True
        )
        return
    made = trial.run(recipe, base, device)
    click.echo(trial.text(made, recipe), err=True)
    engines = {recipe.evaluate.engine, recipe.rollout.engine}
    if device == "cpu" and engines == {"transformers"} and recipe.model in source.SHIPPED:
        click.echo(f"      time: {_estimated(made, recipe, shape, ahead, methods)}", err=True)
    needed = forecast.memory(recipe, shape, made.frame["prompt_tokens"].max())
    weights, peak, free = map(forecast.size, (*needed, made.free))
    sizes = f"about {peak} for training, {weights} of it for weights and optimizer; {free} are free"
    click.echo(f"      memory: {sizes}", err=True)
    doubts = trial.objections(made, recipe)
    if yes and doubts:
        doubts.append("The health limits hold for the study too: a void cell of the base will end it.")
    if "train" in ahead.missing and needed[0] > made.free:
        remedy = "use train.method=qlora, a smaller model or a larger machine"
        doubts.append(f"Training needs {weights} for weights and optimizer, but {free} are free: {remedy}.")
    _doubt(found, doubts, yes=yes)
    found.insist()


def _estimated(made: Trial, recipe: Recipe, shape: Shape, ahead: DryRun, methods: int) -> str:
    """Return how long the study will take, for a model, engines and a device for which the speed of a trial says it.

    Elsewhere a batch of 20 does not. On a GPU with vLLM it said 12 minutes for 5.3, and 26 for 8; on a CPU, 55 minutes
    for the 26 of a model of 135 M parameters.
    """
    from qrl.study import forecast

    parts = forecast.seconds(made, recipe, shape, {step: len(labels) for step, labels in ahead.missing.items()})
    parts = {name: seconds * methods for name, seconds in parts.items()}
    parts["starting the steps"] = (len(ahead.folders) * methods + LAST_STEPS) * made.start_s
    each = ", ".join(f"{name} {forecast.duration(seconds)}" for name, seconds in parts.items())
    based = f"from the speed of these {len(made.frame)} answers; quantization and new environments come on top"
    return f"about {forecast.duration(sum(parts.values()))} ({each}), {based}"


def asked(recipe: Recipe) -> str:
    """Return how many held-out questions a cell answers, in words; a task may have fewer than `evaluate.n`."""
    from qrl.tasks import question_sets

    count = len(question_sets.load_evaluated(recipe))
    return f"{count} held-out questions" + (", all there are" if count < recipe.evaluate.n else "")


def _check_contamination(recipe: Recipe) -> None:
    """Raise BadInput if training and held-out questions overlap; generated ones cannot."""
    from qrl.tasks import contamination, question_sets

    if recipe.data or recipe.task != "arithmetic":
        trained = question_sets.load_training(recipe)
        overlap = contamination.overlap(trained, question_sets.load_all_heldout(recipe))
        contamination.check(overlap, recipe.task, recipe.train.max_ngram_share)


def _without_room(recipe: Recipe, found: Objections) -> list[str]:
    """Return a sentence for each length that the model has no room for; the recipe's own are objections."""
    from qrl.engine import hf
    from qrl.quantize import settings as choices
    from qrl.tasks import prompt, question_sets
    from qrl.tasks import rows as task_rows

    base = source.locate(recipe.model)
    positions = checkpoint.positions(base)
    tokens, template, objections = hf.tokenizer(base), prompt.of(recipe), []
    asked = {
        "training": (question_sets.load_training, "train.max_completion_tokens", recipe.train.max_completion_tokens),
        "held-out": (question_sets.load_evaluated, "evaluate.max_new_tokens", recipe.evaluate.max_new_tokens),
    }
    for kind, (questions, key, answer) in asked.items():
        longest = nlargest(LONGEST, questions(recipe), key=lambda question: len(question.question))
        length = max(len(prompt.render(tokens, question.question, template)) for question in longest)
        if positions and length + answer > positions:
            wrong = f"A {kind} prompt of {length:,} tokens and {key} = {answer:,} exceed the model's {positions:,}"
            remedy = f"set {key} to at most {positions - length:,}" if positions > length else "remove long questions"
            objections.append(f"{wrong} positions: {remedy}.")
    for scheme in recipe.quantize.schemes:
        settings = choices.of(scheme, recipe.quantize, recipe.seed)
        if settings.calibration == choices.TASK:
            seeded = recipe.model_copy(update={"seed": settings.seed})
            chosen = question_sets.load(seeded, "train", settings.samples)
            task_rows.check_count(len(chosen), settings.samples, f"The task {recipe.task}")
            longest = nlargest(LONGEST, chosen, key=lambda question: len(question.question + question.solution))
            texts = [prompt.training_text(tokens, question, template) for question in longest]
            if (length := max(map(len, tokens(texts, add_special_tokens=False)["input_ids"]))) > settings.max_tokens:
                allowed = f"quantize.calibration_max_tokens is {settings.max_tokens:,}: raise it"
                found.add(f"A calibration text has {length:,} tokens, question and solution, but {allowed}.")
            break  # the other schemes have the same texts
    return objections
