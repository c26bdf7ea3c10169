"""What rollouts by vLLM need, checked before any weight is loaded."""

import importlib.util
from pathlib import Path

import torch

from qrl import checkpoint, process
from qrl.engine import pretrained
from qrl.errors import BadInput
from qrl.formats import layers
from qrl.formats.fakequant import operation
from qrl.recipe import Rollout, Train
from qrl.train.job import Job, Machine
from qrl.train.rollout import codes, server, vllm_engine

VLLM = "vllm"
_REMEDY = "set rollout.engine = transformers"
DEFAULT = Rollout()
_WIDE = {  # k3 on the built-in model, of what exceeds twice bf16's (tests/benchmarks/results/rollouts.md)
    "train.qat = mxfp4": 9.0e-6,
    "train.qat = int3": 1.7e-5,
    "train.qat = int2": 1.4e-4,
    "train.qat = fp8": 1.2e-4,
    "train.qat = nvfp4-a4": 1.6e-3,
    "rollout.quantization = fp8": 2.0e-4,
}
_OF_BF16 = 4.0e-6


def check(settings: Rollout, device: str, train: Train) -> None:
    """Check that this machine can sample as the recipe says.

    Raises:
        BadInput: vLLM would sample without a GPU; FSDP shards its weights; the GPU lacks FP8; or the server does not
            answer, is not of this version, or shares training's GPU.
    """
    if settings.engine != VLLM:
        return
    if device != "cuda":
        raise BadInput(f"rollout.engine = vllm needs a GPU, but the run's device is the CPU: {_REMEDY}, or use a GPU.")
    if train.adapter and process.sharded():
        raise BadInput(
            "rollout.engine = vllm reads an adapter's weights from whole layers, but FSDP shards them: launch without "
            "FSDP, or set train.method = full."
        )
    if settings.mode == "server":
        server.check(settings, train)
    elif torch.cuda.is_available():  # a login node has none
        has_fp8 = settings.quantization == codes.NAME and train.qat == "fp8"
        if has_fp8 or "fp8" in (settings.quantization, settings.kv_cache):
            check_fp8(settings, torch.cuda.get_device_capability(), torch.cuda.get_device_name())


def check_layers(train: Train, settings: Rollout, base: Path) -> None:
    """Raise BadInput if `train.qat_layers` treats linears differently that vLLM fuses into one, where it computes so.

    An engine that only multiplies by Q(W) is sent plain matrices, which fit whatever their format.
    """
    if not train.qat_layers:
        return
    skeleton = pretrained.skeleton(checkpoint.config(base))
    plan = layers.plan_of(skeleton, train.qat, train.qat_layers, "train.qat_layers")
    rounds_inputs = operation.engine_config(train.qat, plan.formats) is not None
    split = layers.split_set(plan)
    if split and (rounds_inputs or settings.quantization == codes.NAME):
        raise BadInput(
            f"train.qat_layers does not treat {', '.join(split)} alike, but the rollout engine fuses them into one "
            "linear: name all of them or none, or set rollout.engine = transformers.",
            field="train.qat_layers",
        )


def check_job(job: Job, machine: Machine) -> None:
    """Check that this machine can sample for a job: `check`, vLLM itself, and the length of its questions.

    Raises:
        BadInput: as for `check`, `check_installed` and `check_length`.
    """
    check(job.rollout, machine.device, job.settings)
    if job.rollout.engine == VLLM:
        check_installed(job.rollout)
        check_layers(job.settings, job.rollout, job.base)
        check_length(job)


def check_length(job: Job) -> None:
    """Check that the engine takes the longest question with its completion, which it would cut in silence.

    Raises:
        BadInput: it takes fewer tokens.
    """
    where = "rollout.max_model_tokens" if job.rollout.mode == "colocate" else "the rollout server's --max-model-len"
    limit = job.rollout.max_model_tokens if job.rollout.mode == "colocate" else server.longest(job.rollout)
    if limit is not None and limit < (longest := job.longest()):
        most = f"train.max_completion_tokens = {job.settings.max_completion_tokens}"
        texts = f"the longest question and a completion of {most} have {longest} tokens"
        raise BadInput(f"{where} is {limit}, but {texts}: raise it to {longest}, or shorten these.")


def startup_warnings(settings: Rollout, train: Train) -> dict[str, str]:
    """Return what is known of the engine's gap before the first step, as sentences by the name of their warning."""
    if settings.engine != VLLM or train.teacher or train.algorithm == "sft":  # whose loss reads nothing of an engine's
        return {}
    told, measured = {}, settings.is_correction != "none"
    for key in (f"train.qat = {train.qat}", f"rollout.quantization = {settings.quantization}"):
        if key in _WIDE:
            told["format"] = (
                f"Under {key} the engine is further from the trained model than in bf16: on the built-in model k3 was "
                f"{_WIDE[key]:.1e} nats per token, in bf16 {_OF_BF16:.1e}."
            )
            told["format"] += f" Warnings begin at rollout.max_engine_kl = {settings.max_engine_kl:g}." * measured
    if not measured:
        told["gap"] = (
            "rollout.is_correction = none also skips measuring the gap between vLLM and the trained model, so the "
            "watcher `rollout` sees nothing: leave it out to have the gap measured and corrected."
        )
    return told


def check_installed(settings: Rollout) -> None:
    """Raise BadInput if the recipe samples with vLLM, but vLLM cannot be imported."""
    if settings.engine == VLLM and not importlib.util.find_spec("vllm"):
        build = f"run {process.environment_command('train')}, which builds projects/vllm"
        raise BadInput(f"rollout.engine = vllm, but vLLM is not installed in this environment: {build}, or {_REMEDY}.")


def check_fp8(settings: Rollout, capability: tuple[int, int], name: str) -> None:
    """Check that a GPU can multiply in FP8; its name and compute capability, (major, minor), are CUDA's."""
    if tuple(capability) < vllm_engine.FP8_CAPABILITY:
        key = "kv_cache" if settings.quantization == "none" else "quantization"
        have, need = (".".join(map(str, pair)) for pair in (capability, vllm_engine.FP8_CAPABILITY))
        least = f"a GPU of compute capability {need} (Ada, Hopper or newer)"
        remedy = f"set rollout.{key} = {getattr(DEFAULT, key)}"
        raise BadInput(f"rollout.{key} = {getattr(settings, key)} needs {least}, but {name} has {have}: {remedy}.")


def arguments(settings: Rollout) -> dict:
    """Return GRPO's arguments that correct for the gap between the engine's probabilities and the trained model's."""
    if settings.engine != VLLM:
        return {}
    correction = {"correction": settings.is_correction != "none", "clip_max": settings.is_correction_max}
    if correction["correction"]:
        correction["mode"] = settings.is_correction
    return {f"vllm_importance_sampling_{name}": value for name, value in correction.items()}
