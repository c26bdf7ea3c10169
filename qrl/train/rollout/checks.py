"""What rollouts by vLLM need, checked before any environment is built or weight is loaded."""

from __future__ import annotations

import urllib.error
import urllib.request

import torch

from qrl import process
from qrl.errors import BadInput
from qrl.recipe import Rollout, Train
from qrl.train.rollout import vllm_engine

VLLM = "vllm"
DEFAULT = Rollout()
SERVER = ("server", "server_timeout_s", "server_group_port")  # settings of mode server
COLOCATED = ("gpu_memory_utilization", "max_model_tokens", "sleep")  # settings of mode colocate
CORRECTION = ("is_correction_max", "max_engine_kl", "min_effective_sample_size")  # settings of a measured gap


def check(settings: Rollout, device: str, train: Train) -> None:
    """Check that this machine can sample as the recipe says.

    Raises:
        BadInput: a setting has no effect; vLLM would sample without a GPU, for a distillation, or for a format that
            quantizes activations; FSDP shards its weights; the GPU lacks FP8; or the server does not answer.
    """
    check_heeded(settings)
    if settings.engine != VLLM:
        return
    if train.qat != "none":
        _check_qat(settings, train)
    if train.teacher:
        raise BadInput(
            "train.teacher samples with transformers, but rollout.engine = vllm: set rollout.engine = transformers."
        )
    if device != "cuda":
        raise BadInput(
            "rollout.engine = vllm samples on a GPU, but this run's device is the CPU: set rollout.engine = "
            "transformers, or run on a GPU."
        )
    if (train.adapter or train.qat != "none") and process.sharded():
        raise BadInput(
            "rollout.engine = vllm reads an adapter's weights, or Q(W), from whole layers, but FSDP shards them: "
            "launch without FSDP, or set train.method = full and train.qat = none."
        )
    if settings.mode == "server":
        check_server(settings.server)
    elif "fp8" in (settings.quantization, settings.kv_cache):
        check_fp8(settings, torch.cuda.get_device_capability(), torch.cuda.get_device_name())


def check_heeded(settings: Rollout) -> None:
    """Check that no setting is ignored by the recipe's engine, mode or correction.

    Raises:
        BadInput: one is; names the first that differs from its default.
    """
    changed = [key for key in Rollout.model_fields if getattr(settings, key) != getattr(DEFAULT, key)]
    ignored_by = {  # a choice → the settings that it ignores, and the choice that does not
        ("engine", "transformers"): (tuple(Rollout.model_fields), "rollout.engine = vllm"),
        ("mode", "colocate"): (SERVER, "rollout.mode = server"),
        ("mode", "server"): (COLOCATED, "rollout.mode = colocate, or start the server with it"),
        ("is_correction", "none"): (CORRECTION, "rollout.is_correction to a correction, which also measures the gap"),
    }
    for (key, value), (ignored, remedy) in ignored_by.items():
        if getattr(settings, key) == value and (named := [name for name in changed if name in ignored and name != key]):
            raise BadInput(
                f"rollout.{named[0]} = {getattr(settings, named[0])} has no effect where rollout.{key} = {value}: "
                f"set {remedy}, or leave rollout.{named[0]} out."
            )


def _check_qat(settings: Rollout, train: Train) -> None:
    """Refuse engines with another forward pass than the loss: they receive Q(W), but do not quantize activations."""
    from qrl.formats.fakequant import rounding

    if rounding.scheme(train.qat).input_activations is not None:
        raise BadInput(
            f"train.qat = {train.qat} quantizes activations, but vLLM's forward pass would not: set rollout.engine = "
            "transformers, or choose a weight-only format (int8, int4, nvfp4-a16, mxfp4)."
        )
    if settings.quantization != "none":
        raise BadInput(
            f"rollout.quantization = {settings.quantization} would round the weights again that train.qat = "
            f"{train.qat} has rounded: set rollout.quantization = none."
        )


def check_installed(settings: Rollout) -> None:
    """Check that vLLM is installed where the recipe samples with it.

    Raises:
        BadInput: it cannot be imported.
    """
    if settings.engine == VLLM and not vllm_engine.installed():
        raise BadInput(
            "rollout.engine = vllm, but vLLM is not installed in this environment: run `mlflow run . -e train … "
            "--env-manager uv`, which builds projects/vllm, or set rollout.engine = transformers."
        )


def check_fp8(settings: Rollout, capability: tuple[int, int], name: str) -> None:
    """Check that a GPU can multiply in FP8.

    Args:
        settings: with FP8 weights, or keys and values.
        capability: the GPU's CUDA compute capability, (major, minor).
        name: of the GPU, for the error.
    """
    if tuple(capability) < vllm_engine.FP8_CAPABILITY:
        key = "quantization" if settings.quantization == "fp8" else "kv_cache"
        have, need = (".".join(map(str, pair)) for pair in (capability, vllm_engine.FP8_CAPABILITY))
        raise BadInput(
            f"rollout.{key} = fp8 needs a GPU of compute capability {need} (Ada, Hopper or newer), but {name} has "
            f"{have}: set rollout.{key} = {getattr(DEFAULT, key)}."
        )


def check_server(address: str) -> None:
    """Check that a rollout server reports itself healthy."""
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=10):
            return
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise BadInput(
            f"No rollout server answers at rollout.server = {address} ({getattr(error, 'reason', error)}): start one "
            "as qrl/train/rollout/README.md describes, or set rollout.mode = colocate."
        ) from None


def check_server_storage(info: dict, settings: Rollout) -> None:
    """Check that a rollout server stores weights, keys and values as the recipe says.

    Args:
        info: the server's own configuration, from its `/server_info`.
    """
    stored = (info.get("model_config") or {}).get("quantization"), (info.get("cache_config") or {}).get("cache_dtype")
    options = {"quantization": ("weights", vllm_engine.FP8), "kv_cache": ("keys and values", "fp8")}
    for (key, (what, name)), actual in zip(options.items(), stored, strict=True):
        expected, option = getattr(settings, key), f"--{key.replace('kv_cache', 'kv-cache-dtype')}"
        if (expected == "fp8") != (actual not in (None, "auto", "bfloat16")):
            raise BadInput(
                f"The rollout server stores its {what} as {actual or 'full precision'}, but rollout.{key} = "
                f"{expected}: start it {f'with {option} {name}' if expected == 'fp8' else f'without {option}'}."
            )


def arguments(settings: Rollout) -> dict:
    """Return GRPO's arguments that correct for the gap between the engine's probabilities and the trained model's."""
    if settings.engine != VLLM:
        return {}
    corrects = settings.is_correction != "none"
    return {
        "vllm_importance_sampling_correction": corrects,
        "vllm_importance_sampling_clip_max": settings.is_correction_max,
    } | ({"vllm_importance_sampling_mode": settings.is_correction} if corrects else {})
