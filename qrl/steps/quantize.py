"""Quantize checkpoints under one scheme or several, with a nested run and a logged model for each result.

Every variant is calibrated on the same questions, so that quantized models differ in nothing but the weights that they
were made from. A scheme and its settings are checked against every checkpoint before the first one is quantized.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from tqdm import tqdm

from qrl import checkpoint, names, process, tasks
from qrl import quantize as quantization
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import Objections
from qrl.formats import groups, kind
from qrl.quantize import calibration, error
from qrl.quantize import settings as choices
from qrl.quantize.settings import Settings
from qrl.recipe import Recipe, layers, lists
from qrl.steps import endings, outcome, record
from qrl.tasks import prompt, question_sets, turns
from qrl.tasks import rows as task_rows
from qrl.tracking import addresses, contents, keys, reuse, runs, store
from qrl.workspace import WORK, check_space, workspace

_Solved = tuple[tasks.Question, bool]  # with its solution, and whether that ended
STAGES = ("reading texts", "storing", "measuring")  # of one checkpoint; rollouts are generated in the first
_COSTS = ("bytes", "bits_per_weight", "bits_per_parameter", "seconds")


def variant_addresses(recipe: Recipe, models: str | None) -> dict[str, str]:
    """Return the addresses in `variant=model,…`; default: the recipe's model as base."""
    if models:
        return lists.parse_pairs("The list of models", models, "MODEL")
    return {names.BASE: recipe.model}


def check_sources(recipe: Recipe, models: str | None) -> dict[str, checkpoint.Checkpoint]:
    """Return the full-precision checkpoint of each variant in `variant=model,…`; default: the recipe's model as base.

    Raises:
        BadInput: the list is malformed, a model is not a checkpoint, or one is already quantized.
    """
    checkpoints = {}
    objections = Objections()
    for variant, address in variant_addresses(recipe, models).items():
        objections.keep(lists.check_variant, variant)
        source = objections.keep(lambda address=address: checkpoint.check(addresses.folder(address)))
        if source is None:
            continue
        checkpoints[variant] = source
        if source.quantization:
            objections.add(f"{address} is already quantized ({source.quantization}): use full-precision weights.")
        objections.keep(question_sets.check_chat, recipe, source.path)
    objections.insist()
    return checkpoints


def quantize(recipe: Recipe, schemes: tuple[str, ...], models: str | None) -> None:
    """Quantize each model under each scheme, with the same settings and calibration questions, and log the results."""
    settings_of_schemes = [choices.settings_of(scheme, recipe.quantize, recipe.seed) for scheme in schemes]
    checkpoints = check_sources(recipe, models)
    objections = Objections()
    for source, settings in itertools.product(checkpoints.values(), settings_of_schemes):
        objections.keep(quantization.check_fit, source.path, settings)
    objections.insist()
    process.hush_transformers()
    device = devices.choose(recipe.device)
    # Questions are drawn once for each scheme, before a run is opened: too few of them is bad input.
    texts_of_schemes = [Texts(recipe, settings, device) for settings in settings_of_schemes]
    check_space(WORK, max(source.bytes for source in checkpoints.values()), "A quantized copy of the model")
    store.prepare()

    task = tasks.label(recipe.task)
    scheme_list = ",".join(schemes)
    params = {"scheme": scheme_list, "device": device}
    tags = {names.TAG_SCHEME: scheme_list, names.TAG_TASK: task}
    with runs.step("quantize", recipe, sections=("quantize",), params=params, tags=tags):
        _log_calibration_sets(texts_of_schemes, task)
        endings.tell(source.path for source in checkpoints.values())
        addresses_of_cells = {}
        for scheme, texts in zip(schemes, texts_of_schemes, strict=True):
            with workspace(f"quantize-{scheme}", shared=True) as work:
                for variant, source in checkpoints.items():
                    addresses_of_cells[f"{variant}:{scheme}"] = _quantize_one(texts, variant, source, work)
        outcome.print_quantized(variant_addresses(recipe, models), addresses_of_cells)


def _log_calibration_sets(texts_of_schemes: Sequence[Texts], task: str) -> None:
    """Log each calibration set once: most schemes share theirs."""
    by_digest = {texts.questions_digest: texts for texts in texts_of_schemes if texts.settings.calibration}
    for questions_digest, texts in by_digest.items():
        contents.log_dataset(
            f"{task}-calibration",
            digest=questions_digest,
            context="calibration",
            n=texts.settings.samples,
            source=texts.source,
        )


def _quantize_one(texts: Texts, variant: str, source: checkpoint.Checkpoint, work: Path) -> str:
    """Quantize one checkpoint in a nested run with its own cache key, and return the address of the result."""
    recipe = texts.recipe
    settings = texts.settings.sized(source.path)
    scheme = settings.scheme
    name = names.cell_name(variant, scheme)
    params = {"variant": variant, "scheme": scheme, "task": tasks.label(recipe.task)}
    group_size = groups.of(source.path, recipe.quantize.group_size)
    tags = {
        names.TAG_STEP: "quantize",
        names.TAG_CACHE_KEY: keys.quantized(recipe, scheme, source.digest, texts.device, group_size=group_size),
        names.TAG_VARIANT: variant,
        names.TAG_SCHEME: scheme,
        names.TAG_PARENT_DIGEST: source.digest,
    }
    with runs.child(name, params=params, tags=tags):
        result = _quantize_with_bars(texts, settings, name, source.path, work / variant)

        # The facts go with the model, so that a cell can be judged later by how its weights were made.
        facts = {"bytes": result.bytes, "bits_per_weight": round(result.bits_per_weight, 3)}
        if result.calibration_digest:
            facts["calibration_digest"] = result.calibration_digest
        facts[names.SETTINGS] = settings.digest(texts.questions_digest)
        if settings.group_size is not None:
            facts[names.GROUP_SIZE] = settings.group_size
        if settings.layers:
            facts[names.LAYERS] = layers.text_of(settings.layers)
        scales = _scales(result.path)
        facts |= scales
        uri, digest = record.log_own(recipe, result.path, variant, scheme, parent=source.digest, **facts)

        contents.log_params({f"settings.{key}": value for key, value in settings.shown().items()} | facts)
        contents.log_scores({f"quantize/{cost}": getattr(result, cost) for cost in _COSTS}, model_uri=uri)
        log = contents.live_log()
        for layer, layer_error in enumerate(result.layer_errors):
            log({"quantize/layer_error": layer_error}, layer)
        if result.logit_error is not None:
            contents.log_scores({"quantize/logit_error": result.logit_error}, model_uri=uri)
        reuse.record_outputs(models={"model": uri}, values={"digest": digest, "parent": source.digest})

        size = (
            f"{result.bytes / 1e6:.2f} MB, {result.bits_per_parameter:.2f} bits a parameter, "
            f"{result.bits_per_weight:.2f} a quantized weight"
        )
        errors = f"error {result.layer_errors[-1]:.2g} after the last layer"
        if result.logit_error is not None:
            errors += f", {result.logit_error:.2g} of logits"
        cost = f"{errors}, {result.seconds:.1f} s"
        click.echo(f"      {name}: {size}, {cost}", err=True)
        if scales:
            listed = "; ".join(f"{what.replace('_', ' ')} {kinds}" for what, kinds in scales.items())
            click.echo(f"      {name}: {listed}", err=True)
        return uri


def _scales(path: Path) -> dict[str, str]:
    """Return how a quantized checkpoint scales the activations that it rounds, and keys and values; by `names`."""
    quantization = checkpoint.config(path).get("quantization_config") or {}
    of_activations = kind.activation_scales(quantization)
    of_cache = kind.kv_scales(quantization)
    scales = {}
    if of_activations:
        scales[names.ACTIVATION_SCALES] = of_activations
    if of_cache:
        scales[names.KV_SCALES] = of_cache
    return scales


def _quantize_with_bars(texts: Texts, settings: Settings, name: str, source: Path, out: Path) -> quantization.Quantized:
    """Quantize a checkpoint folder while bars show the stage and the texts read."""
    with tqdm(total=len(STAGES), desc=name, unit="stage", leave=False) as bar:
        bar.set_postfix_str(STAGES[0])
        calibration_texts = texts.calibration(source)
        probe_texts = texts.probe(source)
        with _bar(len(calibration_texts), "tokenize texts") as tokenized:

            def begin(stage: str) -> None:
                tokenized.close()
                bar.n = STAGES.index(stage)
                bar.set_postfix_str(stage)

            return quantization.run(
                settings.scheme,
                source,
                out,
                settings=settings,
                calibration=calibration_texts,
                probe=probe_texts,
                device=texts.device,
                stage=begin,
                progress=tokenized.update,
            )


class Texts:
    """Calibration texts from the same questions for every variant, and the texts that errors are measured on."""

    def __init__(self, recipe: Recipe, settings: Settings, device: str) -> None:
        self.recipe = recipe
        self.settings = settings
        self.device = device
        self.source = question_sets.describe_source(recipe)
        self.questions_digest: str | None = None
        self._questions: list[tasks.Question] = []  # of the task, if texts are made from these
        self._file_texts: list[str] = []  # else the texts themselves

        # Questions of the training split: held-out ones would show the quantizer what it is measured on.
        seeded = recipe.model_copy(update={"seed": settings.seed})
        self._probe_questions = question_sets.load(seeded, "train", error.ROWS)
        if not settings.calibration:
            return
        with _bar(settings.samples, "draw texts", delay=0) as bar:
            if settings.calibration in (choices.TASK, choices.ROLLOUTS):
                self._questions = question_sets.load(seeded, "train", settings.samples)
                task_rows.check_calibration_count(len(self._questions), settings.samples, f"The task {recipe.task}")
                self.questions_digest = question_sets.digest(self._questions)
            else:
                self.source = settings.calibration
                self._file_texts = task_rows.calibration_texts(Path(settings.calibration), settings.samples)
                self.questions_digest = calibration.digest(self._file_texts)
            bar.update(settings.samples)

    def calibration(self, model: Path) -> list[str]:
        """Return a model's calibration texts: solutions of the task, the model's own answers, or a file's texts."""
        if self.settings.calibration == choices.ROLLOUTS:
            return self._rendered(model, _answered(self.recipe, model, self._questions, self.device))
        if self._file_texts:
            return self._file_texts
        return self._rendered(model, [(question, True) for question in self._questions])

    def probe(self, model: Path) -> list[str]:
        """Return the texts to measure errors on."""
        return self._rendered(model, [(question, True) for question in self._probe_questions])

    def _rendered(self, model: Path, solved: list[_Solved]) -> list[str]:
        """Render questions with their solutions; the end of the turn is left out where a solution was cut."""
        tokenizer = hf.plain_tokenizer(model)
        template = prompt.of_recipe(self.recipe)
        texts = []
        with _bar(len(solved), "render texts") as bar:
            for question, has_ended in solved:
                text = prompt.training_text(tokenizer, question, template)
                if not has_ended:
                    text = text.removesuffix(turns.closing(tokenizer))
                texts.append(text)
                bar.update()
        return texts


def _answered(recipe: Recipe, model: Path, questions: list[tasks.Question], device: str) -> list[_Solved]:
    """Return questions with a model's greedy answers as their solutions, and whether each answer ended."""
    settings = recipe.evaluate
    loaded, tokenizer = hf.load(model, device, devices.compute_dtype(settings.dtype, device))
    prompts = [prompt.render(tokenizer, question.question, prompt.of_recipe(recipe)) for question in questions]
    with _bar(len(prompts), "generate rollouts") as bar:
        completions = hf.generate(
            loaded,
            tokenizer,
            prompts,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            progress=bar.update,
        )

    solved = []
    for question, completion in zip(questions, completions, strict=True):
        has_ended = completion.finish_reason == "stop"
        solved.append((replace(question, solution=completion.raw), has_ended))
    return solved


def _bar(total: int, description: str, delay: float = 1) -> tqdm:
    """Return a bar over texts, shown after `delay` seconds: most studies need only a few texts."""
    return tqdm(total=total, desc=description, unit="text", leave=False, delay=delay)
