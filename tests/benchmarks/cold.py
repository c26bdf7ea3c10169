"""The README's command as a newcomer runs it: from a clean clone, with an empty home and no environment.

    python tests/benchmarks/cold.py --rounds 5 --out cold.json     # any Python; 4 minutes a round on two idle cores

Each round clones this repository's last commit, runs the default study with environments, caches and home that begin
empty, and then runs the same command again, which reuses every step. Between the two, in the same minute, the new
environment's Python runs a fixed load: imports and matrix products. Machines of one kind differ by 1.5 times and more
from hour to hour, so the study is also given as a multiple of that load.
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
STUDY = ["uvx", "--from", "mlflow==3.17.2", "mlflow", "run", ".", "--env-manager", "uv"]
LOAD = """
import torch, transformers, mlflow, trl.trainer.grpo_trainer
matrix = torch.rand(1024, 1024)
for _ in range(200):
    matrix = matrix @ matrix / 512
"""
LOADS = 3  # processes one after the other, each with this load
TOOK = re.compile(r"Took +(\d+) s")


def seconds(words: list[str], folder: Path, variables: dict[str, str]) -> tuple[float, str]:
    """Run a command to its end; return its time by the clock and what it printed."""
    began = time.monotonic()
    done = subprocess.run(
        words, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return time.monotonic() - began, done.stdout + done.stderr


def measure() -> dict[str, float]:
    """Return the seconds of one round: the first run, of it the study, the load, and the run that reuses."""
    with tempfile.TemporaryDirectory(prefix="qrl-cold-") as scratch:
        clone, home = Path(scratch, "clone"), Path(scratch, "home")
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "QRL_", "XDG_"))}
        variables = kept | {"HOME": str(home), "MLFLOW_ENV_ROOT": str(home / "environments")}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        first_s, printed = seconds(STUDY, clone, variables)
        (trl,) = (home / "environments").glob("*/lib/python*/site-packages/trl")  # in the core environment alone
        python = str(trl.parents[3] / "bin" / "python")
        loads = [seconds([python, "-c", LOAD], clone, variables)[0] for _ in range(LOADS)]
        again_s, printed_again = seconds(STUDY, clone, variables)
        return {
            "first_s": first_s,
            "study_s": float(TOOK.findall(printed)[-1]),
            "load_s": sum(loads),
            "again_s": again_s,
            "study_again_s": float(TOOK.findall(printed_again)[-1]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rounds = []
    for _ in range(given.rounds):
        rounds.append(measure())
        print(json.dumps(rounds[-1]), flush=True)
        if given.out:
            given.out.write_text(json.dumps(rounds))
    columns = ["first_s", "study_s", "load_s", "again_s", "study_again_s"]
    ratios = [one["first_s"] / one["load_s"] for one in rounds]
    print(f"| {' | '.join(columns)} | first_s / load_s |\n|{'---:|' * (len(columns) + 1)}")
    for one, ratio in zip(rounds, ratios, strict=True):
        print(f"| {' | '.join(f'{one[column]:.0f}' for column in columns)} | {ratio:.1f} |")
    medians = [statistics.median(one[column] for one in rounds) for column in columns]
    print(f"| {' | '.join(f'{median:.0f}' for median in medians)} | {statistics.median(ratios):.1f} |")


if __name__ == "__main__":
    main()
