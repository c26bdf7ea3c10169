"""Rollouts by vLLM, in the training process or by a server: what is refused, and the trainer that samples through it.

The trainer is TRL's. It is given a link to the engine that qrl makes (`generation`), and logs how far that engine is from the
model that is trained (`engine_gap`).
"""

from __future__ import annotations

import urllib.error
import urllib.request

from qrl import process
from qrl.errors import BadInput
from qrl.recipe import Rollout, Train
from qrl.train.rollout import engine_gap, link, vllm_engine

VLLM = "vllm"
DEFAULT = Rollout()
SERVER = ("server", "server_timeout_s", "server_group_port")  # settings of mode server
COLOCATED = ("gpu_memory_utilization", "max_model_tokens", "sleep")  # settings of mode colocate
CORRECTION = ("is_correction_max", "max_engine_kl", "min_effective_sample_size")  # settings of a gap that is measured
METRICS = ("kl_k1", "kl_k3", "token_ess", "sequence_ess", "sync_s", "generate_s", "completions_per_s", "tokens_per_s")
PREFIX = "rollout/"  # of their names, as TRL logs them and as MLflow shows them


def check(settings: Rollout, device: str, train: Train) -> None:
    """Refuses what this recipe's rollouts cannot do on this machine, before any environment is built or weight is loaded.

    Raises:
        BadInput: a setting that nothing would heed, vLLM with quantization-aware training, for a distillation or without a GPU, FP8 on a GPU that
            lacks it, a server that does not answer, or an adapter over a base that several processes hold parts of.
    """
    check_heeded(settings)
    if settings.engine != VLLM:
        return
    if train.qat != "none":
        check_qat(settings, train)
    if train.teacher:
        raise BadInput(
            "train.teacher samples with transformers, but rollout.engine = vllm: set rollout.engine = transformers."
        )
    if device != "cuda":
        raise BadInput(
            "rollout.engine = vllm samples on a GPU, but this run's device is the CPU: set rollout.engine = transformers, or run on a GPU."
        )
    if (train.adapter or train.qat != "none") and process.sharded():
        raise BadInput(
            "rollout.engine = vllm sends an adapter's weights, or Q(W), from whole layers, but FSDP shards them: launch without FSDP, "
            "or set train.method = full and train.qat = none."
        )
    if settings.mode == "server":
        check_server(settings.server)
    elif "fp8" in (settings.quantization, settings.kv_cache):
        import torch

        check_fp8(settings, torch.cuda.get_device_capability(), torch.cuda.get_device_name())


def check_heeded(settings: Rollout) -> None:
    """Refuses a setting that would be ignored, since the recipe's engine, mode or correction has no use for it.

    Raises:
        BadInput: the first such setting that differs from its default.
    """
    changed = [key for key in Rollout.model_fields if getattr(settings, key) != getattr(DEFAULT, key)]
    unheeded = {  # what is asked for → settings that it does not look at, and what would
        ("engine", "transformers"): (tuple(Rollout.model_fields), "rollout.engine = vllm"),
        ("mode", "colocate"): (SERVER, "rollout.mode = server"),
        ("mode", "server"): (COLOCATED, "rollout.mode = colocate, or tell the server itself"),
        ("is_correction", "none"): (CORRECTION, "rollout.is_correction to a correction, which measures too"),
    }
    for (key, value), (ignored, instead) in unheeded.items():
        if getattr(settings, key) == value and (named := [name for name in changed if name in ignored and name != key]):
            raise BadInput(
                f"rollout.{named[0]} = {getattr(settings, named[0])} means nothing where rollout.{key} = {value}: set {instead}, "
                f"or leave rollout.{named[0]} out."
            )


def check_qat(settings: Rollout, train: Train) -> None:
    """Refuses engines whose forward would differ from the loss's: they are sent Q(W), but feed activations as they are.

    Raises:
        BadInput: a format that quantizes activations, or weights that the engine rounds once more.
    """
    from qrl.formats.fakequant import rounding

    if rounding.scheme(train.qat).input_activations is not None:
        raise BadInput(
            f"train.qat = {train.qat} quantizes activations too, which vLLM's forward would not: training and sampling would differ. "
            "Set rollout.engine = transformers, or choose a format of weights alone (int8, int4, nvfp4-a16, mxfp4)."
        )
    if settings.quantization != "none":
        raise BadInput(
            f"rollout.quantization = {settings.quantization} rounds what train.qat = {train.qat} rounded already: set it to none."
        )


def check_installed(settings: Rollout) -> None:
    """Refuses vLLM where it is not.

    Raises:
        BadInput: it cannot be imported here.
    """
    if settings.engine == VLLM and not vllm_engine.installed():
        raise BadInput(
            "rollout.engine = vllm, but vLLM is not installed in this environment: run under `mlflow run . -e train … "
            "--env-manager uv`, which builds projects/vllm, or set rollout.engine = transformers."
        )


def check_fp8(settings: Rollout, capability: tuple[int, int], name: str) -> None:
    """Refuses FP8 on a GPU that cannot multiply in it.

    Args:
        settings: that ask for it.
        capability: CUDA compute capability, (major, minor).
        name: of the GPU, for the sentence.
    """
    if tuple(capability) < vllm_engine.FP8_CAPABILITY:
        key = "quantization" if settings.quantization == "fp8" else "kv_cache"
        have, need = (".".join(map(str, pair)) for pair in (capability, vllm_engine.FP8_CAPABILITY))
        raise BadInput(
            f"rollout.{key} = fp8 needs a GPU of compute capability {need} (Ada, Hopper or newer), but {name} has "
            f"{have}: set rollout.{key} = {getattr(DEFAULT, key)}."
        )


def check_server(address: str) -> None:
    """Refuses a rollout server that does not say that it is well."""
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=10):
            return
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise BadInput(
            f"No rollout server answers at rollout.server = {address} ({getattr(error, 'reason', error)}): start one as "
            "qrl/train/ROLLOUTS.md says, or set rollout.mode = colocate."
        ) from None


def arguments(settings: Rollout) -> dict:
    """What TRL's own configuration has to know: how much a token counts that the engine drew with another probability."""
    if settings.engine != VLLM:
        return {}
    corrects = settings.is_correction != "none"
    return {
        "vllm_importance_sampling_correction": corrects,
        "vllm_importance_sampling_clip_max": settings.is_correction_max,
    } | ({"vllm_importance_sampling_mode": settings.is_correction} if corrects else {})


def trainer_class(settings: Rollout) -> type:
    """TRL's GRPO trainer, or one whose rollouts vLLM draws.

    Raises:
        BadInput: vLLM is asked for where it is not installed.
    """
    check_installed(settings)
    from trl import GRPOTrainer

    if settings.engine != VLLM:
        return GRPOTrainer

    class Trainer(GRPOTrainer):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.use_vllm, self.vllm_mode = True, settings.mode
            self.args.use_vllm, self.args.vllm_mode = True, settings.mode  # for the record of the run
            self.vllm_generation = link.link(self, settings)
            self._last_loaded_step = -1

        def _generate_and_score_completions(self, inputs):
            found = super()._generate_and_score_completions(inputs)
            engine, own = found.get("sampling_per_token_logps"), found.get("old_per_token_logps")
            metrics = self.vllm_generation.speed(found["completion_mask"])
            if engine is not None and own is not None:
                metrics |= vars(engine_gap.measure(own, engine, found["completion_mask"], self.accelerator.gather))
            for name, value in metrics.items():
                self._metrics["train" if self.model.training else "eval"][PREFIX + name].append(value)
            return found

    return Trainer
