"""The speed of verdicts on MATH: `python tests/benchmarks/graders_math.py FOLDER`, with MATH-500's test.jsonl in it.

Each gold answer is compared with itself, a neighbour by one, and other spellings of both, so that texts alone decide
about half. Prints verdicts per second through the pool, then in this one process.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl import tasks
from qrl.tasks.math import verdict, worker


def spellings(answer: str) -> list[str]:
    """Return an answer, one with its first number plus one, and both times one plus zero, which need algebra."""
    up = re.sub(r"\d+", lambda number: str(int(number[0]) + 1), answer, count=1)
    return [answer, up, f"({answer})\\cdot 1+0", f"({up})\\cdot 1+0"]


def main(folder: str) -> None:
    answers = [json.loads(line)["answer"] for line in (Path(folder) / "test.jsonl").read_text().splitlines()]
    pairs = [(f"Therefore $\\boxed{{{text}}}$.", answer) for answer in answers for text in spellings(answer)]
    completions, golds = map(list, zip(*pairs, strict=True))
    began = time.perf_counter()
    tasks.grade("math", r"\boxed{\frac{2}{12}}", r"\frac{1}{6}")
    print(f"first verdict that needs a worker: {time.perf_counter() - began:.2f} s")
    hard = [pair for pair in pairs if verdict.by_text(verdict.claim(*pair)) is None]
    easy = [pair for pair in pairs if verdict.by_text(verdict.claim(*pair)) is not None]
    pool = rate(lambda: tasks.grade_many("math", completions, golds), len(pairs))
    counts = f"{len(os.sched_getaffinity(0))} cores, {len(pairs):,} verdicts, {len(hard):,} of them by algebra"
    print(f"{counts}: {pool:,.0f} a second through the pool")
    texts = rate(lambda: tasks.grade_many("math", *map(list, zip(*easy, strict=True))), len(easy))
    print(f"the {len(easy):,} that texts decide: {texts:,.0f} a second, in this process")
    algebra = rate(lambda: tasks.grade_many("math", *map(list, zip(*hard, strict=True))), len(hard))
    alone = rate(lambda: worker.grade([verdict.claim(*pair) for pair in hard], 0), len(hard))
    rates = f"{algebra:,.0f} a second through the pool, {alone:,.0f} in one process; ratio {algebra / alone:.2f}"
    print(f"the {len(hard):,} by algebra: {rates}")


def rate(work, n: int) -> float:
    """Return verdicts per second, the better of two passes."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return n / min(times)


if __name__ == "__main__":
    main(*sys.argv[1:])
