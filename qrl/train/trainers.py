"""The trainers: what each one checks before it loads a weight, and how it trains.

A recipe names its trainer by three fields (`name`). Whoever trains looks it up here once, and calls its functions. What
the recipe's settings need of each other is checked before, by `recipe/rules.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from qrl.errors import Objections
from qrl.recipe import Rollout, Train
from qrl.train import distill, grpo, parallel, raft, rollout, sft, verl
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


def check_machine(settings: Train, sampling: Rollout, machine: Machine) -> None:
    """Check what can be known of a training before its model and its data are there.

    Raises:
        BadInput: all that is wrong: the GPUs are too few or do not divide a step, or nothing here can sample.
    """
    objections = Objections()
    objections.keep(parallel.check, settings, machine.device, machine.gpus)
    if settings.trainer == "verl":
        processes = parallel.processes(settings, machine.device, machine.gpus)
        objections.keep(verl.check_gpus, settings, max(machine.processes, processes))
    objections.keep(rollout.check, sampling, machine.device, settings)
    objections.insist()
