"""TRL's link to vLLM, with our engine, our weights and our random numbers.

A trainer of TRL's samples through one object, `VLLMGeneration`, which syncs the weights and generates. `Link` replaces
five of its methods, for four reasons:

1. Weights are sent out of place (`rollout.sync`), as a format's codes, or as an adapter for a slot. TRL merges the
   adapter into the base in place, and the base drifts.
2. Completions come as token ids with flat log-probabilities: 3.0 s instead of 7.1 for a rollout.
3. A colocated engine can hold FP8 or a format's codes, and may be put to sleep between rollouts.
4. The seed of a colocated rollout follows from recipe and step, so that a resumed run samples the same.

A server is still queried by TRL's own client: there only the weights that are sent are ours.
"""

import time

import torch

from qrl.formats import groups
from qrl.recipe import Rollout, Train
from qrl.recipe.base import compiles
from qrl.recipe.training import redistributed
from qrl.train import rollout
from qrl.train.rollout import codes, slot, sync, vllm_engine

_TRANSFORMERS = Rollout()
_TRAIN = Train()


def sampling_with_vllm(base: type, settings: Rollout, train: Train, group_size: int, logprobs: int | None = 0) -> type:
    """Return a trainer of TRL's that samples through `link`, and logs its speed."""

    class Trainer(base):
        def __init__(self, *args, **kwargs):
            # TRL would start an engine of its own, so `use_vllm` is set only afterwards.
            super().__init__(*args, **kwargs)
            self.use_vllm = True
            self.vllm_mode = settings.mode
            self.args.use_vllm = True  # for the run's record
            self.args.vllm_mode = settings.mode
            self.vllm_generation = link(self, settings, train, group_size, logprobs)
            self._last_loaded_step = -1

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            log_metrics(self, self.vllm_generation.speed())
            return batch

    return Trainer


def log_metrics(trainer, metrics: dict[str, float]) -> None:
    """Add metrics of a rollout to what TRL logs at the end of the step."""
    mode = "train" if trainer.model.training else "eval"
    for name, value in metrics.items():
        trainer._metrics[mode][rollout.PREFIX + name].append(value)


def link(trainer, settings: Rollout, train: Train = _TRAIN, group_size: int = groups.USUAL, logprobs: int | None = 0):
    """Return TRL's link to vLLM with our engine, weights and sampling; TRL's own client queries a server.

    Args:
        trainer: TRL's.
        settings: who samples.
        train, group_size: the format of training.
        logprobs: 0 returns those of sampled tokens, None none.
    """
    from trl.generation.vllm_generation import VLLMGeneration

    class Generation(Link, VLLMGeneration):
        """TRL's class behind ours."""

    # TRL's constructor calls `_init_vllm`, which reads these four, so they must be there before it runs.
    Generation.trainer = trainer
    Generation.settings = settings
    Generation.train = train
    Generation.group_size = group_size
    return Generation(
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        max_completion_length=trainer.max_completion_length,
        temperature=trainer.temperature,
        repetition_penalty=trainer.repetition_penalty,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        mode=settings.mode,
        server_base_url=settings.server,
        server_timeout=settings.server_timeout_s,
        group_port=settings.server_group_port,
        max_num_seqs=trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps,
        logprobs=logprobs,
        generation_kwargs={"stop_token_ids": trainer.eos_token_ids, **(trainer.args.generation_kwargs or {})},
    )


class Link:
    """The replaced parts of TRL's `VLLMGeneration`; `link` puts them before that class."""

    trainer = None  # TRL's
    settings: Rollout = _TRANSFORMERS
    train: Train = _TRAIN
    group_size: int = groups.USUAL
    _slot: bool = False  # whether the adapter is sent alone, into a slot of the engine
    _base_sent: bool = False  # whether the engine has the base of that adapter

    def _init_vllm(self):
        from accelerate.utils import set_seed

        self._reset()
        self._latest_rollout = (-1, 0)  # its step, and its number within the step
        self._slot = self.settings.adapter == slot.NAME
        if self.mode == "server":
            super()._init_vllm()
            return

        self.enable_sleep_mode = vllm_engine.sleeps(self.settings, self.model)
        self.llm = vllm_engine.create(
            self.model.name_or_path,
            self.settings,
            sequences=self.max_num_seqs,
            sleeps=self.enable_sleep_mode,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            qat=self.train.qat,
            group_size=self.group_size,
            terms=self.train.qat_layers,
            slot=slot.options(self._model()) if self._slot else None,
            raw_logprobs=bool(redistributed(self)),
            compiled=compiles(self.settings.compile, self.train.most_tokens),
        )
        set_seed(self.trainer.args.seed, device_specific=True)  # making an engine sets torch's seed
        if self.enable_sleep_mode:
            vllm_engine.sleep(self.llm, keeps=self._slot)
        self._llm_weights_sleeping = self.enable_sleep_mode
        self.accelerator.wait_for_everyone()

    def _iter_named_params(self):
        if self._dist.is_fsdp and self.train.qat == "none":  # TRL gathers the shards; adapters were refused before
            yield from super()._iter_named_params()
        elif self.settings.quantization == codes.NAME:
            yield from codes.named_codes(self._model(), torch.bfloat16)
        else:
            yield from sync.named_scales(self._model())
            yield from sync.named_weights(self._model(), torch.bfloat16, adapters=not self._slot)

    def _model(self):
        return self.accelerator.unwrap_model(self.model)

    def sync_weights(self):
        """Give the engine the present weights of training."""
        start = time.perf_counter()
        if self.mode == "server":
            super().sync_weights()
        else:
            self._sync_colocated()
        self.seconds["sync"] += time.perf_counter() - start

    def _sync_colocated(self):
        if self.enable_sleep_mode and self._llm_weights_sleeping:
            vllm_engine.wake(self.llm, "weights")
            self._llm_weights_sleeping = False
        if not self._base_sent:
            vllm_engine.load(self.llm, self._iter_named_params(), reloads=self.settings.quantization != "none")
            self._base_sent = self._slot  # without a slot all weights are sent again at the next sync
        if self._slot:
            slot.load(self.llm, sync.named_adapter(self._model()))

    def generate(self, prompts, images, num_generations, profiler=None):
        """Return prompts, completions and log-probabilities in TRL's own form; prompts are token ids."""
        if self.mode == "colocate" and self._llm_weights_sleeping:
            self.sync_weights()  # asleep since an earlier rollout of this step
        start = time.perf_counter()
        if self.mode == "server":
            answer = super().generate(prompts, images, num_generations, profiler)
        else:
            answer = self._sample(prompts)
        self.seconds["generate"] += time.perf_counter() - start
        completions = answer[1]
        self.counts["completions"] += len(completions)
        self.counts["tokens"] += sum(map(len, completions))
        return answer

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the likeliest completion of each prompt, as token ids, from training's present weights.

        What rollouts draw afterwards stays the same, and so do their times.
        """
        # TRL's client reads its settings from the link, so they are changed for this call and restored after it.
        greedy_settings = {"temperature": 0.0, "repetition_penalty": 1.0, "logprobs": None}
        greedy_settings["generation_kwargs"] = {"stop_token_ids": self.trainer.eos_token_ids}
        state = {name: getattr(self, name) for name in (*greedy_settings, "_latest_rollout")}
        state["seconds"] = dict(self.seconds)
        vars(self).update(greedy_settings)
        try:
            self.sync_weights()
            if self.mode == "server":
                answer = super().generate(prompts, None, 1)
            else:
                answer = self._sample(prompts)
        finally:
            vars(self).update(state)
        return answer[1]

    def _sample(self, prompts):
        if self.enable_sleep_mode:
            vllm_engine.wake(self.llm, "kv_cache")
        sampling = {
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "logprobs": self.logprobs,
        }
        with vllm_engine.seeded(self._next_seed()):
            ids, logprobs = vllm_engine.generate(
                self.llm,
                prompts,
                temperature=self.temperature,
                max_tokens=self.max_completion_length,
                more=sampling | self.generation_kwargs,
                adapter=slot.request() if self._slot else None,
            )
        if self.enable_sleep_mode:
            vllm_engine.sleep(self.llm, keeps=self._slot)
            self._llm_weights_sleeping = True
        # TRL expects a list of candidates for each token: here the sampled one alone.
        candidates = [[[logprob] for logprob in completion] for completion in logprobs]
        return prompts, ids, candidates, None

    def _next_seed(self) -> int:
        """Count this rollout, and return its seed: another one for each rollout of a step, and for each process."""
        step = self.trainer.state.global_step
        latest_step, latest_number = self._latest_rollout
        number = latest_number + 1 if step == latest_step else 0
        self._latest_rollout = (step, number)
        return hash((self.trainer.args.seed, step, number, self.accelerator.process_index)) % 2**63

    def _reset(self):
        self.seconds = {"sync": 0.0, "generate": 0.0}
        self.counts = {"completions": 0, "tokens": 0}

    def speed(self) -> dict[str, float]:
        """Return the seconds since the last call, and the throughput of what was sampled, sync included."""
        seconds = self.seconds
        counts = self.counts
        self._reset()
        total = sum(seconds.values()) or float("nan")
        rates = {f"{name}_per_s": count * self.accelerator.num_processes / total for name, count in counts.items()}
        return {"sync_s": seconds["sync"], "generate_s": seconds["generate"]} | rates
