"""A training with verl on two nodes of a real Slurm: Ray, the shards and their merge are real, verl's loop is not.

The stand-in for `verl.trainer.main_ppo`, which needs GPUs, connects to Ray by verl's configuration, and has each node
write its shard with verl's checkpoint manager. QRL_VERL_PYTHON names a Python with verl 0.9.1.
"""

import os

import mlflow
import pytest

from qrl import names
from qrl.cluster import backend, config, jobs
from tests.cluster import one_machine
from tests.cluster.test_jobs import tags, until
from tests.cluster.test_study import ROOT
from tests.train.test_verl_real import SAVE, of_ray

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(one_machine.missing()), reason=one_machine.missing() or "Slurm is here"),
    pytest.mark.skipif("QRL_VERL_PYTHON" not in os.environ, reason="QRL_VERL_PYTHON names no Python with verl 0.9.1"),
]
STEPS = 3
RECIPE = {
    **{"recipe": "tiny", "train.trainer": "verl", "train.parallel": "fsdp2", "rollout.engine": "vllm"},
    **{"train.steps": str(STEPS), "train.questions": "60", "train.prompts_per_step": "2", "train.generations": "4"},
}
PATCHES = """
import sys

if sys.orig_argv[-1:] and "qrl" in sys.orig_argv and "train" in sys.orig_argv and "job" not in sys.orig_argv:
    if "torch.distributed.run" not in sys.orig_argv:  # the step itself, which here has neither GPU nor vLLM
        import os, types
        from qrl.engine import device
        from qrl.train.rollout import checks
        from qrl.train.verl import child, training

        device.choose, device.gpus = lambda wanted: "cuda", lambda device: 1
        checks.check_installed = lambda settings: None
        training.check_installed = lambda: None
        training.MAIN = "stand_in"
        child.sys = types.SimpleNamespace(executable=os.environ["QRL_VERL_PYTHON"])
"""
STAND_IN = """
import json, os, subprocess, sys, time
from pathlib import Path
import ray
import yaml
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.single_controller.ray import ResourcePoolManager

config = yaml.safe_load((Path(sys.argv[2]) / "recipe.yaml").read_text())
trainer, base = config["trainer"], config["actor_rollout_ref"]["model"]["path"]
ray.init(**config["ray_kwargs"]["ray_init"])
pool = [trainer["n_gpus_per_node"]] * trainer["nnodes"]
assert pool == [1, 1], pool
ResourcePoolManager(resource_pool_spec={"all": pool}, mapping={}).create_resource_pool()
spread = placement_group([{"GPU": 1, "CPU": 3}] * 2, strategy="STRICT_SPREAD")
actor = Path(trainer["default_local_dir"]) / f"global_step_{trainer['total_training_steps']}" / "actor"
actor.mkdir(parents=True)

@ray.remote(num_gpus=1, num_cpus=3)
def shard(rank, port):
    save = os.environ["QRL_TEST_SAVE"]
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    subprocess.run([sys.executable, save, base, "fsdp2", str(actor)], env=os.environ | ranks, check=True)
    if rank == 1:  # verl's runner logs from whatever node it is on
        with open(os.environ["VERL_FILE_LOGGER_PATH"], "a") as log:
            for step in range(1, trainer["total_training_steps"] + 1):
                log.write(json.dumps({"step": step, "data": {"critic/score/mean": step / 10}}) + "\\n")
    return ray.get_runtime_context().get_node_id(), os.environ["SLURMD_NODENAME"]

how = [PlacementGroupSchedulingStrategy(spread, index) for index in (0, 1)]
port = os.environ["QRL_TEST_PORT"]
homes = ray.get([shard.options(scheduling_strategy=each).remote(rank, port) for rank, each in enumerate(how)])
assert sorted(name for _, name in homes) == ["n1", "n2"] and len(dict(homes)) == 2, homes
if os.environ.get("QRL_TEST_HANG"):
    Path(os.environ["QRL_TEST_HANG"]).touch()
    time.sleep(600)
(actor.parents[1] / "latest_checkpointed_iteration.txt").write_text(str(trainer["total_training_steps"]))
"""


@pytest.fixture
def submitted(slurm, store, tmp_path, monkeypatch):
    """Submit the training on two nodes; its processes carry the test's mark."""
    for name, text in {"sitecustomize": PATCHES, "stand_in": STAND_IN, "save": SAVE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    own = {
        "QRL_TEST_RAY": str(tmp_path),
        "QRL_TEST_SAVE": str(tmp_path / "save.py"),
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
    }
    own["QRL_TEST_PORT"] = str(one_machine.ports(1)[0])
    whole = {"partition": "gpu", "nodes": 2, "gpus": 1, "options": {"exclusive": True}}
    settings = {"driver": "slurm", "shared": "/", "poll": 1, "defaults": {"time": 60}, "steps": {"train": whole}}

    def submit(**more: str) -> jobs.Submitted:
        for name, value in (slurm.environment | own | more).items():
            monkeypatch.setenv(name, value)
        return backend.start(config.load(settings), ROOT, "train", RECIPE, "local")

    return submit


def test_verl_trains_on_two_nodes_and_only_the_first_logs(submitted, tmp_path):
    train = submitted()
    assert train.wait(), train.log.read_text()[-4000:]
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FINISHED" and run.data.params["processes"] == "2"
    assert run.data.metrics["train/reward"] == STEPS / 10 and names.TAG_REASON not in tags(train)
    assert tags(train)[jobs.NODE] == "n[1-2]"
    until(lambda: not of_ray(str(tmp_path)), 30)


def test_a_training_that_is_cancelled_leaves_nothing_of_rays(submitted, tmp_path):
    train = submitted(QRL_TEST_HANG=str(tmp_path / "hangs"))
    until((tmp_path / "hangs").exists, 300)
    assert {"raylet", "gcs_server"} <= set(of_ray(str(tmp_path)))
    train.cancel()
    until(lambda: not of_ray(str(tmp_path)), 60)
    until(lambda: train.get_status() == "KILLED", 60)
