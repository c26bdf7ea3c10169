"""What a study's steps need to start, with the process that has imported everything and without.

    python tests/benchmarks/starts.py --rounds 3 --out starts.json     # in the core environment; a minute a study

Both ways run the same small study from an empty store, in turn, so that a slow phase of the machine slows both. A
step's seconds are those between its title and the next one.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
STUDY = "--evaluate.n 50 --train.steps 2 --quantize.schemes nf4,awq-ct --promote.stages base=base:full --yes"
WAYS = {"warm": {}, "cold": {"QRL_WARM": "off"}}
TITLE = re.compile(r"\[\d+/\d+\] (\w+):")


def seconds_of_steps(variables: dict[str, str]) -> dict[str, float]:
    """Run the study, and return the seconds of each step and of all."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "QRL_WORK": f"{folder}/work"}
        words = [sys.executable, "-m", "qrl", "study", *STUDY.split()]
        began = time.monotonic()
        starts = []
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with subprocess.Popen(words, cwd=ROOT, env=os.environ | settings | variables, text=True, **pipes) as study:
            for line in study.stderr or ():
                title = TITLE.search(line)
                if title:
                    starts.append((title[1], time.monotonic()))
        if study.returncode:
            sys.exit(f"The study ended with exit code {study.returncode}.")
        ends = [*(start for _, start in starts[1:]), time.monotonic()]
        steps = {name: end - start for (name, start), end in zip(starts, ends, strict=True)}
        return steps | {"the study": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rounds = []
    for _ in range(given.rounds):
        rounds.append({way: seconds_of_steps(variables) for way, variables in WAYS.items()})
        print(json.dumps(rounds[-1]), flush=True)
    print(f"| median of {given.rounds}, s | warm | cold | cold / warm |\n|---|---:|---:|---:|")
    for step in rounds[0]["warm"]:
        warm, cold = (statistics.median(one[way][step] for one in rounds) for way in WAYS)
        ratio = statistics.median(one["cold"][step] / one["warm"][step] for one in rounds)
        print(f"| {step} | {warm:.1f} | {cold:.1f} | {ratio:.1f} |")
    if given.out:
        given.out.write_text(json.dumps(rounds))


if __name__ == "__main__":
    main()
