"""TRL's trainer and vLLM: what is asked of the engine, when it gets weights, and when it sleeps.

What TRL's own link lacks, and why this replaces it: weights are sent out of place (`sync`); completions come as token ids and flat
log-probabilities, since TRL decodes them itself (asking for text and an object a token took 7.1 s where this takes 3.0); a
colocated engine can store its weights in FP8; each rollout's seed comes from recipe and step, so that a resumed run asks with the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from qrl.errors import BadInput
from qrl.recipe import Rollout
from qrl.train.rollout import sync, vllm_engine

_ROOM = 0.5  # share of the card for masters, gradients, optimizer and an awake engine; the rest is activations'


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


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Lets an engine draw from a seed of its own, and training go on as if it had drawn nothing.

    On a CPU vLLM draws tokens from torch's random numbers; on a GPU it may give each completion a seed from numpy's.
    """
    import numpy
    import torch

    state = numpy.random.get_state()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            numpy.random.set_state(state)


class Asking:
    """What replaces parts of TRL's link: put before its class by `link`, which says whose rollouts and how."""

    trainer = None  # TRL's
    settings: Rollout

    def _init_vllm(self):
        from accelerate.utils import set_seed

        self.seconds = {"sync": 0.0, "generate": 0.0}
        self._drawn = (-1, 0)  # step, and rollouts drawn in it
        if self.mode == "server":
            super()._init_vllm()
            if self.accelerator.is_main_process:
                check_server(self.vllm_client.get_server_info(), self.settings)
            return
        self.enable_sleep_mode = asks_for_sleep(self.settings, self.model)
        self.llm = vllm_engine.create(
            self.model.name_or_path,
            sequences=self.max_num_seqs,
            share=self.settings.gpu_memory_utilization,
            sleeps=self.enable_sleep_mode,
            fp8=self._fp8,
            kv_cache=self.settings.kv_cache,
            max_tokens=self.settings.max_model_tokens,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
        )
        set_seed(self.trainer.args.seed, device_specific=True)  # making an engine sets torch's seed
        if self.enable_sleep_mode:
            vllm_engine.sleep(self.llm)
        self._llm_weights_sleeping = self.enable_sleep_mode
        self.accelerator.wait_for_everyone()

    @property
    def _fp8(self) -> bool:
        return self.settings.quantization == "fp8"

    def _iter_named_params(self):
        import torch

        if self._dist.is_fsdp:  # sharded: TRL gathers; adapters were refused
            yield from super()._iter_named_params()
        else:
            yield from sync.named_weights(self.accelerator.unwrap_model(self.model), torch.bfloat16)

    def sync_weights(self):
        """Gives the engine the weights as training has them now."""
        began = time.perf_counter()
        if self.mode == "server":
            super().sync_weights()
        else:
            if self.enable_sleep_mode and self._llm_weights_sleeping:
                vllm_engine.wake(self.llm, "weights")
                self._llm_weights_sleeping = False
            vllm_engine.load(self.llm, self._iter_named_params(), fp8=self._fp8)
        self.seconds["sync"] += time.perf_counter() - began

    def generate(self, prompts, images, num_generations, profiler=None):
        """As TRL calls it: prompts as token ids; completions and log-probabilities as it takes them."""
        if self.mode == "colocate" and self._llm_weights_sleeping:
            self.sync_weights()  # asleep since an earlier rollout of this step
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
        options = {"top_p": self.top_p, "top_k": self.top_k, "repetition_penalty": self.repetition_penalty}
        with seeded(self._seed()):
            ids, logprobs = vllm_engine.generate(
                self.llm,
                prompts,
                temperature=self.temperature,
                max_tokens=self.max_completion_length,
                more=options | self.generation_kwargs,
            )
        if self.enable_sleep_mode:
            vllm_engine.sleep(self.llm)
            self._llm_weights_sleeping = True
        return prompts, ids, [[[value] for value in row] for row in logprobs], None

    def _seed(self) -> int:
        step = self.trainer.state.global_step
        self._drawn = (step, self._drawn[1] + 1 if self._drawn[0] == step else 0)
        key = (self.trainer.args.seed, step, self._drawn[1], self.accelerator.process_index)
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


def check_server(info: dict, settings: Rollout) -> None:
    """Refuses a rollout server that stores its weights, or its keys and values, in another way than the recipe says.

    Args:
        info: the server's own configuration, as its `/server_info` gives it.
    """
    stored = (info.get("model_config") or {}).get("quantization"), (info.get("cache_config") or {}).get("cache_dtype")
    options = {"quantization": ("weights", vllm_engine.FP8), "kv_cache": ("keys and values", "fp8")}
    for (key, (what, name)), has in zip(options.items(), stored, strict=True):
        asked, option = getattr(settings, key), f"--{key.replace('kv_cache', 'kv-cache-dtype')}"
        if (asked == "fp8") != (has not in (None, "auto", "bfloat16")):
            raise BadInput(
                f"The rollout server stores its {what} as {has or 'full precision'}, but rollout.{key} = {asked}: "
                f"start it {f'with {option} {name}' if asked == 'fp8' else f'without {option}'}."
            )


def link(trainer, settings: Rollout):
    """TRL's link to vLLM, with the engine, the weights and the asking replaced; a server is asked as TRL does."""
    from trl.generation.vllm_generation import VLLMGeneration

    made = type("Generation", (Asking, VLLMGeneration), {"trainer": trainer, "settings": settings})
    return made(
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
