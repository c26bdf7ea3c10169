"""The trainers: what each one checks before it loads a weight, and how it trains.

A recipe names its trainer by three fields (`name`). Whoever trains looks it up here once, and calls its functions. What
the recipe's settings need of each other is checked before, by `recipe/rules.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from qrl.recipe import Train
from qrl.train import distill, grpo, raft, sft, verl
from qrl.train.job import Job, Machine, Trained


@dataclass(frozen=True)
class Trainer:
    """What can be done with a job."""

    check: Callable[[Job, Machine], None]  # raises BadInput for what machine, model or data do not allow
    run: Callable[[Job], Trained]  # trains a job that was checked, or resumes it
    join: Callable[[Job], object]  # what a process does that trains with the first one, but is not it


TRAINERS = {
    "grpo": Trainer(grpo.check, grpo.run, join=grpo.run),
    "sft": Trainer(sft.check, sft.run, join=sft.run),
    "raft": Trainer(grpo.check, raft.run, join=raft.run),
    "distill": Trainer(distill.check, distill.run, join=distill.run),
    "verl": Trainer(verl.check, verl.run, join=verl.join),
}


def name(settings: Train) -> str:
    """Return the name of the trainer that a recipe's settings choose."""
    if settings.teacher:
        return "distill"
    if settings.algorithm != "grpo":
        return settings.algorithm
    return "verl" if settings.trainer == "verl" else "grpo"
