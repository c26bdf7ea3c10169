"""TRL's GRPO trainer with three changes: groups without a gradient are sampled again, vLLM samples, its gap is logged.

Dynamic sampling has to happen between TRL's sampling and its rewards, for which TRL has no hook: `_generate` is
replaced, and hands TRL the final completions as if they had been sampled at once. The rewards that it needed for its
choice are kept, so that each completion is graded once. The gap between the engine's log-probabilities and the
trainer's is measured after TRL has computed both.
"""

import random
from collections.abc import Iterator

from torch import Tensor

from qrl.formats import groups
from qrl.recipe import Rollout, Train
from qrl.train import rollout
from qrl.train.rollout import engine_gap
from qrl.train.trl import vllm_link

# Positions in the tuple that TRL's `_generate` returns; each holds one value per completion.
_PROMPT_IDS, _COMPLETION_IDS, _COMPLETIONS, _LOGPROBS = 0, 1, 3, 4
_TRAIN = Train()
_PER_COMPLETION = (_PROMPT_IDS, _COMPLETION_IDS, _COMPLETIONS, _LOGPROBS)


def grpo_trainer(settings: Rollout, train: Train = _TRAIN, group_size: int = groups.USUAL) -> type:
    """Return TRL's GRPO trainer, or a subclass that samples with vLLM and logs its gap, or that samples groups again.

    Args:
        settings: who samples.
        train: how often groups with equal rewards are sampled again, and for vLLM the format of training.
        group_size: of that format.

    Raises:
        BadInput: the recipe samples with vLLM, which is not installed.
    """
    rollout.check_installed(settings)
    from trl import GRPOTrainer

    base = _resampling(GRPOTrainer, train.max_resamples) if train.max_resamples else GRPOTrainer
    if settings.engine != rollout.VLLM:
        return base

    class Trainer(vllm_link.sampling_with_vllm(base, settings, train, group_size)):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            engine_logprobs = batch.get("sampling_per_token_logps")
            trainer_logprobs = batch.get("old_per_token_logps")
            if engine_logprobs is None or trainer_logprobs is None:
                return batch
            # Completions that were cut may be masked, and then all of them: there is no gap to measure.
            mask = batch["completion_mask"]
            gather = self.accelerator.gather
            if gather(mask.sum()[None]).any():
                gap = engine_gap.measure(trainer_logprobs, engine_logprobs, mask, gather)
                vllm_link.log_metrics(self, vars(gap))
            return batch

    return Trainer


def _resampling(base: type, max_rounds: int) -> type:
    """Return a trainer that replaces groups with equal rewards, which have no gradient, by groups of new questions.

    Every flat group of a step gets another question, drawn by seed, step and round, so that a resumed training draws
    the same; after `max_rounds` rounds flat groups stay. Lengths and truncation are logged of the first round, which no
    selection has changed, rewards of what is trained on.

    Source: dynamic sampling, section 3.2 of DAPO (arXiv 2503.14476). It samples until the batch is full.
    """

    class Trainer(base):
        def _generate_and_score_completions(self, inputs):
            # TRL calls `_generate` with the prompts alone: it finds the questions here, and leaves the rewards here.
            self._batch_rows = inputs
            self._batch_rewards = None
            return super()._generate_and_score_completions(inputs)

        def _generate(self, prompts):
            batch = list(super()._generate(prompts))
            metrics = self._metrics["train"]
            # What TRL logs of later rounds would be of selected completions: it is put back below.
            first_round = {name: list(values) for name, values in metrics.items() if name.startswith("completions/")}
            rewards = self._graded(range(len(prompts)), prompts, batch)

            seen = {_question(prompt) for prompt in prompts}
            resampled_groups = 0
            for round_number in range(max_rounds):
                flat_groups = self._flat_groups(rewards)
                rows = self._unseen_rows(seen, len(flat_groups), round_number)
                if not rows:
                    break
                replaced = self._replace_questions(flat_groups, rows, prompts)
                completions = super()._generate([prompts[index] for index in replaced])
                _put(completions, replaced, batch)
                rewards[replaced] = self._graded(replaced, prompts, batch)
                seen |= {_question(row["prompt"]) for row in rows}
                resampled_groups += len(rows)

            metrics.update(first_round)
            metrics["resampled_groups"].append(resampled_groups)
            metrics["flat_groups"].append(len(self._flat_groups(rewards)))
            self._batch_rewards = rewards
            return tuple(batch)

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            if self._batch_rewards is not None:
                return self._batch_rewards
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

        def _graded(self, indices, prompts: list, batch: list) -> Tensor:
            """Return the rewards of some of a batch's completions, (completions, reward functions)."""
            return self._calculate_rewards(
                [self._batch_rows[index] for index in indices],
                [prompts[index] for index in indices],
                [batch[_COMPLETIONS][index] for index in indices],
                [batch[_COMPLETION_IDS][index] for index in indices],
            )

        def _flat_groups(self, rewards: Tensor) -> list[int]:
            """Return the groups in which all completions have the same reward."""
            totals = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1).view(-1, self.num_generations)
            return (totals.amax(dim=1) == totals.amin(dim=1)).nonzero().flatten().tolist()

        def _unseen_rows(self, seen: set[str], limit: int, round_number: int) -> list[dict]:
            """Return rows of questions that this step has not seen, at most `limit`."""
            if not limit:
                return []
            rows = [row for row in self.train_dataset if _question(row["prompt"]) not in seen]
            generator = random.Random(f"{self.args.seed} {self.state.global_step} {round_number}")
            return generator.sample(rows, min(limit, len(rows)))

        def _replace_questions(self, flat_groups: list[int], rows: list[dict], prompts: list) -> list[int]:
            """Give groups other questions, in place, and return the indices of their completions.

            TRL reads rows and prompts again after `_generate`.
            """
            replaced: list[int] = []
            for group, row in zip(flat_groups, rows, strict=False):  # fewer rows than groups where questions run out
                for index in range(group * self.num_generations, (group + 1) * self.num_generations):
                    self._batch_rows[index] = row
                    prompts[index] = row["prompt"]
                    replaced.append(index)
            return replaced

    return Trainer


def _put(completions: tuple, indices: list[int], batch: list) -> None:
    """Put what `_generate` returned for some prompts into the batch, in place."""
    for part in _PER_COMPLETION:
        if batch[part] is None:  # log-probabilities, where transformers samples
            continue
        for index, value in zip(indices, completions[part], strict=True):
            batch[part][index] = value


def _question(prompt: list[dict]) -> str:
    return prompt[-1]["content"]


def question_order(questions: int, per_step: int, seed: int) -> Iterator[int]:
    """Yield, without end, the indices of the questions that GRPO's steps draw, `per_step` different ones each."""
    from trl.trainer.utils import RepeatSampler

    sampler = RepeatSampler(range(questions), mini_repeat_count=1, batch_size=per_step, seed=seed)
    while True:  # another order in each epoch
        yield from sampler


def unsharded(trainer):
    """Gather, as a context, the parameters that FSDP wraps in no layer of their own."""
    return trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False)
