"""What can be known of a training before its model and its data are there.

A study whose steps are all finished asks this, too, and nothing else of the trainers. So torch, which they import and
which takes a second, is imported only for settings that need it.
"""

from qrl.errors import Objections
from qrl.recipe import Rollout, Train
from qrl.train import parallel
from qrl.train.job import Machine


def check(settings: Train, sampling: Rollout, machine: Machine) -> None:
    """Check that a machine can train and sample as the recipe says.

    Raises:
        BadInput: all that is wrong: the GPUs are too few or do not divide a step, or nothing here can sample.
    """
    objections = Objections()
    objections.keep(parallel.check, settings, machine.device, machine.gpus)
    if settings.trainer == "verl":
        from qrl.train import verl

        processes = parallel.processes(settings, machine.device, machine.gpus)
        objections.keep(verl.check_gpus, settings, max(machine.processes, processes))
    if sampling.engine == "vllm":
        from qrl.train import rollout

        objections.keep(rollout.check, sampling, machine.device, settings)
    objections.insist()
