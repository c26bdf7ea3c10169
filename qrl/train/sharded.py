"""Reconcile FSDP, PEFT and transformers, where several processes hold parts of one model."""

import dataclasses
import functools
import os

from torch import Tensor

from qrl import process
from qrl.errors import BadInput
from qrl.recipe import Train

PART = "_fsdp_wrapped_module"  # FSDP adds it to the names of modules, but not of weights


def check(settings: Train, device: str) -> None:
    """Raise BadInput if this training was launched with FSDP, and the device or FSDP 1 does not allow it."""
    if not process.sharded():
        return
    if device == "cpu":
        raise BadInput("FSDP shards over GPUs, but this run's device is the CPU: launch without FSDP, or run on GPUs.")
    key = "qat" if settings.qat != "none" else "teacher"
    if (settings.qat != "none" or settings.teacher) and os.environ.get("FSDP_VERSION", "1") != "2":
        needs = f"train.{key} needs FSDP 2, but this training was launched with FSDP 1"
        raise BadInput(f"{needs}: set train.parallel = fsdp2, or launch with --fsdp_version 2.")


def prepare(trainer, settings: Train) -> None:
    """Let a model train as one process would train it, before FSDP shards it."""
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        exact = settings.qat != "none" or bool(settings.teacher)
        plugin.mixed_precision_policy = keep_precision(plugin.mixed_precision_policy, settings.adapter, exact)
    if settings.adapter:
        patch_peft()


def keep_precision(policy, adapter: bool, exact: bool = False):
    """Return FSDP's mixed-precision policy without the casts that lose precision.

    bf16 changes a rotary position's angle at 1,000 by up to 2 radians. PEFT casts an adapter's inputs to the dtype of
    its weights, so each part casts them back. Where training quantizes or distils, `exact` gathers masters and sums
    gradients in fp32, and autocast computes in bf16, as in one process and in the teacher: Q(bf16(W)) is not Q(W), and
    a student with its teacher's weights would have a gradient (norm 1.2 on qrl-tiny).
    """
    if exact:
        return type(policy)()
    kept = {"buffer_dtype": None} if hasattr(policy, "buffer_dtype") else {}  # FSDP 2 leaves buffers as they are
    return dataclasses.replace(policy, **kept, cast_forward_inputs=policy.cast_forward_inputs or adapter)


def gathered(trainer) -> dict[str, Tensor] | None:
    """Return all weights by name, in the first process alone, where processes hold parts; None where each has all."""
    return trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None


def optimizer_file() -> str:
    """Return the name of the file in which a checkpoint of transformers' trainer keeps the optimizer."""
    return "optimizer.bin" if process.sharded() else "optimizer.pt"


def whole(weight: Tensor) -> Tensor:
    """Return a weight's values, gathered where it is sharded: then all processes call this, in the same order."""
    weight = weight.detach()
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()


def share(weight: Tensor) -> Tensor:
    """Return the values of a weight that this process holds."""
    weight = weight.detach()
    local = getattr(weight, "to_local", None)
    return weight if local is None else local()


def release(model) -> None:
    """Free what FSDP 2 has left gathered for a backward pass that does not come: embeddings and output head."""
    for part in model.modules():
        if hasattr(part, "reshard"):
            part.reshard()


def patch_peft() -> None:
    """Let PEFT find an adapter's weights by their names in the whole model: else it silently saves and loads none."""
    import peft
    from peft.tuners import tuners_utils

    prefixes, load = tuners_utils._get_tuner_state_dict_key_prefixes, peft.set_peft_model_state_dict
    if hasattr(load, "__wrapped__"):  # patched before
        return

    @functools.wraps(prefixes)
    def whole_prefixes(*args, **kwargs):
        return {name.replace(f"{PART}.", "") for name in prefixes(*args, **kwargs)}

    @functools.wraps(load)
    def load_whole(model, *args, **kwargs):
        if not hasattr(model, PART):
            return load(model, *args, **kwargs)
        model.check_is_root()  # else the first part that loads weights takes itself for the root
        return load(getattr(model, PART), *args, **kwargs)

    tuners_utils._get_tuner_state_dict_key_prefixes, peft.set_peft_model_state_dict = whole_prefixes, load_whole
