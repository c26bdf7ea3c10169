"""Train a policy with GRPO or by distillation, and merge its adapter: a job in, full-precision weights out."""

from qrl.train.job import Job, Machine, Trained

__all__ = ["Job", "Machine", "Trained"]
