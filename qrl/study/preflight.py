"""What a study or a sweep checks before it builds an environment or trains anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qrl import checkpoint, cluster, names, source, tasks
from qrl import recipe as recipes
from qrl.errors import Objections
from qrl.formats.kind import WITHOUT_VLLM_KERNEL
from qrl.recipe import Recipe, rules
from qrl.study import auto
from qrl.study.launch import DryRun
from qrl.tracking import addresses

if TYPE_CHECKING:
    from qrl.tasks import prompt

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
    collected = Objections() if objections is None else objections
    device = auto.device_of(recipe.device)
    _check_settings(recipe, overrides, beside, collected)

    name = overrides.get("recipe", recipes.DEFAULT)
    if device == "cpu" and recipes.needs_gpu(name):
        doubt = (
            f"Recipe {name} is sized for a GPU, but this study would run on a CPU: use a machine with one, or "
            f"recipe={_smaller(name, recipe)}."
        )
        _doubt(collected, [doubt], yes=yes)

    digest = collected.keep(_check_base, recipe, collected)
    _check_machine(recipe, device, collected)
    if objections is None:
        collected.insist()
    return device, digest or ""


def _check_settings(recipe: Recipe, overrides: dict[str, str], beside: Sequence[str], objections: Objections) -> None:
    """Look at what settings and files say by themselves."""
    from qrl.quantize import settings as choices
    from qrl.registry import signing
    from qrl.study import report
    from qrl.tasks import prompt, question_sets
    from qrl.train import reward

    objections.keep(signing.load_keys, recipe.promote)
    objections.keep(tasks.check_task, recipe.task)
    objections.keep(prompt.check_task, recipe.task, recipe.prompt)
    objections.keep(rules.check, recipe)
    schemes = recipe.quantize.schemes
    unheeded = objections.keep(choices.unheeded, recipe.quantize, schemes, overrides, beside, recipe.train.qat) or []
    report.warn(unheeded + rules.warnings(recipe) + _unstored(recipe, beside))

    # Not a rule of the recipe, since a sweep makes further schemes.
    reads_codes = recipe.evaluate.engine == "vllm" and not recipe.evaluate.unpacked
    without_kernel = set(WITHOUT_VLLM_KERNEL) & {*schemes, *beside}
    if reads_codes and without_kernel:
        objections.add(
            f"vLLM has no kernel for {', '.join(sorted(without_kernel))}: set evaluate.unpacked=true, or "
            "evaluate.engine=transformers."
        )
    objections.keep(reward.check, recipe.train, ())
    if recipe.data:  # read here, so that wrong data is refused before an environment is built
        objections.keep(question_sets.load_training, recipe)
        objections.keep(question_sets.load_all_heldout, recipe)


def _check_base(recipe: Recipe, objections: Objections) -> str:
    """Look at the base and what is to be made of it; return its digest.

    Raises:
        BadInput: there is no such model, or it is damaged.
    """
    from qrl.tasks import question_sets

    base = checkpoint.check(addresses.folder(recipe.model))
    objections.keep(question_sets.check_chat, recipe, base.path)
    if recipe.model not in source.SHIPPED:
        _tell_ends(base.path, objections)
    check_schemes(recipe, base.path, objections)
    return base.digest


def _tell_ends(base: Path, objections: Objections) -> None:
    """Print which end of a turn each file of the base names and what is taken, if they do not agree."""
    from qrl.engine import hf
    from qrl.study import report

    sentence = objections.keep(hf.describe_ends, base)
    if sentence:
        report.warn([sentence])


def _check_machine(recipe: Recipe, device: str, objections: Objections) -> None:
    """Look at whether this machine, or the cluster's nodes, can train and evaluate as the recipe says."""
    from qrl import evaluate
    from qrl.train import Machine
    from qrl.train import machine as machines

    nodes = cluster.chosen()
    machine = Machine(device)
    evaluation_gpus = None
    if nodes:
        resources = nodes.resources("train")
        machine = Machine(device, resources.gpus * resources.nodes, nodes.processes())
        evaluation_gpus = nodes.resources("evaluate").gpus
    objections.keep(machines.check, recipe.train, recipe.rollout, machine)
    settings = recipe.evaluate
    objections.keep(evaluate.check_gpus, settings.tensor_parallel, settings.engine, device, evaluation_gpus)


def _smaller(name: str, recipe: Recipe) -> str:
    """Return the recipe for a CPU: NAME-cpu.yaml in the folder of the file NAME.yaml, or a named one."""
    path = Path(name)
    cpu_path = path.with_name(f"{path.stem}-cpu{path.suffix}")
    if path.is_file() and cpu_path.is_file():
        return str(cpu_path)
    return recipes.default({"model": recipe.model, "task": recipe.task}, device="cpu")


def _unstored(recipe: Recipe, beside: Sequence[str]) -> list[str]:
    """Return a sentence where the study stores its trained weights in other formats than they were trained for."""
    qat, schemes = recipe.train.qat, recipe.quantize.schemes
    if qat == "none":
        return []
    scheme = names.rounded(qat)
    if scheme in {*schemes, *beside}:
        return []
    return [
        f"train.qat = {qat} is stored by {scheme}, which is not in quantize.schemes = {', '.join(schemes)}: that "
        "format is not evaluated."
    ]


def check_schemes(recipe: Recipe, base: Path, objections: Objections | None = None) -> None:
    """Check that every scheme can store the model, whose folder is `base`, with the recipe's settings.

    Raises:
        BadInput: schemes cannot, and there are no `objections` to keep the sentences.
    """
    from qrl import quantize
    from qrl.quantize import settings as choices

    collected = Objections() if objections is None else objections
    # The shipped model fits every scheme, and the check imports torch; but a term of layers may match none of its own.
    is_shipped = recipe.model in source.SHIPPED and not recipe.quantize.layers
    for scheme in recipe.quantize.schemes:
        settings = collected.keep(choices.settings_of, scheme, recipe.quantize, recipe.seed)
        if settings and not is_shipped:
            collected.keep(quantize.check_fit, base, settings)
    if objections is None:
        collected.insist()


def _doubt(objections: Objections, doubts: list[str], *, yes: bool) -> None:
    """Object with what `--yes` passes over; with `yes`, only warn of it."""
    from qrl.study import report

    if yes:
        report.warn(doubts)
    else:
        objections.add(*(f"{doubt} {_ANYWAY}" for doubt in doubts))


def rehearse(
    recipe: Recipe, device: str, dry_run: DryRun | None, *, yes: bool, objections: Objections | None = None
) -> None:
    """Check data and lengths, ask the base 20 questions, and print their answers and the memory that training takes.

    A base that a finished run has evaluated already is not asked again: it was healthy.

    Args:
        recipe: the resolved settings.
        device: cpu or cuda.
        ahead: what the store lacks; None if that is not known, because of an objection.
        yes: only warn of what speaks against the study.
        objections: what others have found; they are raised with those to data and lengths, before a model is loaded.

    Raises:
        BadInput: held-out questions are among the training ones, a text is too long, the memory is too small, or the
            base's answers are unhealthy or all wrong.
    """
    from qrl.engine import memory
    from qrl.study import trial
    from qrl.train import footprint

    collected = Objections() if objections is None else objections
    base_cell = f"{names.BASE}:{names.FULL}"
    is_answered = dry_run is not None and base_cell not in dry_run.missing.get("evaluate", ())
    if not is_answered:
        collected.keep(_check_contamination, recipe)
        doubts = collected.keep(_too_long, recipe, collected)
        _doubt(collected, doubts or [], yes=yes)
    collected.insist()
    if is_answered or dry_run is None:
        return

    base = addresses.folder(recipe.model)
    shape = footprint.Shape.of(base)
    nodes = cluster.chosen()
    if nodes and device == "cuda" and not nodes.resources("main").gpus:
        click.echo(
            "      no trial: the study's own job has no GPU; steps.main.gpus in cluster.yaml gives it one", err=True
        )
        return
    answers = trial.run(recipe, base, device)
    click.echo(trial.text(answers, recipe), err=True)
    weight_bytes, peak_bytes = footprint.needed(recipe.train, shape, answers.frame["prompt_tokens"].max())
    weights, peak, free = map(memory.in_gib, (weight_bytes, peak_bytes, answers.free))
    click.echo(
        f"      memory: about {peak} for training, {weights} of it for weights and optimizer; {free} are free", err=True
    )

    doubts = trial.objections(answers, recipe)
    if yes and doubts:
        doubts.append("The health limits hold for the study too: a void cell of the base will end it.")
    if "train" in dry_run.missing and weight_bytes > answers.free:
        doubts.append(
            f"Training needs {weights} for weights and optimizer, but {free} are free: use train.method=qlora, a "
            "smaller model or a larger machine."
        )
    _doubt(collected, doubts, yes=yes)
    collected.insist()


def describe_questions(recipe: Recipe) -> str:
    """Return how many held-out questions a cell answers, in words; a task may have fewer than `evaluate.n`."""
    from qrl.tasks import question_sets

    if question_sets.is_endless(recipe):
        return f"{recipe.evaluate.n} held-out questions"
    count = len(question_sets.load_evaluated(recipe))
    if count < recipe.evaluate.n:
        return f"{count} held-out questions, all there are"
    return f"{count} held-out questions"


def _check_contamination(recipe: Recipe) -> None:
    """Raise BadInput if training and held-out questions overlap; generated ones cannot."""
    from qrl.tasks import contamination, question_sets

    if recipe.data or recipe.task != "arithmetic":
        trained = question_sets.load_training(recipe)
        overlap = contamination.overlap(trained, question_sets.load_all_heldout(recipe))
        contamination.check_overlap(overlap, recipe.task, recipe.train.max_ngram_share)


def _too_long(recipe: Recipe, objections: Objections) -> list[str]:
    """Return a sentence for each kind of prompt that leaves the model too few positions for an answer.

    Texts that are longer than the recipe's own limits are objections.
    """
    from qrl.engine import hf
    from qrl.tasks import lengths, prompt, question_sets

    base = addresses.folder(recipe.model)
    tokens, template = hf.tokenizer(base), prompt.of_recipe(recipe)
    _check_calibration_lengths(recipe, tokens, template, objections)

    positions = checkpoint.positions(base)
    answer_limits = {
        "training": (question_sets.load_training, "train.max_completion_tokens", recipe.train.max_completion_tokens),
        "held-out": (question_sets.load_evaluated, "evaluate.max_new_tokens", recipe.evaluate.max_new_tokens),
    }
    sentences = []
    for kind, (read_questions, key, answer_tokens) in answer_limits.items():
        prompt_tokens = lengths.longest_prompt(tokens, read_questions(recipe), template)
        if not positions or prompt_tokens + answer_tokens <= positions:
            continue
        remedy = "remove long questions"
        if prompt_tokens < positions:
            remedy = f"set {key} to at most {positions - prompt_tokens:,}"
        sentences.append(
            f"A {kind} prompt of {prompt_tokens:,} tokens and {key} = {answer_tokens:,} exceed the model's "
            f"{positions:,} positions: {remedy}."
        )
    return sentences


def _check_calibration_lengths(
    recipe: Recipe, tokens: Any, template: str | prompt.Template, objections: Objections
) -> None:
    """Object to calibration texts of the task that are longer than the recipe allows; raise BadInput for too few."""
    from qrl.quantize import settings as choices
    from qrl.tasks import lengths, question_sets
    from qrl.tasks import rows as task_rows

    for scheme in recipe.quantize.schemes:
        settings = choices.settings_of(scheme, recipe.quantize, recipe.seed)
        if settings.calibration != choices.TASK:
            continue
        seeded = recipe.model_copy(update={"seed": settings.seed})
        questions = question_sets.load(seeded, "train", settings.samples)
        task_rows.check_calibration_count(len(questions), settings.samples, f"The task {recipe.task}")
        length = lengths.longest_solution(tokens, questions, template)
        if length > settings.max_tokens:
            objections.add(
                f"A calibration text has {length:,} tokens, question and solution, but quantize.calibration_max_tokens "
                f"is {settings.max_tokens:,}: raise it."
            )
        return  # the other schemes have the same texts
