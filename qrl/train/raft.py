"""Rejection sampling: sample completions, keep the right ones, fine-tune on them; the control between SFT and GRPO.

A round is a batch of GRPO's completions and `train.num_iterations` optimizer steps on those that are kept. Sampling,
rewards, processes and resuming are GRPO's, the loss is that of supervised fine-tuning.

Source: RAFT (arXiv 2304.06767), which keeps the best of a group; for rewards of 0 and 1 all right ones are kept, as in
arXiv 2504.11343.
"""

from functools import partial

from qrl import checkpoint, process
from qrl.train import grpo, loop
from qrl.train.job import Job, Trained
from qrl.train.monitor import metrics
from qrl.train.trl.rejection import rejecting_trainer


def run(job: Job) -> Trained:
    """Train on the policy's own right completions, or resume a killed try; `grpo.check` accepts the job."""
    process.hush_transformers()
    return loop.run(make_trainer(job), job, checkpoint.check(job.base), metrics.RAFT)


def make_trainer(job: Job):
    """Return TRL's trainer, which drops completions below the least reward."""
    return grpo.make_trainer(job, metrics.RAFT, partial(rejecting_trainer, least_reward=job.settings.least_kept_reward))
