"""TRL's GRPO trainer with the loss of supervised fine-tuning, on the completions that earn enough."""

from typing import Any

import torch

_TOLERANCE = 1e-5  # of a reward: TRL sums weighted rewards in fp32


def rejecting_trainer(base: type, least_reward: float) -> type:
    """Return a subclass of TRL's GRPO trainer that fine-tunes on some of its completions.

    Args:
        base: TRL's trainer, or a subclass that samples in another way.
        least_reward: the smallest summed reward of a completion that is trained on.
    """
    from peft import PeftModel
    from trl.trainer.utils import add_fused_lm_head

    class Trainer(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if self.temperature != 1:  # TRL's head has the log-probabilities of sampling, the loss is of the policy
                model: Any = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
                add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            # (completions of all processes,)
            self._summed_rewards = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
            return rewards

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            earns_enough = self._summed_rewards >= least_reward - _TOLERANCE
            own = slice(
                len(inputs) * self.accelerator.process_index, len(inputs) * (self.accelerator.process_index + 1)
            )
            mask = batch["completion_mask"]
            batch["kept"] = earns_enough[own] & mask.any(dim=1)  # train.mask_truncated leaves nothing of some

            kept = self.accelerator.gather(batch["kept"])
            batch["kept_tokens"] = self.accelerator.gather(mask[batch["kept"]].sum()).sum()
            self._metrics["train"]["kept_completions"].append(kept.sum().item())
            kept_questions = kept.view(-1, self.num_generations).any(dim=1).sum()
            self._metrics["train"]["kept_questions"].append(kept_questions.item())
            return batch

        def _compute_loss(self, model, inputs):
            """Return a micro-batch's part of the step's loss: the mean of −log p over all kept tokens."""
            kept = inputs["kept"]
            # Every process makes one pass per micro-batch, so where nothing is kept a row of weight 0 stands in.
            rows = kept if kept.any() else torch.arange(len(kept), device=kept.device) == 0
            completion_ids = inputs["completion_ids"][rows]
            completion_mask = inputs["completion_mask"][rows]
            logprobs, entropies, _ = self._get_per_token_logps_and_entropies(
                model,
                torch.cat([inputs["prompt_ids"][rows], completion_ids], dim=1),
                torch.cat([inputs["prompt_mask"][rows], completion_mask], dim=1),
                completion_ids.size(1),
                compute_entropy=True,
            )

            tokens = torch.stack([(entropies * completion_mask).sum(), completion_mask.sum()])
            entropy_sum, count = self.accelerator.reduce(tokens, reduction="sum")
            self._metrics["train"]["entropy"].append((entropy_sum / count.clamp(min=1)).item())
            # The gradients of processes are averaged, those of micro-batches are added up.
            tokens_per_process = inputs["kept_tokens"].clamp(min=1) / self.accelerator.num_processes
            return -(logprobs * completion_mask * kept[rows, None]).sum() / tokens_per_process

    return Trainer
