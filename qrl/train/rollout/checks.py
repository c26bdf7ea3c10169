"""What rollouts by vLLM need, checked before any weight is loaded."""

import importlib.util

import torch

from qrl import process
from qrl.errors import BadInput
from qrl.recipe import Rollout, Train
from qrl.train.job import Job
from qrl.train.rollout import codes, server, slot, vllm_engine

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
        server.check(settings, train)
    elif torch.cuda.is_available():  # a login node has none
        has_fp8 = settings.quantization == codes.NAME and train.qat == "fp8"
        if has_fp8 or "fp8" in (settings.quantization, settings.kv_cache):
            check_fp8(settings, torch.cuda.get_device_capability(), torch.cuda.get_device_name())


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
    if not changed or settings.is_correction == "none" or train.teacher:
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


def arguments(settings: Rollout) -> dict:
    """Return GRPO's arguments that correct for the gap between the engine's probabilities and the trained model's."""
    if settings.engine != VLLM:
        return {}
    correction = {"correction": settings.is_correction != "none", "clip_max": settings.is_correction_max}
    if correction["correction"]:
        correction["mode"] = settings.is_correction
    return {f"vllm_importance_sampling_{name}": value for name, value in correction.items()}
