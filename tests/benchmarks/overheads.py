"""Measure what qrl adds to the work itself: starting, ending, keys, registering, launching.

python tests/benchmarks/overheads.py            # all but the next line's
python tests/benchmarks/overheads.py RUN_ID     # a study's time outside of its steps' own work
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

ROUNDS = 9
STEP = """
import sys, time
from qrl import process
if sys.argv[1] == "qrl":
    process.prepare_imports()
import mlflow, torch, transformers.modeling_utils, trl.trainer.grpo_trainer
print(time.time())
"""
KEYS = """
import time
from qrl.tracking import sources
began = time.time()
for step in ("train", "quantize", "evaluate", "diagnose", "compare"):
    sources.digests(step)
print(time.time() - began)
"""


def seconds(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - began


def starting() -> None:
    """Time both commands in turn, so that a slow phase of the machine slows both."""
    for words in (("--help",), ("train", "--help")):
        rows = [(seconds("-m", "qrl", *words), seconds("-c", "pass")) for _ in range(ROUNDS + 1)][1:]
        ours, bare = (statistics.median(column) for column in zip(*rows, strict=True))
        told = f"{ours:.3f} s (median of {ROUNDS}); python -c pass {bare:.3f} s; ratio"
        print(f"python -m qrl {' '.join(words)}   {told} {statistics.median(a / b for a, b in rows):.1f}")


def ending() -> None:
    """Time how a process that has imported what a step needs ends, as qrl's do and as Python's do by themselves."""
    rows = [[seconds_to_end(who) for who in ("qrl", "python")] for _ in range(ROUNDS + 1)][1:]
    ours, bare = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        f"the end of a step   {ours:.2f} s (median of {ROUNDS}); left to Python {bare:.2f} s; ratio {bare / ours:.1f}"
    )


def seconds_to_end(who: str) -> float:
    words = [sys.executable, "-c", STEP, who]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT)
    return time.time() - float(done.stdout.splitlines()[-1])


def keys_of_sources() -> None:
    """Time what the keys of a study's steps need of the sources, with nothing kept and with what that round kept."""
    rows = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            rows.append([seconds_of_keys(cache), seconds_of_keys(cache)])
    anew, kept = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"keys of the sources   {kept:.2f} s (median of {ROUNDS}); parsed anew {anew:.2f} s; ratio {anew / kept:.1f}")


def seconds_of_keys(cache: str) -> float:
    variables = os.environ | {"XDG_CACHE_HOME": cache}
    words = [sys.executable, "-c", KEYS]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT, env=variables)
    return float(done.stdout)


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
        ending()
        keys_of_sources()
        registering()
