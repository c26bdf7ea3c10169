"""Quantize checkpoints under one scheme or several, with a nested run and a logged model for each result."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from pathlib import Path

import click
from tqdm import tqdm

from qrl import checkpoint, names, process, tasks
from qrl import quantize as quantization
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import Objections
from qrl.formats import groups
from qrl.quantize import calibration, error
from qrl.quantize import settings as choices
from qrl.quantize.settings import Settings
from qrl.recipe import Recipe
from qrl.steps import inputs, outcome, record
from qrl.tasks import prompt
from qrl.tasks import rows as task_rows
from qrl.tracking import addresses, contents, keys, reuse, runs, store
from qrl.workspace import WORK, need, workspace

_Solved = tuple[tasks.Question, bool]  # with its solution, and whether that ended
STAGES = ("reading texts", "storing", "measuring")  # of one checkpoint; rollouts are generated in the first


def chosen(recipe: Recipe, models: str | None) -> dict[str, str]:
    """Return the addresses in `variant=model,…`; default: the recipe's model as base."""
    return inputs.pairs(models, "a variant and its model") if models else {names.BASE: recipe.model}


def sources(recipe: Recipe, models: str | None) -> dict[str, checkpoint.Checkpoint]:
    """Return the full-precision checkpoint of each variant in `variant=model,…`; default: the recipe's model as base.

    Raises:
        BadInput: the list is malformed, a model is not a checkpoint, or one is already quantized.
    """
    checkpoints, objections = {}, Objections()
    for variant, address in chosen(recipe, models).items():
        objections.check(inputs.check_variant, variant)
        source = objections.check(lambda address=address: checkpoint.check(addresses.folder(address)))
        if source is None:
            continue
        checkpoints[variant] = source
        if source.quantization:
            objections.add(f"{address} is already quantized ({source.quantization}): use full-precision weights.")
        objections.check(inputs.check_chat, recipe, source.path)
    objections.insist()
    return checkpoints


def quantize(recipe: Recipe, schemes: tuple[str, ...], models: str | None) -> None:
    """Quantize each model under each scheme, with the same settings and calibration questions, and log the results."""
    settings = [choices.of(scheme, recipe.quantize, recipe.seed) for scheme in schemes]
    checkpoints = sources(recipe, models)
    objections = Objections()
    for source, chosen_settings in itertools.product(checkpoints.values(), settings):
        objections.check(quantization.check_fit, source.path, chosen_settings)
    objections.insist()
    process.hush_transformers()
    device = devices.choose(recipe.device)
    texts = [Texts(recipe, chosen_settings, device) for chosen_settings in settings]
    need(WORK, max(source.bytes for source in checkpoints.values()), "A quantized copy of the model")
    store.prepare()
    listed, made = ",".join(schemes), {}
    tags = {names.TAG_SCHEME: listed, names.TAG_TASK: tasks.label(recipe.task)}
    with runs.step("quantize", recipe, sections=("quantize",), params={"scheme": listed, "device": device}, tags=tags):
        for each in {
            texts_of.questions_digest: texts_of for texts_of in texts if texts_of.settings.calibration
        }.values():
            facts = {"digest": each.questions_digest, "n": each.settings.samples, "source": each.source}
            contents.log_dataset(f"{tags[names.TAG_TASK]}-calibration", context="calibration", **facts)
        for scheme, each in zip(schemes, texts, strict=True):
            with workspace(f"quantize-{scheme}", shared=True) as work:
                for variant, source in checkpoints.items():
                    made[f"{variant}:{scheme}"] = _quantize_one(each, variant, source, work)
        outcome.quantized(chosen(recipe, models), made)


def _quantize_one(texts: Texts, variant: str, source: checkpoint.Checkpoint, work: Path) -> str:
    """Quantize one checkpoint in a nested run with its own cache key, and return the address of the result."""
    recipe, settings, scheme = texts.recipe, texts.settings.sized(source.path), texts.settings.scheme
    size = groups.of(source.path, recipe.quantize.group_size)
    tags = {
        names.TAG_STEP: "quantize",
        names.TAG_CACHE_KEY: keys.quantized(recipe, scheme, source.digest, texts.device, group_size=size),
        names.TAG_VARIANT: variant,
        names.TAG_SCHEME: scheme,
        names.TAG_PARENT_DIGEST: source.digest,
    }
    name = names.cell_name(variant, scheme)
    params = {"variant": variant, "scheme": scheme, "task": tasks.label(recipe.task)}
    with runs.child(name, params=params, tags=tags):
        result = _with_bars(texts, settings, name, source.path, work / variant)
        calibrated_on = {"calibration_digest": result.calibration_digest} if result.calibration_digest else {}
        facts = {"bytes": result.bytes, "bits_per_weight": round(result.bits_per_weight, 3), **calibrated_on}
        facts[names.SETTINGS] = settings.digest(texts.questions_digest)
        if settings.group_size is not None:
            facts[names.GROUP_SIZE] = settings.group_size
        uri, digest = record.own(recipe, result.path, variant, scheme, parent=source.digest, **facts)
        contents.log_params({f"settings.{key}": value for key, value in asdict(settings).items()} | facts)
        costs = ("bytes", "bits_per_weight", "bits_per_parameter", "seconds")
        contents.log_scores({f"quantize/{cost}": getattr(result, cost) for cost in costs}, model_uri=uri)
        log = contents.live_log()
        for layer, layer_error in enumerate(result.layer_errors):
            log({"quantize/layer_error": layer_error}, layer)
        reuse.record_outputs(models={"model": uri}, values={"digest": digest, "parent": source.digest})
        size = f"{result.bytes / 1e6:.2f} MB, {result.bits_per_weight:.2f} bits a weight"
        cost = f"error {result.layer_errors[-1]:.2g} after the last layer, {result.seconds:.1f} s"
        click.echo(f"      {name}: {size}, {cost}", err=True)
        return uri


def _with_bars(texts: Texts, settings: Settings, name: str, source: Path, out: Path) -> quantization.Quantized:
    """Quantize a checkpoint folder while bars show the stage and the texts read."""
    with tqdm(total=len(STAGES), desc=name, unit="stage", leave=False) as bar:
        bar.set_postfix_str(STAGES[0])
        calibration_texts, probe = texts.calibration(source), texts.probe(source)
        with _bar(len(calibration_texts), "tokenize texts") as tokenized:

            def begin(stage: str) -> None:
                tokenized.close()
                bar.n = STAGES.index(stage)
                bar.set_postfix_str(stage)

            given = {"calibration": calibration_texts, "probe": probe, "device": texts.device}
            callbacks = {"stage": begin, "progress": tokenized.update}
            return quantization.run(settings.scheme, source, out, settings=settings, **given, **callbacks)


class Texts:
    """Calibration texts from the same questions for every variant, and the texts that errors are measured on."""

    def __init__(self, recipe: Recipe, settings: Settings, device: str) -> None:
        self.recipe, self.settings, self.device = recipe, settings, device
        self._file: list[str] = []
        self._questions: list[tasks.Question] = []
        self.source = inputs.source_of(recipe)
        self.questions_digest: str | None = None
        seeded = recipe.model_copy(update={"seed": settings.seed})
        self._probe_questions = inputs.questions(seeded, "train", error.ROWS)
        if not settings.calibration:
            return
        with _bar(settings.samples, "draw texts", delay=0) as bar:
            if settings.calibration in (choices.TASK, choices.ROLLOUTS):
                self._questions = inputs.questions(seeded, "train", settings.samples)
                task_rows.check_count(len(self._questions), settings.samples, f"The task {recipe.task}")
                self.questions_digest = inputs.digest(self._questions)
            else:
                self.source = settings.calibration
                self._file = task_rows.texts(Path(settings.calibration), settings.samples)
                self.questions_digest = calibration.digest(self._file)
            bar.update(settings.samples)

    def calibration(self, model: Path) -> list[str]:
        """Return a model's calibration texts: solutions of the task, the model's own answers, or a file's texts."""
        if self.settings.calibration != choices.ROLLOUTS:
            return self._file or self._rendered(model, [(question, True) for question in self._questions])
        return self._rendered(model, _answers(self.recipe, model, self._questions, self.device))

    def probe(self, model: Path) -> list[str]:
        """Return the texts to measure errors on."""
        return self._rendered(model, [(question, True) for question in self._probe_questions])

    def _rendered(self, model: Path, solved: list[_Solved]) -> list[str]:
        """Render questions with their solutions; the end token is left out where a solution was cut."""
        tokens, texts, template = hf.plain_tokenizer(model), [], prompt.of(self.recipe)
        with _bar(len(solved), "render texts") as bar:
            for question, ended in solved:
                text = prompt.training_text(tokens, question, template)
                texts.append(text if ended else text.removesuffix(tokens.eos_token))
                bar.update()
        return texts


def _answers(recipe: Recipe, model: Path, questions: list[tasks.Question], device: str) -> list[_Solved]:
    """Return questions with a model's greedy answers as their solutions, and whether each answer ended."""
    loaded, tokens = hf.load(model, device, devices.compute_dtype(recipe.evaluate.dtype, device))
    prompts = [prompt.render(tokens, question.question, prompt.of(recipe)) for question in questions]
    sizes = {"max_new_tokens": recipe.evaluate.max_new_tokens, "batch_size": recipe.evaluate.batch_size}
    with _bar(len(prompts), "generate rollouts") as bar:
        completions = hf.generate(loaded, tokens, prompts, **sizes, progress=bar.update)
    pairs = zip(questions, completions, strict=True)
    return [(replace(question, solution=answer.raw), answer.finish_reason == "stop") for question, answer in pairs]


def _bar(total: int, what: str, delay: float = 1) -> tqdm:
    """Return a bar over texts, shown after `delay` seconds: most studies need only a few texts."""
    return tqdm(total=total, desc=what, unit="text", leave=False, delay=delay)
