"""A killed training resumes to the same weights; two processes train as one."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from qrl import recipe, tasks, tiny
from qrl.recipe import Train
from qrl.train import Job, grpo, loop
from tests.train import pair

pytestmark = pytest.mark.process

SMALL = {
    "steps": 5,
    "prompts_per_step": 4,
    "generations": 4,
    "micro_batch": 8,
    "max_completion_tokens": 64,
    "temperature": 2.0,
    "save_every": 2,
}
KINDS = {
    "qlora": Train(
        method="qlora",
        dtype="fp32",
        lora_rank=4,
        lora_targets=("q_proj", "v_proj"),
        learning_rate=2e-3,
        beta=0.01,
        **SMALL,
    ),
    "full": Train(learning_rate=4e-5, **SMALL),
}
CHILD = """
import sys
from pathlib import Path
from qrl import process
process.prepare_process()
from qrl import tasks, tiny
from qrl.recipe import Train
from qrl.train import Job, grpo

work, out, settings = Path(sys.argv[1]), Path(sys.argv[2]), Train.model_validate_json(sys.argv[3])
data = {"base": tiny.PATH, "questions": tasks.load("arithmetic", "train", 32, 0), "task": "arithmetic"}
log = lambda metrics, step: print(step, flush=True)
job = Job(settings=settings, template="plain", seed=0, device="cpu", work=work, out=out, log=log, **data)
done = grpo.run(job)
sys.stdout.write(f"resumed from {done.resumed_from}\\n")  # in one piece: two processes may share a pipe
"""


def child(folder, settings):
    words = [sys.executable, "-W", "ignore", "-c", CHILD, folder / "work", folder / "model", settings.model_dump_json()]
    variables = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(pair.ROOT)}
    return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


FOLDS = """
import sys
from qrl import process
from qrl.train import parallel
from qrl.train.qat import prepare

refold = prepare.refold


def told(model):
    refold(model)
    digests = [parallel.digest(tensors) for tensors in prepare.state(model).values()]
    sys.stdout.write(f"rank {process.rank()} folds {digests}\\n")


prepare.refold = told  # after each optimizer step, in each process
"""


def folded(output: str) -> list[list[str]]:
    """Return what each of two processes computed with after each step: digests of scales and of Q(W)."""
    told = [line.split(" folds ") for line in output.splitlines() if " folds " in line]
    return [[digests for rank, digests in told if rank == f"rank {number}"] for number in (0, 1)]


def prompts(work):
    """Return the questions by step, in order."""
    files = sorted((work / "completions").glob("*.parquet"))
    return {file.name: [str(value) for value in pd.read_parquet(file)["prompt"]] for file in files}


def alone(folder, settings):
    """Run the same training in this process, undisturbed."""
    data = {"base": tiny.PATH, "questions": tasks.load("arithmetic", "train", 32, 0), "task": "arithmetic"}
    folders = {"work": folder / "work", "out": folder / "model"}
    return grpo.run(Job(settings=settings, template="plain", seed=0, device="cpu", **data, **folders))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", pytest.param("qlora", marks=pytest.mark.long)])
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
    output, _ = again.communicate(timeout=180)
    where = f"killed {wait:.2f} s after step {last_seen}: {output}"
    assert again.returncode == 0, where
    whole = alone(tmp_path, settings)
    assert prompts(tmp_path / "killed" / "work") == prompts(tmp_path / "work"), where
    for file in (file for file in whole.path.iterdir() if file.suffix == ".safetensors"):
        assert (tmp_path / "killed" / "model" / file.name).read_bytes() == file.read_bytes(), where


def test_a_training_that_resumes_after_its_last_step_is_ended_and_no_other():
    ending = loop._no_further_step()
    ending.on_train_begin(None, SimpleNamespace(global_step=1, max_steps=2), None)
    with pytest.raises(loop._AllSteps):
        ending.on_train_begin(None, SimpleNamespace(global_step=2, max_steps=2), None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qlora", pytest.param("full", marks=pytest.mark.long)])
def test_a_training_killed_after_its_last_step_takes_no_further_one(kind, tmp_path):
    settings = KINDS[kind].model_copy(update={"steps": 2})  # of the four that an epoch of these questions has
    whole = alone(tmp_path, settings)
    written = {file.name: file.read_bytes() for file in whole.path.iterdir()}
    shutil.rmtree(whole.path)
    again = alone(tmp_path, settings)
    assert again.resumed_from == 2
    assert {file.name: file.read_bytes() for file in again.path.iterdir()} == written
    assert again.history.equals(whole.history)


@pair.flaky
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["nvfp4-a4", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("qlora", "int8"))]
)
def test_two_processes_go_on_from_a_checkpoint_bit_for_bit(kind, tmp_path):
    """As if they had been killed: without its last checkpoint, the training ends with the same weights again."""
    settings = KINDS["qlora"] if kind == "qlora" else KINDS["full"].model_copy(update={"qat": kind, "beta": 0.01})
    settings = settings.model_copy(update={"steps": 4, "qat_calibration_samples": 8})
    work, kept = tmp_path / "work", tmp_path / "again"

    def trained(folder, out) -> str:
        done = pair.run(tmp_path, FOLDS + CHILD, folder, out, settings.model_dump_json())
        pair.check(done)
        return done.stdout

    whole = trained(work, tmp_path / "whole")
    assert whole.count("resumed from 0") == 2
    shutil.copytree(work / "checkpoint-2", kept / "checkpoint-2")
    second = trained(kept, tmp_path / "second")
    assert second.count("resumed from 2") == 2
    written = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "second").iterdir()} == written
    if kind != "qlora":
        both = [folded(output) for output in (whole, second)]
        assert [len(ranks[0]) for ranks in both] == [4, 2] and len({*both[0][0]}) == 4  # a step each, none the same
        assert both[0][0] == both[0][1] and both[1][0] == both[1][1] == both[0][0][2:]


@pytest.mark.slow
@pair.flaky
def test_two_processes_train_as_one_and_the_first_alone_logs_and_writes(store, tmp_path):
    settings = Train(
        steps=2,
        prompts_per_step=4,
        generations=4,
        micro_batch=4,
        questions=32,
        max_completion_tokens=48,
        completions_logged=16,
    )
    resolved = recipe.load(
        "tiny", {f"train.{key}": str(value) for key, value in settings.model_dump(exclude_defaults=True).items()}
    )
    (tmp_path / "recipe.yaml").write_text(resolved.dump())
    words = ["--recipe", tmp_path / "recipe.yaml", "--device", "cpu", "--watch.probe_every", 2, "--watch.probe_n", 5]
    folder = os.path.dirname(store.removeprefix("sqlite:///"))
    done = pair.torchrun("-m", "qrl", "train", *words, cwd=folder)
    pair.check(done)
    import mlflow

    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert run.info.status == "FINISHED" and run.data.params["processes"] == "2" and run.outputs.model_outputs
    steps = {
        name: [p.step for p in mlflow.MlflowClient().get_metric_history(run.info.run_id, name)]
        for name in ("train/reward", "probe/n")
    }
    assert steps == {"train/reward": [1, 2], "probe/n": [0, 2]} and run.data.metrics["probe/n"] == 5
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    rows = [json.loads(line) for line in (artifacts / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/reward" in row] == [1, 2]
    assert [row["probe/n"] for row in rows if "probe/n" in row] == [5, 5]
    (named,) = re.findall(r"live metrics: (\S+metrics\.jsonl)", done.stderr)
    assert Path(named).is_relative_to(Path(folder).resolve() / ".qrl")
    table = json.loads((artifacts / "completions.json").read_text())
    shared = (
        pd.DataFrame(table["data"], columns=table["columns"])
        .groupby("step")["prompt"]
        .agg(lambda column: sorted(set(column)))
    )
    single = alone(tmp_path, settings).completions.groupby("step")["prompt"].agg(lambda column: sorted(set(column)))
    assert shared.to_dict() == single.to_dict() and {len(texts) for texts in single} == {4}
