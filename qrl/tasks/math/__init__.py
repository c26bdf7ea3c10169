"""The MATH data set (`dataset.py`) and the grader of answers in `\\boxed{}`.

Most answers are graded by comparing texts (`latex.py`), the rest by algebra in worker processes (`pool.py`).
"""
