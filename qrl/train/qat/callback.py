"""What a training does differently where linears compute with Q(W): calibration before it, one fold after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, process, tasks
from qrl.engine import hf, pretrained
from qrl.errors import BadInput
from qrl.formats.fakequant import linears
from qrl.recipe import Train
from qrl.tasks import prompt

if TYPE_CHECKING:
    from torch import Tensor

GAP, GAP_LARGEST = "train/qat_logprob_gap", "train/qat_logprob_gap_max"


def check(settings: Train, base: Path) -> None:
    """Refuses what quantization-aware training cannot do, before any weight is loaded.

    Raises:
        BadInput: an adapter, a library that is missing, or a model that the format cannot hold.
    """
    if settings.adapter:
        raise BadInput(
            f"train.qat = {settings.qat} trains all weights, but train.method = {settings.method} trains an adapter beside them: "
            "choose train.method=full, or train.qat=none."
        )
    linears.check_fit(pretrained.skeleton(checkpoint.config(base)), settings.qat)


def begin(
    trainer,
    questions: Sequence[tasks.Question],
    settings: Train,
    *,
    base: Path,
    template: str,
    work: Path,
    log: Callable[[dict[str, float], int], None],
) -> None:
    """Attaches the format to a trainer's policy and folds Q(W) anew after each of its optimizer steps.

    The reference policy, where there is one, is a model of its own and stays in full precision.

    Args:
        trainer: TRL's, ready to train; its model holds the masters, on its device.
        questions: training questions, from whose worked solutions activations are calibrated.
        base: folder of the tokenizer.
        work: the training's own folder: scales of an earlier try are read back from it.
        log: takes how far Q(W) moves the log-probabilities of those solutions, at step 0.

    Raises:
        BadInput: weights that no process holds whole, or a model that the format does not fit.
    """
    import torch

    from qrl.train.qat import calibration, linear

    if trainer.is_fsdp_enabled:
        raise BadInput("train.qat needs processes that hold all weights, which those of FSDP do not: set it to none.")
    model = trainer.accelerator.unwrap_model(trainer.model)
    dtype = torch.bfloat16 if settings.compute == "bf16" else None
    linear.attach(model, settings.qat, dtype)
    batches = texts(questions, settings, base=base, template=template, device=model.device)
    if linears.needs_calibration(settings.qat):
        if (known := linears.read_activation_scales(work)) is not None:
            calibration.set_activation_scales(model, known)
        else:
            found = calibration.calibrate(model, batches)
            if process.rank() == 0:
                work.mkdir(parents=True, exist_ok=True)
                linears.write_activation_scales(work, found)
    with torch.autocast(
        model.device.type, dtype=torch.bfloat16, enabled=dtype is not None
    ):  # as the loss computes, both of them
        mean, largest = calibration.logprob_gap(model, batches)
    log({GAP: mean, GAP_LARGEST: largest}, 0)
    trainer.add_callback(_folding(model))


def note_scales(work: Path) -> Callable[[Path], None]:
    """Puts the calibrated scales of a training's folder, where it has some, beside the masters that are being saved."""

    def note(folder: Path) -> None:
        if (known := linears.read_activation_scales(work)) is not None:
            linears.write_activation_scales(folder, known)

    return note


def texts(
    questions: Sequence[tasks.Question], settings: Train, *, base: Path, template: str, device="cpu"
) -> list[dict[str, Tensor]]:
    """Worked solutions of the first questions, chat-rendered, end token included, padded on the right.

    Raises:
        BadInput: one is longer than `train.qat_calibration_max_tokens`.
    """
    tokens = hf.tokenizer(base)
    rows = [
        prompt.training_text(tokens, question, template) for question in questions[: settings.qat_calibration_samples]
    ]
    found = []
    for start in range(0, len(rows), settings.qat_calibration_batch):
        batch = tokens(
            rows[start : start + settings.qat_calibration_batch],
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        if (length := batch["input_ids"].shape[1]) > settings.qat_calibration_max_tokens:
            raise BadInput(
                f"A calibration text has {length} tokens, above train.qat_calibration_max_tokens = "
                f"{settings.qat_calibration_max_tokens}: raise it."
            )
        found.append({key: batch[key].to(device) for key in ("input_ids", "attention_mask")})
    return found


def _folding(model):
    from transformers import TrainerCallback

    from qrl.train.qat import linear

    class Folding(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            linear.refold(model)

    return Folding()
