"""The grader of answers in `\\boxed{}`, with algebra where needed, and the MATH data set (`dataset.py`)."""

from qrl.tasks.math.grader import grade_many

__all__ = ["grade_many"]
