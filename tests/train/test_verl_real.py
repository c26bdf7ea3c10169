"""verl's own merger, on checkpoints that verl's own checkpoint manager writes, and real processes of Ray; on a CPU.

QRL_VERL_PYTHON names a Python with verl 0.9.1 and its dependencies; vLLM is not needed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from qrl import checkpoint, process, tiny
from qrl.errors import QrlError
from qrl.train import merge as merging
from qrl.train.verl import child, training, translate
from tests.cluster import one_machine
from tests.train.test_verl import job, settings

pytestmark = [
    pytest.mark.slow,  # starts torch several times
    pytest.mark.skipif("QRL_VERL_PYTHON" not in os.environ, reason="QRL_VERL_PYTHON names no Python with verl 0.9.1"),
]
SAVE = """
import sys
import torch
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import get_fsdp_wrap_policy

base, method, folder = sys.argv[1:]
torch.distributed.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
with torch.no_grad():
    if method == "lora":
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=["q_proj"]))
        for name, weight in model.named_parameters():
            if "lora_A" in name:
                weight.fill_(1 / weight.shape[1])
            if "lora_B" in name:
                weight.fill_(2**-10)
    else:
        for weight in model.parameters():
            weight.mul_(2)
mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
if method == "fsdp2":
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
else:
    policy = get_fsdp_wrap_policy(model, is_lora=method == "lora")
    sharded = FSDP(model, device_mesh=mesh, auto_wrap_policy=policy, device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(weight for weight in sharded.parameters() if weight.requires_grad)
wanted = OmegaConf.create({"save": ["model", "optimizer", "extra"], "load": ["model"], "async_save": False})
tokens = AutoTokenizer.from_pretrained(base)
manager = FSDPCheckpointManager(sharded, optimizer, processing_class=tokens, checkpoint_config=wanted)
manager.save_checkpoint(folder, global_step=4)
torch.distributed.destroy_process_group()
"""

MERGED = """
import copy, sys, types
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
from transformers import AutoModelForCausalLM
from verl.utils import fsdp_utils
from verl.workers.engine.fsdp import transformer_impl

base, kind = sys.argv[1:]
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
adapter = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
for name, weight in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weight, std=0.02)
divided = torch.distributed.get_world_size() > 1  # and then sent in bf16
rounded = torch.bfloat16 if divided else torch.float32
merged = copy.deepcopy(model).merge_and_unload().state_dict()
wanted = {name: weight.to(rounded).float() for name, weight in merged.items()}
mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=["fsdp"])
if kind == "fsdp":
    policy = fsdp_utils.get_fsdp_wrap_policy(module=model, config=None, is_lora=True)
    model = FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), device_mesh=mesh)
    whole, parts = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    config = ShardedStateDictConfig() if divided else FullStateDictConfig()
    FSDP.set_state_dict_type(model, parts if divided else whole, config)  # as verl's engine does
else:
    fsdp_utils.apply_fsdp2(model, {"mesh": mesh}, {"wrap_policy": {}})
transformer_impl.get_device_id = lambda: "cpu"
transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
engine = types.SimpleNamespace(module=model, _is_offload_param=False)
for _ in range(2):  # the first leaves the base as it was
    sent = transformer_impl.FSDPEngine._merged_lora_per_tensor_param(engine)
    sent = {name: weight.float().clone() for name, weight in sent}
    assert sent.keys() == wanted.keys(), sorted(sent.keys() ^ wanted.keys())
    different = [name for name in wanted if not torch.equal(sent[name], wanted[name])]
    assert not different, different
"""  # verl's engine is asked for what it sends to vLLM; only what reads a GPU's memory is left out


@pytest.fixture
def python(monkeypatch) -> str:
    """Have the trainer start verl's Python, as it does in verl's environment."""
    monkeypatch.setattr(sys, "executable", os.environ["QRL_VERL_PYTHON"])
    return os.environ["QRL_VERL_PYTHON"]


def saved(python: str, work: Path, method: str, processes: int) -> None:
    """Write a checkpoint of step 4 as verl does: weights of the tiny model doubled, or an adapter beside them."""
    actor = work / translate.CHECKPOINTS / "global_step_4" / "actor"
    actor.mkdir(parents=True)
    (work / "save.py").write_text(SAVE)
    run = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    words = [*run, str(work / "save.py"), str(tiny.PATH), method, str(actor)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=work)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(list(actor.glob(f"model_world_size_{processes}_rank_*.pt"))) == processes
    (actor.parents[1] / "latest_checkpointed_iteration.txt").write_text("4")


@pytest.mark.parametrize(
    ("kind", "processes"), [*(pytest.param("fsdp", n, marks=pytest.mark.long) for n in (1, 2)), ("fsdp2", 2)]
)
def test_verl_sends_vllm_what_peft_merges(kind, processes, python, tmp_path):
    (tmp_path / "merged.py").write_text(MERGED)
    run = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    words = [*run, str(tmp_path / "merged.py"), str(tiny.PATH), kind]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("method", "processes"),
    [pytest.param("full", 1, marks=pytest.mark.long), ("full", 2), pytest.param("fsdp2", 2, marks=pytest.mark.long)],
)
def test_verls_merger_makes_a_checkpoint_of_verls_shards(method, processes, python, tmp_path):
    (work := tmp_path / "work").mkdir()
    saved(python, work, method, processes)
    base, made = checkpoint.check(tiny.PATH), replace(job(work, n=1), out=tmp_path / "model")
    training.merge(base, base.digest, made)
    assert checkpoint.check(made.out).dtype == base.dtype
    before, after = dict(checkpoint.tensors(tiny.PATH)), dict(checkpoint.tensors(made.out))
    assert before.keys() == after.keys() and all(torch.equal(after[name], 2 * before[name]) for name in before)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (made.out / file).read_bytes() == (tiny.PATH / file).read_bytes()


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_verls_merger_makes_an_adapter_that_merges_into_the_base(processes, python, tmp_path):
    (work := tmp_path / "work").mkdir()
    saved(python, work, "lora", processes)
    loaded = settings(train__method="lora", train__dtype="fp32", train__lora_targets="q_proj")
    made = replace(job(work, loaded, n=1), out=tmp_path / "adapter")
    training.merge(checkpoint.check(tiny.PATH), "", made)
    whole = merging.run(tiny.PATH, made.out, tmp_path / "whole", [[5, 6, 7]], max_kl=1.0, into="auto", device="cpu")
    before, after = dict(checkpoint.tensors(tiny.PATH)), dict(checkpoint.tensors(whole.path))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        update = 2 * 16 / 2**10 / weight.shape[1] if name.endswith("q_proj.weight") else 0  # alpha / r times B A
        assert torch.allclose(after[name].float(), weight.float() + update, atol=1e-3)
        assert torch.equal(after[name], weight) == (not update)


def test_a_shard_that_is_missing_is_a_sentence(python, tmp_path):
    (work := tmp_path / "work").mkdir()
    saved(python, work, "full", 2)
    next(work.rglob("model_world_size_2_rank_1.pt")).unlink()
    made = replace(job(work, n=1), out=tmp_path / "model")
    with pytest.raises(QrlError, match=r"verl\.model_merger ended with exit code 1: .*model_world_size_2_rank_1\.pt"):
        training.merge(checkpoint.check(tiny.PATH), "", made)
    assert not made.out.exists()


RAY = """
import os, sys, time
from pathlib import Path
import ray

ray.init(address="local", num_cpus=2, include_dashboard=False)  # as verl does by our configuration

@ray.remote(num_cpus=1)
class Worker:
    def node(self):
        return ray.get_runtime_context().get_node_id()

workers = [Worker.remote() for _ in range(2)]
homes = set(ray.get([each.node.remote() for each in workers]))
alive = {each["NodeID"] for each in ray.nodes() if each["Alive"]}
assert homes == alive and len(alive) == 1, (homes, alive)
Path("began").touch()
how = sys.argv[1]
if how == "fails":
    raise ValueError("too little memory")
if how == "hangs":
    time.sleep(600)
os._exit(0)  # without ray.shutdown()
"""


def of_ray(mark: str) -> list[str]:
    """Return the names of the living processes that inherited the test's variable."""
    found = []
    for each in psutil.process_iter(["name", "pid", "status"]):
        try:  # not by psutil, which loses the environment of a process that has set its title
            inherited = f"QRL_TEST_RAY={mark}".encode() in Path(f"/proc/{each.pid}/environ").read_bytes()
        except OSError:
            continue
        if inherited and each.info["pid"] != os.getpid() and each.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(each.info["name"])
    return found


@pytest.mark.parametrize("how", [*(pytest.param(how, marks=pytest.mark.long) for how in ("ends", "fails")), "hangs"])
def test_rays_own_processes_end_with_the_trainer(how, python, tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "of_ray.py").write_text(RAY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setenv("QRL_TEST_RAY", str(tmp_path))
    seen: set[str] = set()

    def train() -> None:
        with child.running(["of_ray", how], tmp_path) as trainer:
            end = time.monotonic() + 240
            while trainer.poll() is None and time.monotonic() < end:
                seen.update(of_ray(str(tmp_path)))
                if how == "hangs" and (tmp_path / "began").exists():
                    raise KeyboardInterrupt
                time.sleep(0.5)

    if how == "ends":
        train()
    else:
        error, words = {"fails": (QrlError, "ValueError: too little memory"), "hangs": (KeyboardInterrupt, None)}[how]
        with pytest.raises(error, match=words):
            train()
    assert (tmp_path / "began").exists() and {"raylet", "gcs_server"} <= seen
    assert not of_ray(str(tmp_path))


NODE = """
import sys, time
from pathlib import Path
from qrl import process
from qrl.errors import QrlError
from qrl.train.verl import child, nodes

work, how = Path(sys.argv[1]), sys.argv[2]
nodes.JOIN_S = 5 if how == "alone" else nodes.JOIN_S
with process.sentences():
    if not process.rank():
        with nodes.cluster(work) as (address, variables), child.running(["of_nodes", address, how], work, **variables):
            pass
    elif how != "alone":
        nodes.join(work)
    else:
        time.sleep(60)
"""
OF_NODES = """
import os, sys, time
from pathlib import Path
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.single_controller.ray import ResourcePoolManager

ours = {"env_vars": {"VERL_FILE_LOGGER_PATH": "the log"}}
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env=ours)  # as verl does by our configuration
ResourcePoolManager(resource_pool_spec={"two": [1, 1]}, mapping={}).create_resource_pool()  # nnodes x n_gpus_per_node
try:
    ResourcePoolManager(resource_pool_spec={"three": [1, 1, 1]}, mapping={}).create_resource_pool()
    raise SystemExit("verl took two GPUs for three")
except ValueError:
    pass
spread = placement_group([{"GPU": 1, "CPU": 3}] * 2, strategy="STRICT_SPREAD")  # what verl asks for on a node

@ray.remote(num_gpus=1, num_cpus=3)
def home():
    import qrl.train.verl.score  # the rewards, on any node
    stranger = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
    assert not stranger & os.environ.keys() and os.environ["VERL_FILE_LOGGER_PATH"] == "the log", dict(os.environ)
    return ray.get_runtime_context().get_node_id()

how = [PlacementGroupSchedulingStrategy(spread, index) for index in (0, 1)]
homes = ray.get([home.options(scheduling_strategy=each).remote() for each in how])
assert len(set(homes)) == 2, homes
Path("began").touch()
if sys.argv[2] == "fails":
    raise ValueError("too little memory")
time.sleep(600 if sys.argv[2] == "killed" else 0)
"""


def torchrun(python: str, work: Path, how: str) -> list[subprocess.Popen]:
    """Start a training's two nodes, both this machine, as srun does on a cluster."""
    meet = ["--rdzv-backend=c10d", "--rdzv-id=test", f"--rdzv-endpoint=localhost:{one_machine.ports(1)[0]}"]
    words = [python, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meet]
    started = []
    for node in range(2):
        with (work / f"torchrun-{node}.log").open("wb") as log:
            there = [*words, str(work / "node.py"), str(work), how]
            started.append(subprocess.Popen(there, stdout=log, stderr=subprocess.STDOUT))
    return started


def stop(started: list[subprocess.Popen], how: signal.Signals) -> None:
    """Send a signal to two torchruns and to the step of each, as Slurm does; those have sessions of their own."""
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            torchrun = psutil.Process(each.pid)
            for step in (*torchrun.children(), torchrun):
                step.send_signal(how)


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.long) for how in ("ends", "alone")), "fails", "killed"]
)
def test_two_nodes_of_ray_hold_verls_resources_and_end_with_the_training(how, python, tmp_path, monkeypatch):
    (tmp_path / "node.py").write_text(NODE)
    (tmp_path / "of_nodes.py").write_text(OF_NODES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(process.ROOT))))
    monkeypatch.setenv("QRL_TEST_RAY", str(tmp_path))
    started, seen, end = torchrun(python, tmp_path, how), set(), time.monotonic() + 240
    try:
        while all(each.poll() is None for each in started) and time.monotonic() < end:
            seen.update(of_ray(str(tmp_path)))
            if how == "killed" and (tmp_path / "began").exists():
                break
            time.sleep(0.5)
        if how != "ends":  # srun does so after a failure: the other node's torchrun would wait for minutes
            if how != "killed":
                started[0].wait(90)
            stop(started, signal.SIGKILL)
        codes = [each.wait(90) for each in started]
    finally:
        stop(started, signal.SIGKILL)
    said = "".join(file.read_text() for file in tmp_path.glob("torchrun-*.log"))
    assert {"raylet", "gcs_server"} <= seen, said
    assert (tmp_path / "began").exists() == (how != "alone"), said
    assert (codes == [0, 0]) == (how == "ends"), said
    words = {"fails": "ValueError: too little memory", "alone": "1 of 2 nodes joined Ray in 5 s"}
    assert words.get(how, "") in said
    left, end = of_ray(str(tmp_path)), time.monotonic() + 60
    while left and time.monotonic() < end:  # a killed node's processes learn of it from the kernel, and drain for 30 s
        time.sleep(0.5)
        left = of_ray(str(tmp_path))
    assert not left, said
