"""verl as another trainer of GRPO: the same recipe, questions, prompts and rewards; `train.trainer=verl`."""

from qrl.train.verl.training import check, join, run
from qrl.train.verl.translate import check_gpus

__all__ = ["check", "check_gpus", "join", "run"]
