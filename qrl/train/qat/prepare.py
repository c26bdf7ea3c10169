"""Set up quantization-aware training: attach, calibrate, measure, and fold Q(W) anew after each optimizer step."""

import contextlib
import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from qrl import checkpoint, process
from qrl.engine import hf, pretrained
from qrl.errors import BadInput
from qrl.formats import groups
from qrl.formats.fakequant import linears, rounding
from qrl.recipe import Train
from qrl.tasks import prompt
from qrl.tasks import rows as task_rows
from qrl.train import parallel, sharded
from qrl.train.job import Job
from qrl.train.qat import linear
from qrl.train.qat.fold import refold
from qrl.train.qat.linear import QATLinear, attach, off

GAP_FILE = "logprob_gap.json"  # in the work folder
GAP, GAP_LARGEST = "train/qat_logprob_gap", "train/qat_logprob_gap_max"


def check(settings: Train, base: Path, group_size: int = groups.USUAL) -> None:
    """Raise BadInput if `train.qat`, in groups of this size, does not fit the model; no weight is loaded."""
    if settings.qat == "none":
        return
    linears.check_fit(pretrained.skeleton(checkpoint.config(base)), settings.qat, group_size)
    _of_file(settings)


def begin(trainer, job: Job) -> None:
    """Attach the format to a trainer's policy, if there is one, and fold Q(W) after each of its optimizer steps.

    Activations are calibrated unless an earlier try left its scales in the work folder. Under FSDP that waits until the
    trainer has sharded the model: before, it lies whole in main memory. The reference policy, if there is one, is a
    separate model and stays in full precision.

    Raises:
        BadInput: the format does not fit the model, or processes have other scales or another Q(W).
    """
    settings = job.settings
    if settings.qat == "none":
        return
    from transformers import TrainerCallback

    model, shards = trainer.accelerator.unwrap_model(trainer.model), process.sharded()
    dtype = torch.bfloat16 if settings.compute == "bf16" else None
    attach(model, settings.qat, dtype, group_size=job.group_size, shards=shards)
    if not shards:
        _measure(model, job, fresh=True)

    class Folding(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            if shards:  # the checkpoint to resume from is loaded, too
                linear.begin(model)
                _measure(model, job, fresh=not state.global_step)
                sharded.release(model)

        def on_step_end(self, args, state, control, **_):
            refold(model)

    trainer.add_callback(Folding())


def _measure(model: nn.Module, job: Job, *, fresh: bool) -> None:
    """Calibrate, log the gap, and compare the processes; all of them run the same texts.

    Args:
        model: with linears attached.
        job: of the training.
        fresh: the weights are those of the base; else the gap is read, which an earlier try left in the work folder.
    """
    training, bf16, kept = model.training, job.settings.compute == "bf16", job.work / GAP_FILE
    batches = texts(job, model.eval().device)
    if linears.needs_calibration(job.settings.qat):
        _scale(model, job, batches)
    if fresh:
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16):  # as the loss computes
            gap = dict(zip((GAP, GAP_LARGEST), logprob_gap(model, batches), strict=True))
        if process.rank() == 0:
            job.work.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(gap))
    else:
        gap = json.loads(kept.read_text()) if kept.is_file() else {}
    model.train(training)
    job.log(gap, 0)
    if process.world_size() > 1:
        parallel.agree({name: parallel.digest(tensors) for name, tensors in state(model).items()})


def _scale(model: nn.Module, job: Job, batches: Sequence[dict[str, Tensor]]) -> None:
    """Set the scales of an earlier try, or calibrate; sharded processes need one another, so the first one decides."""
    found = [linears.read_activation_scales(job.work)]
    if process.sharded():
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(found)
    if found[0] is not None:
        set_activation_scales(model, found[0])
        return
    scales = calibrate(model, batches)
    if process.rank() == 0:
        job.work.mkdir(parents=True, exist_ok=True)
        linears.write_activation_scales(job.work, scales)


def texts(job: Job, device="cpu") -> list[dict[str, Tensor]]:
    """Return the calibration texts in batches, padded on the right.

    They are a file's, or the first questions' worked solutions, chat-rendered, with the end token.
    """
    settings, tokens = job.settings, hf.tokenizer(job.base)
    limit, questions = settings.qat_calibration_max_tokens, job.questions[: settings.qat_calibration_samples]
    rendered = (prompt.training_text(tokens, question, job.template) for question in questions)
    rows = _of_file(settings) or list(rendered)
    batches = []
    for start in range(0, len(rows), settings.qat_calibration_batch):
        part = rows[start : start + settings.qat_calibration_batch]
        batch = tokens(part, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        if (length := batch["input_ids"].shape[1]) > limit:
            above = f"above train.qat_calibration_max_tokens = {limit}"
            raise BadInput(f"A calibration text has {length} tokens, {above}: raise it, or choose shorter texts.")
        batches.append({key: batch[key].to(device) for key in ("input_ids", "attention_mask")})
    return batches


def _of_file(settings: Train) -> list[str]:
    """Return the texts of `train.qat_calibration`; none if they are the task's. Raise BadInput as `task_rows.texts`."""
    if settings.qat_calibration == "task":
        return []
    return task_rows.texts(Path(settings.qat_calibration), settings.qat_calibration_samples, "train.qat_calibration")


def calibrate(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Set the scale of each linear's inputs from the largest |x| over texts, in full precision.

    Args:
        model: with linears attached, in evaluation mode.
        batches: keyword arguments of the model: input_ids and attention_mask, (B, L); padding does not count.

    Returns:
        Linear's name → global scale, for `set_activation_scales`.
    """
    largest: dict[str, Tensor] = {}

    def note(path: str, module: QATLinear, inputs: tuple[Tensor]) -> None:
        seen = inputs[0][mask].abs().amax().float()
        largest[path] = torch.maximum(largest.get(path, seen), seen)

    with off(model), torch.no_grad(), contextlib.ExitStack() as hooks:
        for path, module in _attached(model).items():
            hooks.enter_context(module.register_forward_pre_hook(functools.partial(note, path)))
        for batch in batches:
            mask = batch["attention_mask"].bool()
            model(**batch, use_cache=False)
    # compressed-tensors gives NaN the scale 1.
    scales = {path: float(value if value.isnan() else rounding.global_scale(value)) for path, value in largest.items()}
    set_activation_scales(model, scales)
    return scales


def set_activation_scales(model: nn.Module, scales: dict[str, float]) -> None:
    """Set the scales of an earlier calibration.

    Raises:
        BadInput: a scale is missing, belongs to no linear of the model, or is no positive number.
    """
    attached = _attached(model)
    if missing := sorted(set(attached) ^ set(scales)):
        raise BadInput(f"The activation scales do not fit the model ({missing[0]} is in only one): calibrate again.")
    if bad := [path for path, scale in scales.items() if not 0 < scale < math.inf]:
        raise BadInput(
            f"The activation scale of {bad[0]} is {scales[bad[0]]}, but must be a positive number: check the base's "
            "weights and the calibration texts, and calibrate again."
        )
    shared: dict[float, Tensor] = {}  # one tensor per value, so that members of a fold recognize equal inputs
    for path, module in attached.items():
        scale = torch.tensor([scales[path]], dtype=torch.float32, device=module.weight.device)
        module.input_global_scale = shared.setdefault(scales[path], scale)


def _attached(model: nn.Module) -> dict[str, QATLinear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, QATLinear)}


def state(model: nn.Module) -> dict[str, Iterator[tuple[str, Tensor]]]:
    """Return what quantized linears compute with, by what it is: calibrated scales and Q(W), by the linear's name.

    Sharded weights are gathered one fold after the other: all processes read them.
    """
    attached = _attached(model).items()
    scales = ((path, module.input_global_scale) for path, module in attached if module.input_global_scale is not None)
    return {"activation scales": scales, "folded weights": ((path, module.multiplied) for path, module in attached)}


def logprob_gap(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> tuple[float, float]:
    """Return how far Q(W) moves log-probabilities, in nats: mean and largest |log p_Q − log p| per token.

    Args:
        model: with linears attached and calibrated, in evaluation mode.
        batches: input_ids and attention_mask, (B, L), padded on the right; padding does not count.
    """
    gaps = []
    with torch.no_grad():
        for batch in batches:
            quantized = _logprobs(model, batch)
            with off(model):
                gaps.append((quantized - _logprobs(model, batch)).abs()[batch["attention_mask"][:, 1:].bool()])
    every = torch.cat(gaps)
    return float(every.mean()), float(every.max())


def _logprobs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probability of each next token, (B, L - 1), float32."""
    logits = model(**batch, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
