"""Several processes that train as one, started by the training itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from qrl import process, recipe
from qrl.errors import BadInput, QrlError
from qrl.recipe import rules
from qrl.train import parallel
from tests.processes import children_with
from tests.train import pair

pytestmark = pytest.mark.process

SMALL = {"steps": "2", "prompts_per_step": "4", "generations": "4", "micro_batch": "4", "questions": "32"}
SMALL |= {"max_completion_tokens": "48", "parallel": "ddp", "processes": "2"}


def settings(**fields):
    return recipe.load(overrides={f"train.{name}": value for name, value in fields.items()}).train


def child(words: str):
    """Return a stand-in for `_start`: a process that runs Python's `words`."""

    def start(_rank, log):
        with log.open("wb") as output:
            return subprocess.Popen([sys.executable, "-c", words], stdout=output, stderr=output)

    return start


@pytest.mark.parametrize(
    ("fields", "device", "gpus", "words"),
    [
        ({"parallel": "ddp", "processes": "4"}, "cuda", 2, "processes = 4 needs 4 GPUs, but this machine has 2 GPUs"),
        ({"parallel": "fsdp2"}, "cuda", 1, "fsdp2 needs 2 GPUs, but this machine has 1 GPU:"),
        ({"parallel": "ddp"}, "cpu", 0, "set train.processes"),
        ({"parallel": "fsdp2", "processes": "2"}, "cpu", 0, "device is the CPU"),
        ({"processes": "2"}, "cpu", 0, "no effect without train.parallel"),
        ({"teacher_placement": "sharded", "teacher": "m"}, "cuda", 2, "but one trains: set train.parallel = ddp"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_in_a_sentence(fields, device, gpus, words, monkeypatch):
    monkeypatch.setattr(parallel.devices, "gpus", lambda _device: gpus)
    with pytest.raises(BadInput, match=words):
        rules.check_training(settings(**fields))
        parallel.check(settings(**fields), device)


def test_a_choice_that_is_gone_gets_the_sentence_of_an_unknown_one():
    with pytest.raises(BadInput, match=r"'train\.parallel' is 'zero3', but must be 'none', 'ddp' or 'fsdp2'"):
        settings(parallel="zero3")


def test_fsdp_2_shards_a_quantized_student(monkeypatch):
    monkeypatch.setattr(parallel.devices, "gpus", lambda _device: 2)
    parallel.check(settings(parallel="fsdp2", qat="nvfp4-a4", teacher="m"), "cuda")


def test_a_cluster_that_gives_too_few_gpus_is_told_apart_from_this_machine(monkeypatch):
    monkeypatch.setattr(parallel.devices, "gpus", lambda _device: 8)
    wanted = settings(parallel="ddp", processes="2")
    with pytest.raises(BadInput, match=r"processes = 2 needs 2 GPUs, but cluster\.yaml asks for 1 GPU: raise steps"):
        parallel.check(wanted, "cuda", 1)
    parallel.check(wanted, "cuda", 2)
    parallel.check(wanted, "cuda")


@pytest.mark.parametrize("method", ["none", "ddp", "fsdp2"])
def test_more_processes_than_gpus_are_refused_however_they_were_launched(method, monkeypatch):
    monkeypatch.setattr(parallel.devices, "gpus", lambda _device: 1)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):  # as torchrun on two nodes
        monkeypatch.setenv(name, value)
    wanted = settings(parallel=method)
    with pytest.raises(BadInput, match=r"Process 1 .* the machine has 1 GPU: lower --nproc-per-node"):
        parallel.check(wanted, "cuda")
    monkeypatch.setattr(parallel.devices, "gpus", lambda _device: 2)
    parallel.check(wanted, "cuda")
    monkeypatch.setattr(parallel.devices, "gpus", lambda _device: 1)
    monkeypatch.delenv("LOCAL_RANK")  # a launcher that shows each process its GPU alone
    parallel.check(wanted, "cuda")
    if method != "fsdp2":
        parallel.check(wanted, "cpu")


def test_a_process_per_gpu_and_the_configuration_for_accelerate(monkeypatch):
    monkeypatch.setattr(parallel.devices, "gpus", lambda _device: 4)
    chosen = settings(parallel="fsdp2")
    assert parallel.processes(chosen, "cuda") == 4 and parallel.processes(settings(), "cuda") == 1
    with parallel.group(chosen, "cuda") as others:
        assert (others, process.rank(), process.world_size(), process.sharded()) == (3, 0, 4, True)
        with parallel.group(chosen, "cuda") as more:  # as in the others, and under torchrun
            assert more == 0 and process.world_size() == 4
    assert (process.world_size(), process.sharded(), "MASTER_PORT" in os.environ) == (1, False, False)


def test_the_default_leaves_keys_as_they_were():
    covered = recipe.load().key_settings("train")
    assert not {"train.parallel", "train.processes"} & covered.keys()
    assert "train.parallel" in recipe.load(overrides={"train.parallel": "ddp"}).key_settings("train")


def test_a_failure_of_another_process_is_its_sentence(monkeypatch):
    monkeypatch.setattr(parallel, "_start", child("import sys; sys.exit('noise\\nqrl: It broke there.')"))
    with (
        pytest.raises(QrlError, match=r"Process 1 .* exit code 1: qrl: It broke there\.") as failed,
        parallel.others(1, ""),
    ):
        time.sleep(0.5)
        raise RuntimeError("Connection closed by peer")
    assert isinstance(failed.value.__cause__, RuntimeError)


@pytest.mark.slow
def test_a_failure_of_the_first_is_its_own_and_the_others_end_with_it(monkeypatch):
    monkeypatch.setattr(parallel, "_start", child("import time; time.sleep(600)"))
    before = set(psutil.Process().children())
    with pytest.raises(BadInput, match="mine"), parallel.others(2, ""):
        assert len(set(psutil.Process().children()) - before) == 2
        raise BadInput("mine")
    assert set(psutil.Process().children()) <= before


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {}; time.sleep(600)"


@pytest.mark.slow
def test_the_others_are_not_waited_for_once_the_first_has_its_result(monkeypatch):
    """With vLLM, each waits at its exit for the first one; nothing of Python's can interrupt it there."""
    monkeypatch.setattr(parallel, "_start", child(DEAF.format("pass")))
    before, began = set(psutil.Process().children()), time.monotonic()
    with parallel.others(2, ""):
        time.sleep(1)
    assert set(psutil.Process().children()) <= before and time.monotonic() - began < 30


@pytest.mark.process
def test_a_process_that_heeds_no_signal_dies_with_the_first(tmp_path):
    """As one does that waits for other GPUs, when the first is killed."""
    ready = tmp_path / "ready"
    deaf = DEAF.format(f"from qrl import process; process.prepare_process(); open({str(ready)!r}, 'w').close()")
    first = "import os, subprocess, sys; os.environ['QRL_FIRST'] = str(os.getpid())\n"
    first += "print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True); input()"
    words = [sys.executable, "-c", first, deaf]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=pair.ROOT) as started:
        other = psutil.Process(int(started.stdout.readline()))
        until = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < until:
            time.sleep(0.1)
        started.kill()
    gone, alive = psutil.wait_procs([other], timeout=30)
    assert ready.exists() and gone and not alive


def command(folder, project=False, **more):
    """Start a small training, by `mlflow run` if it is to be a `project`."""
    chosen = {"device": "cpu"} | {f"train.{name}": value for name, value in (SMALL | more).items()}
    words = [sys.executable, "-m", "qrl", "train"] + [
        word for name, value in chosen.items() for word in (f"--{name}", value)
    ]
    if project:
        words = [sys.executable, "-m", "mlflow", "run", str(pair.ROOT), "-e", "train", "--env-manager", "local"]
        words += [word for name, value in chosen.items() for word in ("-P", f"{name}={value}")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PYTHONPATH": str(pair.ROOT), "OMP_NUM_THREADS": "1", "PATH": path}
    return subprocess.Popen(
        words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


APART = """
import sys
from pathlib import Path
from qrl import process
process.prepare_process()
from qrl import tasks, tiny
from qrl.recipe import Train, rules
from qrl.train import Job, grpo
from qrl.train.qat import prepare

calibrate, rate, second = prepare.calibrate, 1e-5, process.rank() == 1


def tampered(model, batches):
    scales = calibrate(model, batches)
    scales["model.layers.0.mlp.up_proj"] *= 1.0001
    prepare.set_activation_scales(model, scales)
    return scales


if second and sys.argv[2] == "scale":
    prepare.calibrate = tampered
if second and sys.argv[2] == "recipe":
    rate = 2e-5
work = Path(sys.argv[1]) / str(process.rank())  # as on nodes that do not share a folder
settings = Train(qat="nvfp4-a4", steps=1, prompts_per_step=2, generations=2, micro_batch=2, max_completion_tokens=8,
                 qat_calibration_samples=2, learning_rate=rate)
data = {"base": tiny.PATH, "questions": tasks.load("arithmetic", "train", 4, 0), "task": "arithmetic"}
job = Job(settings=settings, template="plain", seed=0, device="cpu", work=work, out=work / "model", **data)
with process.sentences():
    grpo.run(job)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("tampered", "named"),
    [("scale", "activation scales"), pytest.param("recipe", "settings or questions", marks=pytest.mark.long)],
)
def test_processes_that_would_begin_apart_are_refused_before_the_first_step(tampered, named, tmp_path):
    done = pair.run(tmp_path, APART, tmp_path, tampered)
    sentences = [line for line in done.stderr.splitlines() if line.startswith("qrl: ")]
    assert done.returncode and sentences, done.stderr[-3000:]
    assert all(f"Process 1 of the training has other {named} than process 0: give" in line for line in sentences)
    assert not [*tmp_path.glob("*/checkpoint-*")] and not [*tmp_path.glob("*/model")]


def test_what_quantized_linears_compute_with_differs_by_name():
    from qrl import tiny
    from qrl.engine import hf
    from qrl.train.qat import linear, prepare

    def digests():
        return {name: parallel.digest(tensors) for name, tensors in prepare.state(model).items()}

    model = hf.load(tiny.PATH, "cpu", "float32")[0]
    linear.attach(model, "nvfp4-a4")
    scales = {path: 1.0 for path, _ in prepare.state(model)["folded weights"]}
    prepare.set_activation_scales(model, scales)
    before = digests()
    prepare.set_activation_scales(model, scales | {next(iter(scales)): 1.5})
    changed = [digests()]
    with_step = model.get_submodule(next(iter(scales))).weight
    with_step.data.mul_(2)
    linear.refold(model)
    changed.append(digests())
    different = [{name for name in before if before[name] != after[name]} for after in changed]
    assert different == [{"activation scales"}, {"activation scales", "folded weights"}]


@pytest.mark.slow
@pytest.mark.process
def test_a_training_starts_its_processes_and_the_first_alone_logs(store, tmp_path):
    import mlflow

    done = command(tmp_path, project=True)
    output, _ = done.communicate(timeout=600)
    (run,) = mlflow.search_runs(output_format="list")
    assert done.returncode == 0, output
    assert (run.info.status, run.data.params["processes"], run.data.params["train.parallel"]) == (
        "FINISHED",
        "2",
        "ddp",
    )
    assert output.count("Model   models:/") == 1


def ranks(pid: int) -> list[psutil.Process]:
    """Return the processes that train beside a first one, which also starts short-lived others before its run."""
    return children_with("qrl-ranks", pid)


@pytest.mark.slow
@pytest.mark.process
def test_sigterm_ends_all_processes_and_the_run(store, tmp_path):
    import mlflow

    started = command(tmp_path, steps="1000")
    until = time.monotonic() + 300
    while not (others := ranks(started.pid)) and time.monotonic() < until:
        time.sleep(0.2)
    started.send_signal(signal.SIGTERM)
    output, _ = started.communicate(timeout=120)
    psutil.wait_procs(others, timeout=60)
    assert started.returncode == 143 and others and not any(each.is_running() for each in others), output
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "KILLED"
