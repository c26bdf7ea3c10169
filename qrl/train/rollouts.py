"""Rollouts by vLLM, in the training process or by a server: TRL's trainer, given an engine that qrl makes, feeds and measures.

What TRL's own path lacks, and why this replaces it: weights are sent out of place (`sync`), in one pass instead of one walk over
the engine a tensor; completions come as token ids and flat log-probabilities, since TRL decodes them itself; a colocated
engine can store its weights in FP8; draws depend on seed and step alone, so that a resumed run asks for the same ones; and the gap between
engine and trainer is logged (`engine_gap`).
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
import warnings

from qrl import process
from qrl.errors import BadInput
from qrl.recipe import Rollout, Train
from qrl.train import engine_gap, sync, vllm_engine

VLLM = "vllm"
DEFAULT = Rollout()
METRICS = ("kl_k1", "kl_k3", "token_ess", "sequence_ess", "sync_s", "generate_s", "completions_per_s", "tokens_per_s")
PREFIX = "rollout/"  # of their names, as TRL logs them and as MLflow shows them
_ROOM = 0.5  # share of the card that masters, gradients, optimizer and an awake engine may fill; the rest is activations'


def check(settings: Rollout, device: str, train: Train) -> None:
    """Refuses what this recipe's rollouts cannot do on this machine, before any environment is built or weight is loaded.

    Raises:
        BadInput: FP8 without vLLM, vLLM without a GPU, FP8 on a GPU that lacks it, a server that does not answer, or an
            adapter over a base that several processes hold parts of.
    """
    if settings.engine != VLLM:
        if settings.quantization != "none":
            raise BadInput(
                f"rollout.quantization = {settings.quantization} needs an engine that has it: set rollout.engine = vllm, or quantization = none."
            )
        return
    if device != "cuda":
        raise BadInput(
            "rollout.engine = vllm samples on a GPU, but this run's device is the CPU: set rollout.engine = transformers, or run on a GPU."
        )
    if train.adapter and process.sharded():
        raise BadInput(
            "rollout.engine = vllm sends an adapter's weights from whole layers, but FSDP shards them: launch without FSDP, "
            "or set train.method = full."
        )
    if settings.mode == "server":
        check_server(settings.server)
    elif settings.quantization == "fp8":
        import torch

        check_fp8(torch.cuda.get_device_capability(), torch.cuda.get_device_name())


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


def check_fp8(capability: tuple[int, int], name: str) -> None:
    """Refuses FP8 on a GPU that cannot multiply in it.

    Args:
        capability: CUDA compute capability, (major, minor).
        name: of the GPU, for the sentence.
    """
    if tuple(capability) < vllm_engine.FP8_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, vllm_engine.FP8_CAPABILITY))
        raise BadInput(
            f"rollout.quantization = fp8 needs a GPU of compute capability {need} (Ada, Hopper or newer), but {name} has "
            f"{have}: set rollout.quantization = none."
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
    corrects = settings.importance_sampling != "none"
    return {
        "vllm_importance_sampling_correction": corrects,
        "vllm_importance_sampling_clip_max": settings.importance_sampling_max,
    } | ({"vllm_importance_sampling_mode": settings.importance_sampling} if corrects else {})


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
            self.vllm_generation = _generation(self, settings)
            self._last_loaded_step = -1

        def _generate_and_score_completions(self, inputs):
            found = super()._generate_and_score_completions(inputs)
            engine, own = found.get("sampling_per_token_logps"), found.get("old_per_token_logps")
            metrics = self.vllm_generation.speed(found["completion_mask"])
            if engine is not None and own is not None:
                total = engine_gap.sums(own, engine, found["completion_mask"])
                gap = engine_gap.gap(self.accelerator.gather(total[None]).sum(dim=0))
                metrics |= vars(gap)
                self.warned = getattr(self, "warned", False) or warn(gap, settings)
            for name, value in metrics.items():
                self._metrics["train" if self.model.training else "eval"][PREFIX + name].append(value)
            return found

    return Trainer


def warn(gap: engine_gap.Gap, settings: Rollout) -> bool:
    """Says when the engine is further from the trained model than the recipe allows; whether it did."""
    if gap.kl_k3 <= settings.max_kl and gap.token_ess >= settings.min_effective_sample_size:
        return False
    warnings.warn(
        f"The rollout engine samples from another distribution than the one that is trained: KL {gap.kl_k3:.2g} nats a token "
        f"(rollout.max_kl {settings.max_kl:g}), effective sample size {gap.token_ess:.2f} of the tokens "
        f"(rollout.min_effective_sample_size {settings.min_effective_sample_size:g}). Set rollout.quantization = none, or watch the reward.",
        stacklevel=3,
    )
    return True


def asks_for_sleep(settings: Rollout, model) -> bool:
    """Whether a colocated engine gives its memory back while weights are updated; `auto` looks at model and card."""
    if settings.sleep != "auto":
        return settings.sleep == "on"
    import torch

    weights = list(model.parameters())
    stored = sum(weight.numel() * weight.element_size() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    card = torch.cuda.get_device_properties(weights[0].device).total_memory
    return memory_is_short(stored, trained, settings.gpu_memory_utilization, card)


def memory_is_short(stored: int, trained: int, share: float, card: int) -> bool:
    """Whether training and an awake engine together would leave activations too little.

    Args:
        stored: bytes of the model's weights as they lie on the card.
        trained: weights that are updated, each with a gradient and AdamW's two moments: 12 bytes in fp32.
        share: of the card that the engine takes.
        card: bytes of the card's memory.
    """
    return stored + 12 * trained + share * card > _ROOM * card


def _generation(trainer, settings: Rollout):
    """TRL's link to vLLM, with the engine, the weights and the asking replaced."""
    import torch
    from accelerate.utils import set_seed
    from trl.generation.vllm_generation import VLLMGeneration

    class Generation(VLLMGeneration):
        def _init_vllm(self):
            self.seconds = {"sync": 0.0, "generate": 0.0}
            self._drawn = (-1, 0)  # step, and rollouts drawn in it
            if self.mode == "server":
                super()._init_vllm()
                self._check_server()
                return
            self.enable_sleep_mode = asks_for_sleep(settings, self.model)
            self.llm = vllm_engine.create(
                self.model.name_or_path,
                sequences=self.max_num_seqs,
                share=settings.gpu_memory_utilization,
                sleeps=self.enable_sleep_mode,
                fp8=settings.quantization == "fp8",
                max_tokens=settings.max_model_tokens,
                rank=self.accelerator.process_index,
                world=self.accelerator.num_processes,
            )
            set_seed(trainer.args.seed, device_specific=True)  # making an engine sets torch's seed
            if self.enable_sleep_mode:
                vllm_engine.sleep(self.llm)
            self._llm_weights_sleeping = self.enable_sleep_mode
            self.accelerator.wait_for_everyone()

        def _check_server(self):
            if not self.accelerator.is_main_process:
                return
            has = (self.vllm_client.get_server_info().get("model_config") or {}).get("quantization")
            wants = vllm_engine.FP8 if settings.quantization == "fp8" else None
            if has != wants:
                raise BadInput(
                    f"The rollout server stores its weights as {has or 'full precision'}, but rollout.quantization = {settings.quantization}: "
                    + (f"start it with --quantization {wants}." if wants else "start it without --quantization, or set rollout.quantization = fp8.")
                )

        def _iter_named_params(self):
            if self._dist.is_fsdp:  # sharded: TRL gathers; adapters were refused
                yield from super()._iter_named_params()
            else:
                yield from sync.named_weights(self.accelerator.unwrap_model(self.model), torch.bfloat16)

        def sync_weights(self):
            began = time.perf_counter()
            if self.mode == "server":
                super().sync_weights()
            else:
                if self.enable_sleep_mode and self._llm_weights_sleeping:
                    vllm_engine.wake(self.llm, "weights")
                    self._llm_weights_sleeping = False
                vllm_engine.load(self.llm, self._iter_named_params(), fp8=settings.quantization == "fp8")
            self.seconds["sync"] += time.perf_counter() - began

        def generate(self, prompts, images, num_generations, profiler=None):
            began = time.perf_counter()
            if self.mode == "server":
                answer = super().generate(prompts, images, num_generations, profiler)
            else:
                answer = self._ask(prompts)
            self.seconds["generate"] += time.perf_counter() - began
            return answer

        def _ask(self, prompts):
            if self.enable_sleep_mode:
                vllm_engine.wake(self.llm, "kv_cache")
            with torch.random.fork_rng():  # what the engine draws shifts nothing that training draws
                torch.manual_seed(self._seed())
                ids, logprobs = vllm_engine.generate(
                    self.llm,
                    prompts,
                    temperature=self.temperature,
                    max_tokens=self.max_completion_length,
                    more={"top_p": self.top_p, "top_k": self.top_k, "repetition_penalty": self.repetition_penalty} | self.generation_kwargs,
                )
            if self.enable_sleep_mode:
                vllm_engine.sleep(self.llm)
                self._llm_weights_sleeping = True
            return prompts, ids, [[[value] for value in row] for row in logprobs], None

        def _seed(self) -> int:
            step = trainer.state.global_step
            self._drawn = (step, self._drawn[1] + 1 if self._drawn[0] == step else 0)
            key = (trainer.args.seed, step, self._drawn[1], self.accelerator.process_index)
            return hash(key) % 2**63

        def speed(self, mask) -> dict[str, float]:
            """Seconds since last asked, and the rate of completions that they make, sync included."""
            took, self.seconds = self.seconds, {"sync": 0.0, "generate": 0.0}
            total = sum(took.values()) or float("nan")
            return {
                "sync_s": took["sync"],
                "generate_s": took["generate"],
                "completions_per_s": len(mask) * self.accelerator.num_processes / total,
                "tokens_per_s": mask.sum().item() * self.accelerator.num_processes / total,
            }

    return Generation(
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        mode=settings.mode,
        server_base_url=settings.server,
        server_timeout=settings.server_timeout_s,
        group_port=settings.server_group_port,
        max_num_seqs=trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        logprobs=0,
        generation_kwargs=trainer.args.generation_kwargs,
    )
