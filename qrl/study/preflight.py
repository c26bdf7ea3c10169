"""What a study or a sweep checks before it builds an environment or trains anything."""

from collections.abc import Sequence
from heapq import nlargest
from pathlib import Path

import click

from qrl import checkpoint, cluster, names, source, tasks
from qrl import recipe as recipes
from qrl.errors import BadInput
from qrl.formats.kind import FEW_BITS
from qrl.recipe import Recipe
from qrl.study import auto
from qrl.study.launch import DryRun

LAST_STEPS = 3  # diagnose, compare and promote, which a `DryRun` does not reach
LONGEST = 50  # questions whose length is checked: those with the most characters
_ANYWAY = "To start the study anyway, add --yes (with mlflow run: -P yes=true)."


def check(
    recipe: Recipe, overrides: dict[str, str], *, beside: Sequence[str] = (), yes: bool = False
) -> tuple[str, str]:
    """Refuse what a later step could not do, and warn of settings that have no effect.

    Args:
        recipe: the resolved settings.
        overrides: as typed.
        beside: schemes that the study makes too, beyond the recipe's.
        yes: only warn if the recipe is sized for another machine.

    Returns:
        The device that models run on, cpu or cuda, and the digest of the base model.

    Raises:
        BadInput: the prompt, the model, a scheme, the rollouts or the machine do not fit the rest.
    """
    from qrl import evaluate
    from qrl.quantize import settings as choices
    from qrl.registry import signing
    from qrl.steps import inputs
    from qrl.study import report
    from qrl.tasks import prompt
    from qrl.train import parallel, reward, rollout, verl

    signing.keys(recipe.promote)
    tasks.check(recipe.task)
    prompt.check(recipe.task, recipe.prompt)
    evaluate.kv_schemes(recipe)
    unheeded = choices.unheeded(recipe.quantize, recipe.quantize.schemes, overrides, beside, recipe.train.qat)
    report.warn(unheeded + evaluate.unheeded(recipe.evaluate) + _unstored(recipe, beside))
    device, name = auto.device_of(recipe.device), overrides.get("recipe", recipes.DEFAULT)
    if device == "cpu" and recipes.needs_gpu(name):
        smaller = recipes.default({"model": recipe.model, "task": recipe.task}, device=device)
        fitting = f"use a machine with one, or recipe={smaller}"
        insist([f"Recipe {name} is sized for a GPU, but this study would run on a CPU: {fitting}."], yes=yes)
    packed = recipe.evaluate.engine == "vllm" and not recipe.evaluate.unpacked
    if packed and (few := set(FEW_BITS) & {*recipe.quantize.schemes, *beside}):
        listed = ", ".join(sorted(few))
        raise BadInput(f"vLLM has no kernel for {listed}: set evaluate.unpacked=true, or evaluate.engine=transformers.")
    base = checkpoint.check(source.locate(recipe.model))
    inputs.check_chat(recipe, base.path)
    check_schemes(recipe, base.path)
    nodes = cluster.chosen()
    gpus = {step: nodes.resources(step).gpus if nodes else None for step in ("train", "evaluate")}
    if nodes and (several := nodes.resources("train").nodes) > 1:
        gpus["train"] *= several
    if recipe.train.trainer == "verl":
        verl.check_recipe(recipe.train, recipe.rollout, recipe.watch)
    parallel.check(recipe.train, device, gpus["train"])
    if recipe.train.trainer == "verl":
        shared = nodes.processes() if nodes else 1
        verl.check_gpus(recipe.train, max(shared, parallel.processes(recipe.train, device, gpus["train"])))
    evaluate.check_gpus(recipe.evaluate.tensor_parallel, recipe.evaluate.engine, device, gpus["evaluate"])
    rollout.check(recipe.rollout, device, recipe.train)
    reward.check(recipe.train, ())
    if recipe.data:  # what is wrong with it is said before an environment is asked for
        inputs.trained(recipe)
        inputs.all_heldout(recipe)
    return device, base.digest


def _unstored(recipe: Recipe, beside: Sequence[str]) -> list[str]:
    """Return a sentence where the study stores its trained weights in other formats than they were trained for."""
    qat, schemes = recipe.train.qat, recipe.quantize.schemes
    if qat == "none" or (scheme := names.rounded(qat)) in {*schemes, *beside}:
        return []
    other = f"quantize.schemes = {', '.join(schemes)}"
    return [f"train.qat = {qat} is stored by {scheme}, which is not in {other}: that format is not evaluated."]


def check_schemes(recipe: Recipe, base: Path) -> None:
    """Check that every scheme can store the model, whose folder is `base`, with the recipe's settings."""
    from qrl import quantize
    from qrl.quantize import settings as choices

    for scheme in recipe.quantize.schemes:
        settings = choices.of(scheme, recipe.quantize, recipe.seed)
        if recipe.model not in source.SHIPPED:  # the shipped model fits every scheme; the check imports torch
            quantize.check_fit(base, settings)


def insist(objections: list[str], *, yes: bool) -> None:
    """Raise BadInput with the first objection to a study, and print the others; with `yes`, print all and go on."""
    from qrl.study import report

    report.warn(objections if yes else objections[1:])
    if objections and not yes:
        raise BadInput(f"{objections[0]} {_ANYWAY}")


def rehearse(recipe: Recipe, device: str, ahead: DryRun, *, yes: bool, methods: int = 1) -> None:
    """Check data and lengths, ask the base 20 questions, and print their answers and what the study will take.

    A base that a finished run has evaluated already is not asked again: it was healthy.

    Args:
        recipe: the resolved settings.
        device: cpu or cuda.
        ahead: what the store lacks.
        yes: only warn of what speaks against the study.
        methods: how many are trained and evaluated like the recipe's.

    Raises:
        BadInput: held-out questions are among the training ones, a text is too long, the memory is too small, or the
            base's answers are unhealthy or all wrong.
    """
    if f"{names.BASE}:{names.FULL}" not in ahead.missing.get("evaluate", ()):
        return
    from qrl.study import forecast, trial

    base = source.locate(recipe.model)
    shape = forecast.Shape.of(base)
    _check_contamination(recipe)
    insist(_without_room(recipe, base, shape.positions), yes=yes)
    nodes = cluster.chosen()
    if nodes and device == "cuda" and not nodes.resources("main").gpus:
        click.echo(
            "      no trial: the study's own job has no GPU; steps.main.gpus in cluster.yaml gives it one", err=True
        )
        return
    made = trial.run(recipe, base, device)
    click.echo(trial.text(made), err=True)
    parts = forecast.seconds(made, recipe, shape, {step: len(labels) for step, labels in ahead.missing.items()})
    parts = {name: seconds * methods for name, seconds in parts.items()}
    parts["starting the steps"] = (len(ahead.folders) * methods + LAST_STEPS) * made.start_s
    each = ", ".join(f"{name} {forecast.duration(seconds)}" for name, seconds in parts.items())
    based = f"from the speed of these {len(made.frame)} answers; quantization and new environments come on top"
    if recipe.evaluate.engine != "transformers":
        based += f"; {recipe.evaluate.engine} answers faster, but an engine takes a minute or more to start"
    click.echo(f"      time: about {forecast.duration(sum(parts.values()))} ({each}), {based}", err=True)
    needed = forecast.memory(recipe, shape, made.frame["prompt_tokens"].max())
    weights, peak, free = map(forecast.size, (*needed, made.free))
    sizes = f"about {peak} for training, {weights} of it for weights and optimizer; {free} are free"
    click.echo(f"      memory: {sizes}", err=True)
    objections = trial.objections(made, recipe)
    if yes and objections:
        objections.append("The health limits hold for the study too: an unhealthy cell of the base will end it.")
    if "train" in ahead.missing and needed[0] > made.free:
        remedy = "use train.method=qlora, a smaller model or a larger machine"
        objections.append(f"Training needs {weights} for weights and optimizer, but {free} are free: {remedy}.")
    insist(objections, yes=yes)


def asked(recipe: Recipe) -> str:
    """Return how many held-out questions a cell answers, in words; a task may have fewer than `evaluate.n`."""
    from qrl.steps import inputs

    count = len(inputs.evaluated(recipe))
    return f"{count} held-out questions" + (", all there are" if count < recipe.evaluate.n else "")


def _check_contamination(recipe: Recipe) -> None:
    """Raise BadInput if training and held-out questions overlap; generated ones cannot."""
    from qrl.steps import inputs
    from qrl.tasks import contamination

    if recipe.data or recipe.task != "arithmetic":
        trained = inputs.trained(recipe)
        overlap = contamination.overlap(trained, inputs.all_heldout(recipe))
        contamination.check(overlap, recipe.task, recipe.train.max_ngram_share)


def _without_room(recipe: Recipe, base: Path, positions: int | None) -> list[str]:
    """Return a sentence for each length that the model or the recipe has no room for."""
    from qrl.engine import hf
    from qrl.quantize import settings as choices
    from qrl.steps import inputs
    from qrl.tasks import prompt
    from qrl.tasks import rows as task_rows

    tokens, template, objections = hf.tokenizer(base), prompt.of(recipe), []
    asked = {
        "training": (inputs.trained, "train.max_completion_tokens", recipe.train.max_completion_tokens),
        "held-out": (inputs.evaluated, "evaluate.max_new_tokens", recipe.evaluate.max_new_tokens),
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
            chosen = inputs.questions(seeded, "train", settings.samples)
            task_rows.check_count(len(chosen), settings.samples, f"The task {recipe.task}")
            longest = nlargest(LONGEST, chosen, key=lambda question: len(question.question + question.solution))
            texts = [prompt.training_text(tokens, question, template) for question in longest]
            if (length := max(map(len, tokens(texts, add_special_tokens=False)["input_ids"]))) > settings.max_tokens:
                allowed = f"quantize.calibration_max_tokens is {settings.max_tokens:,}: raise it"
                raise BadInput(f"A calibration text has {length:,} tokens, question and solution, but {allowed}.")
            break  # the other schemes have the same texts
    return objections
