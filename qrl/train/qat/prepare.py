"""Set up quantization-aware training: attach, calibrate, and fold Q(W) anew after each optimizer step."""

from pathlib import Path

import torch

from qrl import checkpoint, process
from qrl.engine import hf, pretrained
from qrl.errors import BadInput
from qrl.formats.fakequant import linears
from qrl.recipe import Train
from qrl.tasks import prompt
from qrl.train.job import Job

GAP, GAP_LARGEST = "train/qat_logprob_gap", "train/qat_logprob_gap_max"


def check(settings: Train, base: Path) -> None:
    """Raise BadInput if `train.qat` fits neither the method nor the model, before any weight is loaded."""
    if settings.qat == "none":
        return
    if settings.adapter:
        qat, method = f"train.qat = {settings.qat}", f"train.method = {settings.method}"
        raise BadInput(f"{qat} trains all weights, but {method} trains an adapter: set method = full or qat = none.")
    linears.check_fit(pretrained.skeleton(checkpoint.config(base)), settings.qat)


def begin(trainer, job: Job) -> None:
    """Attach the format to a trainer's policy, if there is one, and fold Q(W) after each of its optimizer steps.

    Activations are calibrated on the worked solutions of the first training questions, unless an earlier try left its
    scales in the work folder. How far Q(W) moves those solutions' log-probabilities is logged at step 0. The reference
    policy, if there is one, is a separate model and stays in full precision.

    Raises:
        BadInput: FSDP shards the weights, or the format does not fit the model.
    """
    settings = job.settings
    if settings.qat == "none":
        return
    from transformers import TrainerCallback

    from qrl.train.qat import calibration, fold, linear

    if trainer.is_fsdp_enabled:
        raise BadInput("train.qat needs whole weights in each process, but FSDP shards them: set train.qat = none.")
    model = trainer.accelerator.unwrap_model(trainer.model)
    bf16, training = settings.compute == "bf16", model.training
    linear.attach(model.eval(), settings.qat, torch.bfloat16 if bf16 else None)
    batches = texts(job, model.device)
    if linears.needs_calibration(settings.qat):
        if (scales := linears.read_activation_scales(job.work)) is not None:
            calibration.set_activation_scales(model, scales)
        else:
            scales = calibration.calibrate(model, batches)
            if process.rank() == 0:
                job.work.mkdir(parents=True, exist_ok=True)
                linears.write_activation_scales(job.work, scales)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):  # as the loss computes
        mean, largest = calibration.logprob_gap(model, batches)
    model.train(training)
    job.log({GAP: mean, GAP_LARGEST: largest}, 0)

    class Folding(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            fold.refold(model)

    trainer.add_callback(Folding())


def texts(job: Job, device="cpu") -> list[dict[str, torch.Tensor]]:
    """Return the worked solutions of the first questions, chat-rendered, with the end token, padded on the right."""
    settings, tokens = job.settings, hf.tokenizer(job.base)
    limit, questions = settings.qat_calibration_max_tokens, job.questions[: settings.qat_calibration_samples]
    rows = [prompt.training_text(tokens, question, job.template) for question in questions]
    batches = []
    for start in range(0, len(rows), settings.qat_calibration_batch):
        part = rows[start : start + settings.qat_calibration_batch]
        batch = tokens(part, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        if (length := batch["input_ids"].shape[1]) > limit:
            above = f"above train.qat_calibration_max_tokens = {limit}"
            raise BadInput(f"A calibration text has {length} tokens, {above}: raise it, or choose shorter texts.")
        batches.append({key: batch[key].to(device) for key in ("input_ids", "attention_mask")})
    return batches
