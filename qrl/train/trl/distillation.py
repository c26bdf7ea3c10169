"""TRL's distillation trainer with another loss: the divergence over the teacher's likeliest tokens.

TRL's own loss reads the teacher's whole distribution from a model in the same process. Ours needs only the K likeliest
tokens of a position, so the teacher may be in this process, divided over several, or behind a server
(`qrl/train/teacher`). Two methods are replaced: `compute_loss`, to ask the teacher before the student's forward pass,
and `_compute_loss`, to compute the divergence. Batches, accumulation and metrics stay TRL's, and so does sampling
unless vLLM samples.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from qrl.formats import groups
from qrl.recipe import Rollout, Train
from qrl.train import rollout
from qrl.train.teacher import Likeliest, Teacher
from qrl.train.trl import vllm_link


def distillation_trainer(
    divergence: Callable[[Tensor, Likeliest], Tensor],
    teacher: Teacher,
    settings: Rollout,
    train: Train,
    group_size: int = groups.USUAL,
) -> type:
    """Return TRL's distillation trainer with another loss.

    TRL divides the loss by the tokens of all processes, and by their number, since DDP averages gradients.

    Args:
        divergence: (N, V) logits of the student, and the teacher's likeliest tokens → (N,).
        teacher: scores the tokens of a micro-batch.
        settings: who samples.
        train, group_size: the format of training, for vLLM.

    Raises:
        BadInput: the recipe samples with vLLM, which is not installed.
    """
    rollout.check_installed(settings)
    from trl import DistillationTrainer

    base = DistillationTrainer
    if settings.engine == rollout.VLLM:
        base = vllm_link.sampling_with_vllm(DistillationTrainer, settings, train, group_size, logprobs=None)

    class Trainer(base):
        def compute_loss(self, model, inputs, *args, **kwargs):
            ids, mask, valid = _texts(inputs)
            score = functools.partial(_logits, self, ids=ids, mask=mask, valid=valid)
            with self.accelerator.autocast():  # TRL replaces the forward method that accelerate has wrapped in this
                # Not within the student's forward pass: the processes of a sharded teacher wait for one another.
                with torch.no_grad():
                    likeliest = teacher(score, ids, mask, valid)
                return super().compute_loss(model, inputs | {"likeliest": likeliest}, *args, **kwargs)

        def _compute_loss(self, unwrapped_student, inputs, num_items_in_batch):
            ids, mask, valid = _texts(inputs)
            logits = _logits(self, unwrapped_student, ids=ids, mask=mask, valid=valid)
            losses = divergence(logits, inputs["likeliest"])
            tokens = valid.sum()

            probabilities = logits.detach().softmax(-1, dtype=torch.float32)
            entropy = torch.special.entr(probabilities, out=probabilities).sum()  # in place: (N, V) is large
            divisor = tokens.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            return losses.sum() / divisor, entropy, tokens

    return Trainer


def _texts(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a micro-batch's token ids and mask, (B, P + C), and which of its completions' tokens count, (B, C)."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return ids, mask, inputs["completion_mask"].bool()


def _logits(trainer, model, *, ids: Tensor, mask: Tensor, valid: Tensor) -> Tensor:
    """Return a model's logits for the tokens of completions, (N, V)."""
    states = trainer._get_last_hidden_state(model, ids, mask, valid.size(1))
    return model.get_output_embeddings()(states[valid])


def redirect(model, method: Callable, *arguments):
    """Call a method of a model through its forward pass, where FSDP gathers the weights that its parts share."""
    from trl.models.utils import _ForwardRedirection

    return _ForwardRedirection()(model, model, method, *arguments)
