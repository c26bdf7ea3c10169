"""cluster.yaml and what becomes of it: scripts for sbatch, sentences for what does not fit."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from qrl import process, recipe
from qrl.cli import jobs as commands
from qrl.cli import main
from qrl.cluster import backend, config, driver, jobs, slurm
from qrl.cluster.slurm import Slurm
from qrl.engine import device
from qrl.errors import BadInput
from qrl.study import auto, preflight

SLURM = {
    "driver": "slurm",
    "shared": "/",
    "setup": ["module load cuda"],
    "defaults": {"partition": "cpu", "account": "lab", "time": "1:00:00", "memory": "16G"},
    "steps": {
        "train": {"partition": "gpu", "gpus": 2, "gpu": "h100", "cpus": 8, "options": {"constraint": "a&b"}},
        **{step: {"partition": "gpu", "gpus": 1} for step in ("merge", "quantize", "evaluate")},
    },
}
SERVER = "https://mlflow.example.org"
ENTRY_POINTS = ("main", "sweep", "train", "merge", "quantize", "evaluate", "diagnose", "compare", "promote")


def job(settings: dict, entry: str = "train", **parameters: str) -> driver.Job:
    return driver.Job(entry, process.ROOT, parameters, "0" * 32, Path("/shared/.qrl/jobs/run"), config.load(settings))


def flags(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_a_step_asks_for_its_own_resources():
    script = Slurm().script(job(SLURM, model="a b", data="$(id)"))
    asked = {"partition": "gpu", "account": "lab", "gres": "gpu:h100:2", "cpus-per-task": "8", "mem": "16G"}
    assert asked.items() <= flags(script).items()
    assert flags(script)["open-mode"] == "append"  # a job that is requeued keeps its first try's log
    assert flags(script)["constraint"] == "a&b" and flags(script)["time"] == "1:00:00" and "requeue" in flags(script)
    assert "module load cuda" in script.splitlines()
    (last,) = (line for line in script.splitlines() if line.startswith("exec "))
    assert shlex.split(last)[-4:] == ["-P", "model=a b", "-P", "data=$(id)"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert config.CHOSEN not in script


def test_a_study_submits_its_steps_unless_they_share_its_job():
    assert f"export {config.CHOSEN}=" in Slurm().script(job(SLURM, "main"))
    assert config.CHOSEN not in Slurm().script(job(SLURM | {"one_job": True}, "main"))


def test_several_nodes_train_through_srun_and_torchrun():
    wanted = job(SLURM | {"steps": {"train": {"nodes": 2, "gpus": 4}}}, **{"train.steps": "8"})
    script = Slurm().script(wanted)
    line = script.splitlines()[-1]
    assert wanted.cluster.processes() == 8  # as in the training's cache key
    assert flags(script)["nodes"] == "2" and " -- srun --kill-on-bad-exit=1 --nodes=2 " in line
    assert "SLURM_JOB_ID % 1000" in line  # a port of its own: two jobs may share a node
    assert "--nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d" in line and line.endswith("-m qrl train --train.steps 8")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("wanted", "seen", "refused"), [("auto", 1, True), ("cuda", 0, True), ("cuda", 2, False), ("cpu", 0, False)]
)
def test_a_step_counts_the_gpus_that_its_job_asked_for(wanted, seen, refused, monkeypatch):
    for nodes in (1, 2):
        script = Slurm().script(job(SLURM | {"steps": {"train": {"gpus": 2, "nodes": nodes}}}))
        assert " --gpus 2 " in script.splitlines()[-1]
    assert "--gpus" not in Slurm().script(job(SLURM | {"steps": {}}))
    monkeypatch.setenv(device.GPUS_VARIABLE, "2")
    assert device.GPUS_VARIABLE not in driver.environment()  # of a job that a study's job submits
    monkeypatch.setattr(device, "gpus", lambda _device: seen)
    monkeypatch.setattr(device, "_sees_gpu", lambda: seen > 0)
    if not refused:
        assert device.choose(wanted) == wanted
        return
    with pytest.raises(BadInput, match=rf"asks for 2 GPUs, but torch sees {seen} on node \S+: .*device=cpu"):
        device.choose(wanted)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shraed": "/"}, "'shraed' is unknown"),
        ({"driver": "pbs"}, "'driver' is 'pbs'"),
        ({"driver": "skypilot"}, "'driver' is 'skypilot': input should be 'slurm'"),
        ({"driver": None, "drivr": "slurm"}, "'drivr' is unknown: expected one of driver, "),
        ({"shared": None}, "'shared' is missing"),
        ({"defaults": {"partion": "gpu"}}, "'defaults.partion' is unknown"),
        ({"defaults": {"partition": "a b"}}, "'defaults.partition' is 'a b'"),
        ({"defaults": {"time": "soon"}}, "'defaults.time' is 'soon'"),
        ({"defaults": {"memory": "lots"}}, "'defaults.memory' is 'lots'"),
        ({"defaults": {"infra": "k8s"}}, "'defaults.infra' is unknown"),
        ({"steps": {"trian": {}}}, "'steps' has 'trian'"),
        ({"steps": {"train": {"gpu": 1, "gpus": -1}}}, "'steps.train.gpu"),
        ({"steps": {"train": {"options": {"wrap": "rm"}}}}, "'wrap' is not allowed"),
        ({"steps": {"train": {"options": {"comment": "a\n#SBATCH --wrap=x"}}}}, "control character"),
        ({"steps": {"train": {"gpus": 1}}}, "steps.merge asks for no GPU"),
        ({"steps": {"compare": {"nodes": 2}}}, "'steps.compare.nodes'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(change, sentence):
    with pytest.raises(BadInput) as refused:
        config.load(SLURM | change).check(ENTRY_POINTS, "main")
    assert sentence in str(refused.value) and str(refused.value).count("\n") == 0 and refused.value.exit_code == 2


def test_a_time_in_yaml_is_no_number(tmp_path):
    (tmp_path / "cluster.yaml").write_text("driver: slurm\nshared: /\ndefaults: {time: 1:00:00}\nsteps:\n")
    assert config.load(tmp_path / "cluster.yaml").resources("train").time == "1:00:00"
    with pytest.raises(BadInput, match="There is no"):
        config.load(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("settings", "address", "sentence"),
    [
        (SLURM, "http://localhost:5000", "cannot reach the store"),
        (SLURM | {"shared": "/nowhere"}, SERVER, "cannot see the checkout"),
        (SLURM | {"shared": str(process.ROOT)}, "sqlite:////nowhere/mlflow.db", "cannot see the store"),
        (SLURM | {"steps": {"train": {"nodes": 2}}}, SERVER, "set `python`"),
    ],
)
def test_what_the_nodes_cannot_reach(settings, address, sentence, monkeypatch):
    monkeypatch.setattr(jobs.mlflow, "get_tracking_uri", lambda: address)
    with pytest.raises(BadInput, match=sentence):
        jobs.prepared(config.load(settings), process.ROOT / "projects" / "vllm", "train", {})


def shown(
    entry: str, parameters: dict[str, str], capsys, settings: dict = SLURM, manager="uv"
) -> list[tuple[str, str]]:
    """Return what a dry run prints: the step, and the part that it makes, with the folder of the project it runs."""
    assert backend.start(config.load(settings), process.ROOT, entry, parameters, manager, dry=True) is None
    scripts = capsys.readouterr().out.split("# ---- ")[1:]
    found = []
    for script in scripts:
        title, _, body = script.partition("\n")
        subprocess.run(["bash", "-n"], input=body, text=True, check=True)
        words = shlex.split(next(line for line in body.splitlines() if line.startswith("exec ")))
        folder = Path(words[words.index("--project") + 1]) if "--project" in words else None
        assert folder in (None, process.ROOT) or f"in the environment of projects/{folder.name} " in title
        step = title.partition(" (--env")[0].partition(", in the")[0].partition(", with the")[0]
        found.append((step, folder and folder.name))
    return found


CORE = process.ROOT.name


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"recipe": "tiny"}, [("train", CORE), ("quantize nf4", CORE), ("quantize awq", "awq"), ("evaluate", CORE)]),
        (
            {"recipe": "tiny-lora", "quantize.schemes": "awq,nf4,gptq", "yes": "true"},
            [
                ("train", CORE),
                ("merge", CORE),
                ("quantize awq", "awq"),
                ("quantize nf4,gptq", CORE),
                ("evaluate", CORE),
            ],
        ),
        (
            {"rollout.engine": "vllm", "evaluate.engine": "vllm", "quantize.schemes": "nf4"},
            [("train", "vllm"), ("quantize nf4", CORE), ("evaluate", "vllm")],
        ),
        (
            {"rollout.engine": "vllm", "train.trainer": "verl", "quantize.schemes": "nf4"},
            [("train", "verl"), ("quantize nf4", CORE), ("evaluate", CORE)],
        ),
    ],
)
def test_a_dry_run_prints_the_script_of_each_job_in_its_environment(parameters, expected, monkeypatch, capsys):
    monkeypatch.setattr(jobs.mlflow, "get_tracking_uri", lambda: SERVER)
    rest = [("diagnose", CORE), ("compare", CORE), ("promote", CORE)]
    assert shown("main", parameters, capsys) == [("main", CORE), *expected, *rest]


def test_where_steps_have_no_gpu_their_jobs_evaluate_in_the_environment_for_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(jobs.mlflow, "get_tracking_uri", lambda: SERVER)
    on_cpu = SLURM | {"steps": {}}
    assert ("evaluate", "vllm_cpu") in shown("main", {"evaluate.engine": "vllm"}, capsys, on_cpu)
    assert ("evaluate", "vllm_cpu") in shown("main", {"evaluate.engine": "vllm", "device": "cpu"}, capsys)


def test_a_training_is_submitted_in_the_environment_that_a_study_would_take(monkeypatch, capsys):
    monkeypatch.setattr(jobs.mlflow, "get_tracking_uri", lambda: SERVER)
    vllm = {"rollout.engine": "vllm", "train.parallel": "ddp"}
    assert shown("train", vllm, capsys) == [("train", "vllm")]
    assert shown("train", {"train.steps": "2"}, capsys) == [("train", CORE)]
    nodes = SLURM | {"steps": {"train": {"nodes": 2, "gpus": 4}}}
    with pytest.raises(BadInput, match=r"set `python` in cluster\.yaml to the Python of .*projects/vllm"):
        shown("train", vllm, capsys, nodes)
    assert shown("train", vllm, capsys, nodes | {"python": "/shared/envs/vllm/bin/python"}) == [("train", None)]
    assert shown("train", vllm, capsys, nodes, manager="local") == [("train", None)]  # this Python, as all steps
    assert shown("train", {"train.steps": "2"}, capsys, nodes) == [("train", None)]
    with pytest.raises(BadInput, match="no recipe 'tinny'"):
        shown("train", {"recipe": "tinny"}, capsys)


def test_gpus_that_a_training_would_leave_idle_are_told(monkeypatch, capsys):
    monkeypatch.setattr(jobs.mlflow, "get_tracking_uri", lambda: SERVER)
    eight = SLURM | {"steps": SLURM["steps"] | {"train": {"gpus": 8}}}
    for entry, parameters, is_told in (
        ("train", {"train.steps": "2"}, True),
        ("main", {"recipe": "tiny"}, True),
        ("train", {"train.parallel": "ddp"}, False),
        ("diagnose", {}, False),
    ):
        backend.start(config.load(eight), process.ROOT, entry, parameters, "local", dry=True)
        told = capsys.readouterr().err
        assert ("steps.train asks for 8 GPUs, but this recipe trains on one" in told) == is_told


def test_a_dry_run_says_which_packages_a_shared_environment_needs(monkeypatch, capsys):
    monkeypatch.setattr(jobs.mlflow, "get_tracking_uri", lambda: SERVER)
    backend.start(config.load(SLURM), process.ROOT, "main", {"recipe": "tiny"}, "local", dry=True)
    assert "# ---- quantize awq, with the packages of projects/awq (--env-manager local)" in capsys.readouterr().out


PYXIS = {"runtime": "pyxis", "image": "nvcr.io#nvidia/pytorch:25.10-py3", "mounts": ["/data", "/raid/hf:/hf:ro"]}
APPTAINER = PYXIS | {"runtime": "apptainer", "image": "/shared/images/qrl.sif"}


def container(settings: dict, **more) -> dict:
    steps = {"train": {"gpus": 2, "cpus": 8, "container": settings} | more}
    return SLURM | {"shared": str(process.ROOT.parent), "steps": steps}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("settings", [PYXIS, APPTAINER])
def test_a_step_runs_in_an_image(settings, nodes, tmp_path):
    """The script's last line runs, with stand-ins for srun and apptainer that write down how they were called."""
    script = Slurm().script(job(container(settings, nodes=nodes), **{"train.steps": "2", "data": "a b"}))
    line = script.splitlines()[-1]
    words = shlex.split(line.replace("$(hostname)", "n1"))
    of_srun = words[words.index("srun") :] if "srun" in words else words[1:]
    shared = f"{process.ROOT.parent}:{process.ROOT.parent}"
    mounts = f"{shared},/data:/data,/raid/hf:/hf:ro"
    if settings is PYXIS:
        expected = [f"--container-image={PYXIS['image']}", f"--container-mounts={mounts}"]
        start = of_srun.index(expected[0])
        assert of_srun[start : start + 3] == [*expected, f"--container-workdir={process.ROOT}"]
        assert "--cpus-per-task=8" in of_srun[:start] and f"--nodes={nodes}" in of_srun[:start]
        inner = of_srun[start + 3 :]
    else:
        start = of_srun.index("apptainer")
        assert of_srun[start : start + 7] == ["apptainer", "exec", "--nv", "--bind", mounts, "--pwd", str(process.ROOT)]
        assert of_srun[start + 7] == APPTAINER["image"]
        inner = of_srun[start + 8 :]
    assert inner[:3] == ["python", "-m", "qrl" if nodes == 1 else "torch.distributed.run"]
    assert "a b" in line and ("data=a b" in inner or "a b" in inner)
    if nodes == 2:  # the command that calls srun runs beside the image
        assert words[1:4] == [sys.executable, "-m", "qrl"] and words.index("--") < words.index("srun")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)

    (tmp_path / "bin").mkdir()
    for name in ("srun", "apptainer"):
        stand_in = tmp_path / "bin" / name
        stand_in.write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >> {tmp_path}/called\n')
        stand_in.chmod(0o755)
    if nodes == 1:
        variables = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", line], env=variables, check=True)
        assert (tmp_path / "called").read_text().splitlines() == words[1:]


def test_a_studys_own_job_runs_beside_the_image_since_it_calls_sbatch():
    everywhere = SLURM | {"defaults": {"container": PYXIS}}
    assert "--container-image" not in Slurm().script(job(everywhere, "main"))
    assert "--container-image" in Slurm().script(job(everywhere, "compare"))
    assert "--container-image" in Slurm().script(job(everywhere | {"one_job": True}, "main"))
    assert "--nv" not in Slurm().script(job(SLURM | {"defaults": {"container": APPTAINER}}, "compare"))
    with pytest.raises(BadInput, match=r"'steps\.main\.container' is set, but a study's own job calls sbatch"):
        config.load(SLURM | {"steps": {"main": {"container": PYXIS}}}).check(ENTRY_POINTS, "main")


def test_an_image_has_its_own_python_unless_the_file_names_one():
    def python(**changes) -> str:
        line = Slurm().script(job(container(APPTAINER) | changes)).splitlines()[-1]
        return shlex.split(line.partition(APPTAINER["image"])[2])[0]

    assert python() == "python" and python(python="/opt/venv/bin/python") == "/opt/venv/bin/python"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"image": None}, "'steps.train.container.image' is missing: expected the image's name or file"),
        ({"runtime": None}, "'steps.train.container.runtime' is missing: expected pyxis or apptainer"),
        ({"runtime": "docker"}, "'steps.train.container.runtime' is 'docker'"),
        ({"image": "a b"}, "'steps.train.container.image' is 'a b'"),
        ({"image": "--privileged"}, "'steps.train.container.image' is '--privileged'"),
        ({"mounts": ["data"]}, "'steps.train.container.mounts.0' is 'data'"),
        ({"mounts": ["/a,/etc:/etc"]}, "'steps.train.container.mounts.0'"),
        ({"mount": ["/a"]}, "'steps.train.container.mount' is unknown: expected one of runtime, image, mounts"),
    ],
)
def test_an_image_that_does_not_fit_is_one_sentence(change, sentence):
    wanted = {key: value for key, value in (PYXIS | change).items() if value is not None}
    with pytest.raises(BadInput) as refused:
        config.load(container(wanted)).resources("train")
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_an_unknown_entry_point():
    with pytest.raises(BadInput, match="no entry point 'tarin'"):
        backend.start(config.load(SLURM), process.ROOT, "tarin", {}, "uv", dry=True)


def test_options_become_parameters():
    assert commands._parameters(("--a", "1", "--b=2", "--yes", "--c", "-1")) == {
        "a": "1",
        "b": "2",
        "yes": "true",
        "c": "-1",
    }
    with pytest.raises(BadInput, match="'x' is no option"):
        commands._parameters(("x",))
    for own in ("--cluster", "--dry-run"):  # else `submit` would take ./cluster.yaml, or submit
        with pytest.raises(BadInput, match=f"{own} is an option of `submit`: write it before the command"):
            commands._parameters(("--recipe", "math", own, "other.yaml"))


@pytest.mark.parametrize(("entry", "step"), [("main", "study"), ("train", "train")])
def test_an_option_that_the_job_would_refuse_is_refused_before_it_queues(entry, step, tmp_path, capsys):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(SLURM))
    words = ["submit", "--cluster", str(tmp_path / "cluster.yaml"), "--dry-run", entry]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--recipe=tiny", "--nosuch", "3"])
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (2, "")
    assert f"No such option '--nosuch'; see `python -m qrl {step} --help`." in shown.err


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: fatal: Could not establish a configuration source",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_slurm_that_is_away_is_no_mistake_in_cluster_yaml(said, tmp_path, monkeypatch):
    (program := tmp_path / "sbatch").write_text(f"#!/bin/sh\necho {shlex.quote(said)} >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BadInput, match=r"^Slurm cannot be reached from here \(.*\): submit from a node"):
        Slurm().submit(job(SLURM))


def test_a_study_learns_the_device_of_its_nodes(tmp_path, monkeypatch):
    (tmp_path / "cluster.json").write_text(json.dumps(SLURM))
    monkeypatch.setenv(config.CHOSEN, str(tmp_path / "cluster.json"))
    assert auto.device_of("auto") == "cuda" and auto.device_of("cpu") == "cpu"
    (tmp_path / "cluster.json").write_text(json.dumps(SLURM | {"steps": {}}))
    assert auto.device_of("auto") == "cpu"
    with pytest.raises(BadInput, match="no `gpus`"):
        auto.device_of("cuda")


CLUSTERS = {  # what a recipe and cluster.yaml say of one training
    "too few GPUs": ({"train.processes": "2"}, {"gpus": 1}, "asks for 1 GPU: raise steps.train.gpus"),
    "enough": ({"train.processes": "2"}, {"gpus": 2}, ""),
    "enough on two nodes": ({}, {"gpus": 1, "nodes": 2}, ""),
    "verl on two nodes": (
        {"train.trainer": "verl", "train.parallel": "fsdp2", "rollout.engine": "vllm", "train.micro_batch": "16"},
        {"gpus": 1, "nodes": 2},
        "",
    ),
    "verl on two nodes as copies": (
        {"train.trainer": "verl", "train.parallel": "none", "rollout.engine": "vllm"},
        {"gpus": 1, "nodes": 2},
        "divides the weights over 2 GPUs, but train.parallel = none: set train.parallel = fsdp2",
    ),
    "verl on GPUs that do not divide a step": (
        {"train.trainer": "verl", "train.parallel": "fsdp2", "rollout.engine": "vllm"},
        {"gpus": 5, "nodes": 1},
        "5 GPUs do not divide",
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_study_is_refused_before_it_submits_a_training_that_its_nodes_cannot_hold(name, tmp_path, monkeypatch):
    settings, resources, sentence = CLUSTERS[name]
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(SLURM | {"steps": SLURM["steps"] | {"train": resources}}))
    monkeypatch.setenv(config.CHOSEN, str(file))
    overrides = {"train.parallel": "ddp", "quantize.schemes": "nf4"} | settings
    with pytest.raises(BadInput) if sentence else contextlib.nullcontext() as refused:
        preflight.check(recipe.load("tiny", overrides), overrides)
    assert sentence in str(refused.value if sentence else "")


@pytest.mark.parametrize(
    ("line", "word", "node"),
    [
        ("JobId=1 JobState=PENDING Reason=Resources Restarts=0 NodeList=(null)", driver.WAITING, ""),
        ("JobId=1 JobState=COMPLETING Restarts=1 NodeList=n1 ExitCode=0:0", driver.RUNNING, "n1"),
        ("JobId=1 JobState=OUT_OF_MEMORY Restarts=0 NodeList=n2 ExitCode=0:125", "OUT_OF_MEMORY", "n2"),
    ],
)
def test_states_of_slurm(line, word, node):
    state = slurm._parsed(line)
    assert (state.word, state.node) == (word, node) and state.ended == word.isupper()


def test_accounting_is_asked_for_what_the_controller_has_forgotten(tmp_path, monkeypatch):
    """Programs of a site with slurmdbd, by what they print."""
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n"
    )
    (tmp_path / "sacct").write_text("#!/bin/sh\necho 'CANCELLED by 1000|0:15|n7'\n")
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Slurm().state("12") == driver.State("CANCELLED", "n7", "0:15")
    requeued = "#!/bin/sh\necho 'NODE_FAIL|0:0|n7'\necho 'COMPLETED|0:0|n8'\n"  # a row for each try
    (tmp_path / "sacct").write_text(requeued)
    assert Slurm().state("12") == driver.State("COMPLETED", "n8", "0:0")
    (tmp_path / "sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    assert Slurm().state("12").word == driver.VANISHED
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    assert Slurm().state("12") is None


def test_a_job_inherits_nothing_of_the_job_that_submits_it(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "MLFLOW_RUN_ID", config.CHOSEN, "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    assert {name for name in driver.environment() if name.startswith(("SLURM", "MLFLOW_RUN", "QRL_C"))} == {
        "SLURM_CONF"
    }
