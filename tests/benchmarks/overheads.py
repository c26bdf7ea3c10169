"""Measure what qrl adds to the work itself: starting, registering, launching.

python tests/benchmarks/overheads.py            # --help against `python -c pass`; bytes written to log a checkpoint
python tests/benchmarks/overheads.py RUN_ID     # a study's time outside of its steps' own work
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

ROUNDS = 9


def seconds(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=Path(__file__).parents[2])
    return time.perf_counter() - began


def starting() -> None:
    """Time both commands in turn, so that a slow phase of the machine slows both."""
    for words in (("--help",), ("train", "--help")):
        rows = [(seconds("-m", "qrl", *words), seconds("-c", "pass")) for _ in range(ROUNDS + 1)][1:]
        ours, bare = (statistics.median(column) for column in zip(*rows, strict=True))
        told = f"{ours:.3f} s (median of {ROUNDS}); python -c pass {bare:.3f} s; ratio"
        print(f"python -m qrl {' '.join(words)}   {told} {statistics.median(a / b for a, b in rows):.1f}")


def registering() -> None:
    """Count the bytes that logging the shipped model writes; hard links write none."""
    import shutil

    import mlflow

    from qrl import checkpoint, tiny
    from qrl.tracking import models, runs, store

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        store.prepare()
        own = Path(folder, "own")
        shutil.copytree(tiny.PATH, own)
        size = sum(file.stat().st_size for file in own.iterdir())
        there = {file.stat().st_ino for file in own.iterdir()}
        began = time.perf_counter()
        with runs.step("benchmark"):
            facts = {"variant": "base", "scheme": "full", "task": "arithmetic"}
            models.log_checkpoint(own, name="base-full", digest=checkpoint.digest(own), move=True, **facts)
        took = time.perf_counter() - began
        stored = {
            file.stat().st_ino: file.stat().st_size for file in Path(folder, "mlruns").rglob("*") if file.is_file()
        }
        new = sum(bytes_ for inode, bytes_ in stored.items() if inode not in there)
        mlflow.set_tracking_uri(None)
    print(
        f"logging a checkpoint   of {size:,} bytes writes {new:,} new ones beside its links: with them "
        f"{1 + new / size:.3f} times its size; {took:.1f} s"
    )


def launching(run_id: str) -> None:
    """Print a study's wall time, and the part that its steps do not account for."""
    import mlflow

    from qrl.tracking import store

    store.prepare()
    client = mlflow.MlflowClient()
    study = client.get_run(run_id)
    below = client.search_runs([study.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}'")
    work = sum(run.data.metrics["step/seconds"] for run in below)
    startup = sum(run.data.metrics["step/startup_s"] for run in below)
    whole = study.data.metrics["study/seconds"]
    print(
        f"study {run_id[:8]}         {whole:.1f} s in {len(below)} steps: work {work:.1f} s, interpreters and imports "
        f"{startup:.1f} s, launching and records {whole - work - startup:.1f} s"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        launching(sys.argv[1])
    else:
        starting()
        registering()
