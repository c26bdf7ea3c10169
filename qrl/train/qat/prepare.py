"""Set up quantization-aware training: attach, calibrate, measure, and fold Q(W) anew after each optimizer step.

`begin` is called once, before the first step of a trainer. It swaps the linears (`linear.attach`), finds the scale of
their inputs on calibration texts if the format has one (`calibrate`), measures how far Q(W) moves log-probabilities
(`logprob_gap`), and registers `refold` for the end of each step. All processes of a training must end with the same
scales and the same Q(W), so their digests are compared.
"""

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
from qrl.formats import groups, layers
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
    model = pretrained.skeleton(checkpoint.config(base))
    plan = layers.plan_of(model, settings.qat, settings.qat_layers, "train.qat_layers")
    for format_name, paths in plan.by_format.items():
        linears.check_widths(layers.named(model, paths), format_name, group_size)
    _of_file(settings)


def begin(trainer, job: Job) -> None:
    """Attach the format to a trainer's policy, if there is one, and fold Q(W) after each of its optimizer steps.

    Activations are calibrated unless an earlier try left its scales in the work folder. Under FSDP that waits until the
    trainer has sharded the model: until then each process has a whole copy in main memory. The reference policy, if
    there is one, is a separate model and stays in full precision.

    Raises:
        BadInput: the format does not fit the model, or processes have other scales or another Q(W).
    """
    settings = job.settings
    if settings.qat == "none":
        return
    from transformers import TrainerCallback

    model = trainer.accelerator.unwrap_model(trainer.model)
    shards = process.sharded()
    dtype = torch.bfloat16 if settings.compute == "bf16" else None
    attach(model, settings.qat, dtype, group_size=job.group_size, terms=settings.qat_layers, shards=shards)
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
    was_training = model.training
    model.eval()
    batches = texts(job, model.device)
    if linears.needs_calibration(job.settings.qat):
        _load_scales_or_calibrate(model, job, batches)

    gap_file = job.work / GAP_FILE
    if fresh:
        computes_in_bf16 = job.settings.compute == "bf16"
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=computes_in_bf16):  # as the loss computes
            mean_gap, largest_gap = logprob_gap(model, batches)
        gap = {GAP: mean_gap, GAP_LARGEST: largest_gap}
        if process.rank() == 0:
            job.work.mkdir(parents=True, exist_ok=True)
            gap_file.write_text(json.dumps(gap))
    else:
        gap = json.loads(gap_file.read_text()) if gap_file.is_file() else {}
    model.train(was_training)
    job.log(gap, 0)
    if process.world_size() > 1:
        parallel.agree({name: parallel.digest(tensors) for name, tensors in state(model).items()})


def _load_scales_or_calibrate(model: nn.Module, job: Job, batches: Sequence[dict[str, Tensor]]) -> None:
    """Set the scales of an earlier try, or calibrate."""
    earlier = [linears.read_activation_scales(job.work)]
    if process.sharded():
        # Calibration needs all processes, and they may not see the same work folder: the first one decides.
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(earlier)
    if earlier[0] is not None:
        set_activation_scales(model, earlier[0])
        return
    scales = calibrate(model, batches)
    if process.rank() == 0:
        job.work.mkdir(parents=True, exist_ok=True)
        linears.write_activation_scales(job.work, scales)


def texts(job: Job, device="cpu") -> list[dict[str, Tensor]]:
    """Return the calibration texts in batches, padded on the right.

    They are a file's, or the first questions' worked solutions, chat-rendered, with the end token.
    """
    settings = job.settings
    limit = settings.qat_calibration_max_tokens
    tokens = hf.tokenizer(job.base)
    rows = _of_file(settings)
    if not rows:
        questions = job.questions[: settings.qat_calibration_samples]
        rows = [prompt.training_text(tokens, question, job.template) for question in questions]
    batches = []
    for start in range(0, len(rows), settings.qat_calibration_batch):
        batch_rows = rows[start : start + settings.qat_calibration_batch]
        batch = tokens(batch_rows, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        length = batch["input_ids"].shape[1]
        if length > limit:
            raise BadInput(
                f"A calibration text has {length} tokens, above train.qat_calibration_max_tokens = {limit}: raise it, "
                "or choose shorter texts."
            )
        batches.append({key: batch[key].to(device) for key in ("input_ids", "attention_mask")})
    return batches


def _of_file(settings: Train) -> list[str]:
    """Return the texts of `train.qat_calibration`; none if they are the task's. Raise BadInput as `task_rows.texts`."""
    if settings.qat_calibration == "task":
        return []
    return task_rows.calibration_texts(
        Path(settings.qat_calibration), settings.qat_calibration_samples, "train.qat_calibration"
    )


def calibrate(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Set the scale of each linear's inputs from the largest |x| over texts, in full precision.

    Args:
        model: with linears attached, in evaluation mode.
        batches: keyword arguments of the model: input_ids and attention_mask, (B, L); padding does not count.

    Returns:
        Linear's name → its static scale, or NVFP4's global one, for `set_activation_scales`.
    """
    largest: dict[str, Tensor] = {}

    def record_largest(path: str, module: QATLinear, inputs: tuple[Tensor]) -> None:
        batch_largest = inputs[0][mask].abs().amax().float()
        largest[path] = torch.maximum(largest.get(path, batch_largest), batch_largest)

    with off(model), torch.no_grad(), contextlib.ExitStack() as hooks:
        for path, module in _calibrated(model).items():
            hooks.enter_context(module.register_forward_pre_hook(functools.partial(record_largest, path)))
        for batch in batches:
            mask = batch["attention_mask"].bool()  # read by the hooks
            model(**batch, use_cache=False)

    scales = {}
    calibrated = _calibrated(model)
    for path, value in largest.items():
        # NaN stays, and is refused below: compressed-tensors would give it the scale 1.
        args = calibrated[path].fold.scheme.input_activations
        scale = value if value.isnan() else rounding.calibrated_scale(value, args)
        scales[path] = float(scale)
    set_activation_scales(model, scales)
    return scales


def set_activation_scales(model: nn.Module, scales: dict[str, float]) -> None:
    """Set the scales of an earlier calibration.

    Raises:
        BadInput: a scale is missing, belongs to no linear of the model, or is no positive number.
    """
    calibrated = _calibrated(model)
    in_only_one = sorted(set(calibrated) ^ set(scales))
    if in_only_one:
        raise BadInput(
            f"The activation scales do not fit the model ({in_only_one[0]} is in only one): calibrate again."
        )
    for path, scale in scales.items():
        if not 0 < scale < math.inf:
            raise BadInput(
                f"The activation scale of {path} is {scale}, but must be a positive number: check the base's weights "
                "and the calibration texts, and calibrate again."
            )
    # One tensor per value: the members of a fold recognize by it that their inputs are rounded alike.
    tensor_of: dict[float, Tensor] = {}
    for path, module in calibrated.items():
        scale = torch.tensor([scales[path]], dtype=torch.float32, device=module.weight.device)
        module.input_global_scale = tensor_of.setdefault(scales[path], scale)


def _attached(model: nn.Module) -> dict[str, QATLinear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, QATLinear)}


def _calibrated(model: nn.Module) -> dict[str, QATLinear]:
    """Return the linears that have a calibrated scale of their inputs."""
    attached = _attached(model).items()
    return {path: module for path, module in attached if rounding.is_calibrated(module.fold.scheme.input_activations)}


def state(model: nn.Module) -> dict[str, Iterator[tuple[str, Tensor]]]:
    """Return what quantized linears compute with: calibrated scales and Q(W), each by the linear's name.

    Sharded weights are gathered one fold after the other, as they are read, so all processes must read them.
    """
    attached = _attached(model).items()
    scales = ((path, module.input_global_scale) for path, module in attached if module.input_global_scale is not None)
    weights = ((path, module.effective_weight) for path, module in attached)
    return {"activation scales": scales, "folded weights": weights}


def logprob_gap(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> tuple[float, float]:
    """Return how far Q(W) moves log-probabilities, in nats: mean and largest |log p_Q − log p| per token.

    Args:
        model: with linears attached and calibrated, in evaluation mode.
        batches: input_ids and attention_mask, (B, L), padded on the right; padding does not count.
    """
    batch_gaps = []
    with torch.no_grad():
        for batch in batches:
            quantized = _logprobs(model, batch)
            with off(model):
                exact = _logprobs(model, batch)
            mask = batch["attention_mask"][:, 1:].bool()
            batch_gaps.append((quantized - exact).abs()[mask])
    gaps = torch.cat(batch_gaps)
    return float(gaps.mean()), float(gaps.max())


def _logprobs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the log-probability of each next token, (B, L - 1), float32."""
    logits = model(**batch, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
