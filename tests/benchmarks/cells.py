"""Cells of qrl-tiny answered by one process with all threads, or by several with one thread each: wall and CPU time.

`python -m tests.benchmarks.cells --processes 2 --cells 2 --n 768` on a CPU, alternating with `--processes 1`.
"""

import resource
import time
from functools import partial

import click

from qrl import checkpoint, process, recipe, tasks, tiny
from qrl.steps import answers, evaluate


@click.command(help=__doc__.splitlines()[0])
@click.option("--processes", type=int, default=2)
@click.option("--cells", type=int, default=2)
@click.option("--n", type=int, default=768, help="Questions a cell.")
def main(processes: int, cells: int, n: int) -> None:
    process.prepare_process()
    settings = recipe.load("tiny")
    weights = checkpoint.check(tiny.PATH)
    stored = ("qrl-tiny", weights, weights.digest)
    questions = tasks.load("arithmetic", "heldout", n, 0)
    cell = evaluate.Evaluation(settings, "base", "full", *stored, questions[:2], "cpu")
    answer = partial(evaluate._ask, evaluate.cells.Engines())
    answer(cell, lambda count: None)  # imports what every process uses
    asked = [evaluate.Evaluation(settings, f"v{i}", "full", *stored, questions, "cpu") for i in range(cells)]
    began, used = time.perf_counter(), _cpu()
    with answers.in_processes(answer, asked, processes) as ask:
        digests = {ask(each, lambda count: None).receipt["completions"] for each in asked}
    wall, cpu = time.perf_counter() - began, _cpu() - used
    print(f"{processes} processes, {cells} cells, n = {n}: wall {wall:.1f} s, CPU {cpu:.1f} s, {digests.pop()[:12]}")
    assert not digests  # the same answers everywhere


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()
