"""The task math: MATH's problems, and the grader of answers in `\\boxed{}`."""
