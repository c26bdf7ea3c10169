"""The only file that touches what TRL keeps private; `tests/train/test_trl_private.py` states what it relies on.

TRL's link to vLLM is replaced. Weights are sent out of place (`rollout.sync`), as codes, or as an adapter for a slot.
Completions come as token ids and flat log-probabilities (3.0 s instead of 7.1). A colocated engine can hold FP8 or a
format's codes. The seed of a colocated rollout follows from recipe and step, so that a resumed run samples the same.
"""

import functools
import random
import time
from collections.abc import Callable, Iterator

import torch

from qrl.formats import groups
from qrl.recipe import Rollout
from qrl.train import rollout as sampling
from qrl.train.rollout import checks, codes, engine_gap, slot, sync, vllm_engine
from qrl.train.teacher import Likeliest, Teacher

_TRANSFORMERS = Rollout()


def unsharded(trainer):
    """Gather, as a context, the parameters that FSDP wraps in no layer of their own."""
    return trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False)


def grpo_trainer(settings: Rollout, resamples: int = 0, qat: str = "none", group_size: int = groups.USUAL) -> type:
    """Return TRL's GRPO trainer, or a subclass that samples with vLLM and logs its gap, or that samples groups again.

    Args:
        resamples: rounds of `_resampling`, at most.
        qat, group_size: the format of training, for vLLM.

    Raises:
        BadInput: the recipe samples with vLLM, which is not installed.
    """
    sampling.check_installed(settings)
    from trl import GRPOTrainer

    base = _resampling(GRPOTrainer, resamples) if resamples else GRPOTrainer
    if settings.engine != sampling.VLLM:
        return base

    class Trainer(_sampling_with_vllm(base, settings, qat, group_size)):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            engine, own = batch.get("sampling_per_token_logps"), batch.get("old_per_token_logps")
            mask, gather = batch["completion_mask"], self.accelerator.gather
            # Completions that were cut may be masked, and then all of them.
            if engine is not None and own is not None and gather(mask.sum()[None]).any():
                _log(self, vars(engine_gap.measure(own, engine, mask, gather)))
            return batch

    return Trainer


def _sampling_with_vllm(base: type, settings: Rollout, qat: str, group_size: int, logprobs: int | None = 0) -> type:
    """Return a trainer of TRL's that samples through `link`, and logs its speed."""

    class Trainer(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.use_vllm, self.vllm_mode = True, settings.mode
            self.args.use_vllm, self.args.vllm_mode = True, settings.mode  # for the run's record
            self.vllm_generation = link(self, settings, qat, group_size, logprobs)
            self._last_loaded_step = -1

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            _log(self, self.vllm_generation.speed())
            return batch

    return Trainer


def _log(trainer, metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        trainer._metrics["train" if trainer.model.training else "eval"][sampling.PREFIX + name].append(value)


def _resampling(base: type, most: int) -> type:
    """Return a trainer that replaces groups with equal rewards, which have no gradient, by groups of new questions.

    Every group of a step that is flat gets another question, drawn by seed, step and round, so that a resumed training
    draws the same; after `most` rounds flat groups stay. Lengths and truncation are logged of the first round, which
    no selection has changed, rewards of what is trained on.

    Source: dynamic sampling, section 3.2 of DAPO (arXiv 2503.14476). It samples until the batch is full.
    """
    per_completion = (0, 1, 3, 4)  # of what TRL's `_generate` returns: prompt ids, ids, texts, log-probabilities

    class Trainer(base):
        def _generate_and_score_completions(self, inputs):
            self._asked, self._scores = inputs, None
            return super()._generate_and_score_completions(inputs)

        def _generate(self, prompts):
            made, metrics = list(super()._generate(prompts)), self._metrics["train"]
            first = {name: list(values) for name, values in metrics.items() if name.startswith("completions/")}
            scores = self._scored(range(len(prompts)), prompts, made)
            seen, count = {_text(prompt) for prompt in prompts}, 0
            for number in range(most):
                flat = self._flat(scores)
                fresh = self._fresh(seen, len(flat), number)
                if not fresh:
                    break
                places = []
                for group, row in zip(flat, fresh, strict=False):
                    places += range(group * self.num_generations, (group + 1) * self.num_generations)
                    for place in places[-self.num_generations :]:
                        self._asked[place], prompts[place] = row, row["prompt"]  # TRL reads both after this
                again = super()._generate([prompts[place] for place in places])
                for part in per_completion:
                    if made[part] is not None:
                        for place, value in zip(places, again[part], strict=True):
                            made[part][place] = value
                scores[places] = self._scored(places, prompts, made)
                seen |= {_text(row["prompt"]) for row in fresh}
                count += len(fresh)
            metrics.update(first)
            metrics["resampled_groups"].append(count)
            metrics["flat_groups"].append(len(self._flat(scores)))
            self._scores = scores
            return tuple(made)

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            if self._scores is not None:
                return self._scores
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

        def _scored(self, places, prompts, made):
            parts = (self._asked, prompts, made[3], made[1])
            return self._calculate_rewards(*([part[place] for place in places] for part in parts))

        def _flat(self, scores) -> list[int]:
            """Return the groups whose completions earned the same."""
            rewards = (scores * self.reward_weights.to(scores.device)).nansum(dim=1).view(-1, self.num_generations)
            return (rewards.amax(dim=1) == rewards.amin(dim=1)).nonzero().flatten().tolist()

        def _fresh(self, seen: set[str], count: int, number: int) -> list[dict]:
            """Return rows of questions that this step has not seen, `count` at most."""
            rows = [row for row in self.train_dataset if _text(row["prompt"]) not in seen] if count else []
            draw = random.Random(f"{self.args.seed} {self.state.global_step} {number}")
            return draw.sample(rows, min(count, len(rows)))

    return Trainer


def _text(prompt: list[dict]) -> str:
    return prompt[-1]["content"]


def link(trainer, settings: Rollout, qat: str = "none", group_size: int = groups.USUAL, logprobs: int | None = 0):
    """Return TRL's link to vLLM with our engine, weights and sampling; TRL's own client queries a server.

    Args:
        trainer: TRL's.
        settings: who samples.
        qat, group_size: the format of training.
        logprobs: 0 returns those of sampled tokens, None none.
    """
    from trl.generation.vllm_generation import VLLMGeneration

    own = {"trainer": trainer, "settings": settings, "qat": qat, "group_size": group_size}
    cls = type("Generation", (Link, VLLMGeneration), own)
    same = ("model", "accelerator", "processing_class", "max_completion_length", "temperature")
    same += ("repetition_penalty", "top_p", "top_k", "min_p")  # these arguments are named as the trainer's attributes
    return cls(
        **{name: getattr(trainer, name) for name in same},
        mode=settings.mode,
        server_base_url=settings.server,
        server_timeout=settings.server_timeout_s,
        group_port=settings.server_group_port,
        max_num_seqs=trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps,
        logprobs=logprobs,
        generation_kwargs=trainer.args.generation_kwargs,
    )


class Link:
    """The replaced parts of TRL's `VLLMGeneration`; `link` puts them before that class."""

    trainer = None  # TRL's
    settings: Rollout = _TRANSFORMERS
    qat, group_size = "none", groups.USUAL
    _slot = _base_sent = False  # whether the adapter is sent alone, and the base was sent before

    def _init_vllm(self):
        from accelerate.utils import set_seed

        self._reset()
        self._drawn = (-1, 0)  # a step, and the number of its latest rollout
        self._slot = self.settings.adapter == slot.NAME
        if self.mode == "server":
            super()._init_vllm()
            return
        self.enable_sleep_mode = vllm_engine.sleeps(self.settings, self.model)
        size = {"sequences": self.max_num_seqs, "sleeps": self.enable_sleep_mode}
        place = {"rank": self.accelerator.process_index, "world": self.accelerator.num_processes}
        options = slot.options(self._model()) if self._slot else None
        how = {
            "qat": self.qat,
            "group_size": self.group_size,
            "slot": options,
            "whole": bool(checks.redistributed(self)),
        }
        self.llm = vllm_engine.create(self.model.name_or_path, self.settings, **how, **size, **place)
        set_seed(self.trainer.args.seed, device_specific=True)  # making an engine sets torch's seed
        if self.enable_sleep_mode:
            vllm_engine.sleep(self.llm, keeps=self._slot)
        self._llm_weights_sleeping = self.enable_sleep_mode
        self.accelerator.wait_for_everyone()

    def _iter_named_params(self):
        if self._dist.is_fsdp and self.qat == "none":  # TRL gathers the shards; adapters were refused before
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
        began = time.perf_counter()
        if self.mode == "server":
            super().sync_weights()
        else:
            if self.enable_sleep_mode and self._llm_weights_sleeping:
                vllm_engine.wake(self.llm, "weights")
                self._llm_weights_sleeping = False
            if not self._base_sent:  # with a slot only once: the engine keeps it
                vllm_engine.load(self.llm, self._iter_named_params(), reloads=self.settings.quantization != "none")
                self._base_sent = self._slot
            if self._slot:
                slot.load(self.llm, sync.named_adapter(self._model()))
        self.seconds["sync"] += time.perf_counter() - began

    def generate(self, prompts, images, num_generations, profiler=None):
        """Return prompts, completions and log-probabilities in TRL's own form; prompts are token ids."""
        if self.mode == "colocate" and self._llm_weights_sleeping:
            self.sync_weights()  # asleep since an earlier rollout of this step
        began = time.perf_counter()
        if self.mode == "server":
            answer = super().generate(prompts, images, num_generations, profiler)
        else:
            answer = self._sample(prompts)
        self.seconds["generate"] += time.perf_counter() - began
        self.made["completions"] += len(answer[1])
        self.made["tokens"] += sum(map(len, answer[1]))
        return answer

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the likeliest completion of each prompt, as token ids, from training's present weights.

        What rollouts draw afterwards stays the same, and so do their times.
        """
        plain = {"temperature": 0.0, "repetition_penalty": 1.0, "generation_kwargs": {}, "logprobs": None}
        kept = {name: getattr(self, name) for name in (*plain, "_drawn")} | {"seconds": dict(self.seconds)}
        vars(self).update(plain)
        try:
            self.sync_weights()
            return (super().generate(prompts, None, 1) if self.mode == "server" else self._sample(prompts))[1]
        finally:
            vars(self).update(kept)

    def _sample(self, prompts):
        if self.enable_sleep_mode:
            vllm_engine.wake(self.llm, "kv_cache")
        options = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p or 0.0}
        options |= {"repetition_penalty": self.repetition_penalty, "logprobs": self.logprobs}
        limits = {"temperature": self.temperature, "max_tokens": self.max_completion_length}
        with vllm_engine.seeded(self._seed()):
            ids, logprobs = vllm_engine.generate(
                self.llm,
                prompts,
                **limits,
                more=options | self.generation_kwargs,
                adapter=slot.request() if self._slot else None,
            )
        if self.enable_sleep_mode:
            vllm_engine.sleep(self.llm, keeps=self._slot)
            self._llm_weights_sleeping = True
        return prompts, ids, [[[value] for value in row] for row in logprobs], None

    def _seed(self) -> int:
        step = self.trainer.state.global_step
        self._drawn = (step, self._drawn[1] + 1 if self._drawn[0] == step else 0)
        key = (self.trainer.args.seed, step, self._drawn[1], self.accelerator.process_index)
        return hash(key) % 2**63

    def _reset(self):
        self.seconds = {"sync": 0.0, "generate": 0.0}
        self.made = {"completions": 0, "tokens": 0}

    def speed(self) -> dict[str, float]:
        """Return the seconds since the last call, and the throughput of what was sampled, sync included."""
        seconds, made = self.seconds, self.made
        self._reset()
        total = sum(seconds.values()) or float("nan")
        rates = {f"{name}_per_s": count * self.accelerator.num_processes / total for name, count in made.items()}
        return {"sync_s": seconds["sync"], "generate_s": seconds["generate"]} | rates


def _texts(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a micro-batch's token ids and mask, (B, P + C), and which of its completions' tokens count, (B, C)."""
    ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    return ids, mask, inputs["completion_mask"].bool()


def _logits(trainer, model, *, ids: torch.Tensor, mask: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return a model's logits for the tokens of completions, (N, V)."""
    states = trainer._get_last_hidden_state(model, ids, mask, valid.size(1))
    return model.get_output_embeddings()(states[valid])


def redirect(model, method: Callable, *arguments):
    """Call a method of a model through its forward pass, where FSDP gathers the weights that its parts share."""
    from trl.models.utils import _ForwardRedirection

    return _ForwardRedirection()(model, model, method, *arguments)


def question_order(questions: int, of_a_step: int, seed: int) -> Iterator[int]:
    """Yield, without end, the places of the questions that GRPO's steps draw, `of_a_step` different ones each."""
    from trl.trainer.utils import RepeatSampler

    sampler = RepeatSampler(range(questions), mini_repeat_count=1, batch_size=of_a_step, seed=seed)
    while True:  # each time in another order
        yield from sampler


def distillation_trainer(
    divergence: Callable[[torch.Tensor, Likeliest], torch.Tensor],
    teacher: Teacher,
    settings: Rollout,
    qat: str,
    group_size: int = groups.USUAL,
) -> type:
    """Return TRL's distillation trainer with another loss; bookkeeping stays TRL's, and sampling unless vLLM samples.

    TRL divides the loss by the tokens of all processes, and by their number, since DDP averages gradients.

    Args:
        divergence: (N, V) logits of the student, and the teacher's likeliest tokens → (N,).
        teacher: scores the tokens of a micro-batch.
        settings: who samples.
        qat, group_size: the format of training, for vLLM.

    Raises:
        BadInput: the recipe samples with vLLM, which is not installed.
    """
    sampling.check_installed(settings)
    from trl import DistillationTrainer

    base = DistillationTrainer
    if settings.engine == sampling.VLLM:
        base = _sampling_with_vllm(DistillationTrainer, settings, qat, group_size, logprobs=None)

    class Trainer(base):
        def compute_loss(self, model, inputs, *rest, **named):
            ids, mask, valid = _texts(inputs)
            score = functools.partial(_logits, self, ids=ids, mask=mask, valid=valid)
            with self.accelerator.autocast():  # TRL replaces the forward method that accelerate has wrapped in this
                # Not within the student's forward pass: the processes of a sharded teacher wait for one another.
                with torch.no_grad():
                    likeliest = teacher(score, ids, mask, valid)
                return super().compute_loss(model, inputs | {"likeliest": likeliest}, *rest, **named)

        def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
            ids, mask, valid = _texts(inputs)
            student = _logits(self, unwrapped_student, ids=ids, mask=mask, valid=valid)
            losses = divergence(student, inputs["likeliest"])
            count = valid.sum()
            shares = student.detach().softmax(-1, dtype=torch.float32)
            entropy = torch.special.entr(shares, out=shares).sum()
            divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            return losses.sum() / divisor, entropy, count

    return Trainer
