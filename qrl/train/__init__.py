"""Train a policy with GRPO or by distillation and merge its adapter: a job in, a full-precision checkpoint or adapter out."""

from qrl.train.job import Job, Trained

__all__ = ["Job", "Trained"]
