"""Quantize checkpoints under one scheme: a nested run, a logged model, for each."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click
from tqdm import tqdm

from qrl import checkpoint, names, process, tasks
from qrl import quantize as room
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.quantize import calibration, error, staging
from qrl.quantize import settings as choices
from qrl.quantize.settings import Settings
from qrl.recipe import Recipe
from qrl.steps import inputs, outcome, record
from qrl.tasks import prompt
from qrl.tracking import addresses, contents, keys, reuse, runs, store
from qrl.workspace import workspace

STAGES = ("reading texts", "storing", "measuring")  # of one checkpoint; rollouts are written in the first


def sources(recipe: Recipe, given: str | None) -> dict[str, checkpoint.Checkpoint]:
    """The full-precision checkpoint of every variant: those of `variant=model,…`, or the recipe's model as base.

    Raises:
        BadInput: not such a list, no checkpoint, or one that is quantized already.
    """
    chosen = inputs.pairs(given, "a variant and its model") if given else {names.BASE: recipe.model}
    found = {
        inputs.check_variant(variant): checkpoint.check(addresses.folder(address))
        for variant, address in chosen.items()
    }
    for variant, each in found.items():
        if each.quantization:
            raise BadInput(
                f"{chosen[variant]} is quantized already ({each.quantization}): give full-precision weights."
            )
    return found


def quantize(recipe: Recipe, scheme: str, given: str | None) -> None:
    """Stores each model in few bits, all with the same settings and calibration questions, and logs what came out."""
    settings = choices.of(scheme, recipe.quantize, recipe.seed)
    checkpoints = sources(recipe, given)
    for found in checkpoints.values():
        room.check_fit(found.path, settings)
    process.hush_transformers()
    device = devices.choose(recipe.device)
    texts = Texts(recipe, settings, device)
    store.prepare()
    tags = {names.TAG_SCHEME: scheme, names.TAG_TASK: recipe.task}
    with (
        workspace(f"quantize-{scheme}", shared=True) as work,
        runs.step("quantize", recipe, sections=("quantize",), params={"scheme": scheme, "device": device}, tags=tags),
    ):
        if settings.calibration:
            contents.log_dataset(
                f"{recipe.task}-calibration",
                digest=texts.questions_digest,
                context="calibration",
                n=settings.samples,
                source=texts.source,
            )
        stored = {
            f"{variant}:{scheme}": _one(recipe, settings, variant, found, texts, device, work)
            for variant, found in checkpoints.items()
        }
        outcome.cells(stored)


def _one(
    recipe: Recipe,
    settings: Settings,
    variant: str,
    found: checkpoint.Checkpoint,
    texts: Texts,
    device: str,
    work: Path,
) -> str:
    """One checkpoint: its own nested run, found again by its own key; the address of what came out."""
    scheme = settings.scheme
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
        with tqdm(total=len(STAGES), desc=name, unit="stage", leave=False) as bar:

            def begin(stage: str) -> None:
                bar.n = STAGES.index(stage)
                bar.set_postfix_str(stage)

            begin("reading texts")
            made = room.run(
                scheme,
                found.path,
                work / variant,
                settings=settings,
                calibration=texts.calibration(found.path),
                probe=texts.probe(found.path),
                device=device,
                stage=begin,
            )
        facts = {
            "bytes": made.bytes,
            "bits_per_weight": round(made.bits_per_weight, 3),
            names.SETTINGS: settings.digest(texts.questions_digest),
            **({"calibration_digest": made.calibration_digest} if made.calibration_digest else {}),
        }
        uri, digest = record.own(recipe, made.path, variant, scheme, parent=found.digest, **facts)
        contents.log_params({**{f"settings.{key}": value for key, value in asdict(settings).items()}, **facts})
        contents.log_scores(
            {
                "quantize/bytes": made.bytes,
                "quantize/bits_per_weight": made.bits_per_weight,
                "quantize/bits_per_parameter": made.bits_per_parameter,
                "quantize/seconds": made.seconds,
            },
            model_uri=uri,
        )
        log = contents.live_log()
        for layer, error in enumerate(made.layer_errors):
            log({"quantize/layer_error": error}, layer)
        reuse.record_outputs(models={"model": uri}, values={"digest": digest, "parent": found.digest})
        click.echo(
            f"      {name}: {made.bytes / 1e6:.2f} MB, {made.bits_per_weight:.2f} bits a weight, error {made.layer_errors[-1]:.2g} "
            f"after the last layer, {made.seconds:.1f} s",
            err=True,
        )
        return uri


class Texts:
    """The texts that a scheme looks at, the same questions for every variant, and those that its error is measured on."""

    def __init__(self, recipe: Recipe, settings: Settings, device: str) -> None:
        self._recipe, self._settings, self._device = recipe, settings, device
        self._file: list[str] = []
        self._asked: list[tasks.Question] = []
        self.source = inputs.source_of(recipe)
        self.questions_digest: str | None = None
        seeded = recipe.model_copy(update={"seed": settings.seed})
        self._probed = inputs.questions(seeded, "train", error.ROWS)
        if settings.calibration in (choices.TASK, choices.ROLLOUTS):
            self._asked = inputs.questions(seeded, "train", settings.samples)
            calibration.check_count(len(self._asked), settings.samples, f"The task {recipe.task}")
            self.questions_digest = inputs.digest(self._asked)
        elif settings.calibration:
            self.source = settings.calibration
            self._file = calibration.read(Path(settings.calibration), settings.samples)
            self.questions_digest = calibration.digest(self._file)

    def calibration(self, model: Path) -> list[str]:
        """Calibration texts for a model: solutions of the task, what the model itself answers, or a file's texts."""
        if self._settings.calibration != choices.ROLLOUTS:
            return self._file or self._rendered(model, self._asked)
        answered = answers(self._recipe, model, self._asked, self._device)
        return [text for question, end in answered for text in self._rendered(model, [question], ended=end)]

    def probe(self, model: Path) -> list[str]:
        """Texts to measure the error on."""
        return self._rendered(model, self._probed)

    def _rendered(self, model: Path, questions: list[tasks.Question], *, ended: bool = True) -> list[str]:
        tokens = staging.tokenizer(model)
        texts = [prompt.training_text(tokens, question, self._recipe.prompt) for question in questions]
        return texts if ended else [text.removesuffix(tokens.eos_token) for text in texts]


def answers(recipe: Recipe, model: Path, asked: list[tasks.Question], device: str) -> list[tuple[tasks.Question, bool]]:
    """What a model answers, greedily, in place of each question's solution, and whether it ended.

    Args:
        model: a full-precision checkpoint folder.
        asked: training questions.
    """
    loaded, tokens = hf.load(model, device, devices.compute_dtype(recipe.evaluate.dtype, device))
    prompts = [prompt.render(tokens, question.question, recipe.prompt) for question in asked]
    settings = recipe.evaluate
    written = hf.generate(
        loaded, tokens, prompts, max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size
    )
    return [
        (replace(question, solution=answer.raw), answer.finish_reason == "stop")
        for question, answer in zip(asked, written, strict=True)
    ]
