"""A training that is killed outright goes on as if nothing had been; two processes train as one."""

import os
import random
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch

import qrl
from qrl import tasks, tiny
from qrl.recipe import Train
from qrl.train import grpo

SMALL = {"steps": 5, "prompts_per_step": 4, "generations": 4, "micro_batch": 8, "max_completion_tokens": 64, "temperature": 2.0, "save_every": 2}
KINDS = {
    "qlora": Train(method="qlora", dtype="fp32", lora_rank=4, lora_targets=("q_proj", "v_proj"), learning_rate=2e-3, beta=0.01, **SMALL),
    "full": Train(learning_rate=4e-5, **SMALL),
}
CHILD = """
import sys
from pathlib import Path
from qrl import process
process.settle()
from qrl import tasks, tiny
from qrl.recipe import Train
from qrl.train import grpo

work, out, settings = Path(sys.argv[1]), Path(sys.argv[2]), Train.model_validate_json(sys.argv[3])
given = {"task": "arithmetic", "template": "plain", "seed": 0, "device": "cpu", "work": work, "out": out}
log = lambda metrics, step: print(step, flush=True)
done = grpo.run(tiny.PATH, tasks.load("arithmetic", "train", 32, 0), settings, **given, log=log)
print("resumed from", done.resumed_from)
"""


def child(folder, settings):
    words = [sys.executable, "-W", "ignore", "-c", CHILD, folder / "work", folder / "model", settings.model_dump_json()]
    variables = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": os.path.dirname(os.path.dirname(qrl.__file__))}
    return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def prompts(work):
    """Questions by step, in order."""
    files = sorted((work / "completions").glob("*.parquet"))
    return {file.name: [str(value) for value in pd.read_parquet(file)["prompt"]] for file in files}


@pytest.mark.parametrize("kind", ["qlora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_training_killed_at_a_random_moment_ends_with_the_same_weights_bit_for_bit(kind, tmp_path):
    settings, chance = KINDS[kind], random.Random()
    last_seen, wait = chance.randint(1, 4), chance.uniform(0, 0.5)
    killed = child(tmp_path / "killed", settings)
    for line in killed.stdout:
        if line.strip() == str(last_seen):
            time.sleep(wait)
            killed.send_signal(signal.SIGKILL)
            break
    killed.communicate(timeout=60)
    if killed.returncode != -signal.SIGKILL:
        pytest.skip(f"it was over before the kill {wait:.2f} s after step {last_seen}")
    again = child(tmp_path / "killed", settings)
    said, _ = again.communicate(timeout=180)
    where = f"killed {wait:.2f} s after step {last_seen}: {said}"
    assert again.returncode == 0, where
    given = {"task": "arithmetic", "template": "plain", "seed": 0, "device": "cpu"}
    whole = grpo.run(tiny.PATH, tasks.load("arithmetic", "train", 32, 0), settings, **given, work=tmp_path / "work", out=tmp_path / "model")
    assert prompts(tmp_path / "killed" / "work") == prompts(tmp_path / "work"), where
    for file in (file for file in whole.path.iterdir() if file.suffix == ".safetensors"):
        assert (tmp_path / "killed" / "model" / file.name).read_bytes() == file.read_bytes(), where
