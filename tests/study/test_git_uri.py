"""`mlflow run GIT-URI`: MLflow clones the project into a temporary folder, and nothing of a user's is lost with it."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest

from qrl import process

BRANCH = "as-it-is"
SMALL = {
    "train.steps": "12",
    "train.prompts_per_step": "4",
    "train.generations": "4",
    "train.save_every": "2",
    "device": "cpu",
}


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=Ann", "-c", "user.email=ann@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """The address at which a git server has this checkout's files as they are now, on the branch `BRANCH`."""
    served = tmp_path_factory.mktemp("served")
    if shutil.which("git") is None or not (process.ROOT / ".git").exists():
        pytest.skip("the tests are not in a git checkout, whose files a server could have")
    repository = served / "qrl"
    repository.mkdir()
    names = git(process.ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, names):
        if (process.ROOT / name).is_file():  # it may have been deleted
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(process.ROOT / name, repository / name)
    git(repository, "init", "-q", "-b", "main")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "as it is")
    git(repository, "branch", BRANCH)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--export-all", f"--base-path={served}", "--listen=127.0.0.1", f"--port={port}", "--reuseaddr"]
    daemon = subprocess.Popen(["git", "daemon", *words], start_new_session=True)
    try:
        for _ in range(100):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert daemon.poll() is None, "git has no daemon here"
            time.sleep(0.1)
        yield f"git://127.0.0.1:{port}/qrl"
    finally:
        os.killpg(daemon.pid, signal.SIGTERM)
        daemon.wait()


@pytest.fixture
def user(empty_database, tmp_path) -> Path:
    """A user's folder, with an empty store."""
    folder = tmp_path / "user"
    folder.mkdir()
    shutil.copyfile(empty_database, folder / "mlflow.db")
    return folder


def mlflow_run(user: Path, address: str, step: str, **parameters: str) -> subprocess.Popen:
    """`mlflow run` of a branch, as it is typed in a user's folder; its output goes to a file there."""
    given = [word for key, value in parameters.items() for word in ("-P", f"{key}={value}")]
    options = ["-v", BRANCH, "-e", step, "--env-manager", "local", "--experiment-name", "my sums"]
    return start(user, "-m", "mlflow", "run", address, *options, *given)


def start(user: Path, *words: str) -> subprocess.Popen:
    """Start Python in a user's folder, with a cache and a temporary folder beside it; its output goes to a file."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "QRL_"))}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", os.defpath)))
    environment["XDG_CACHE_HOME"] = str(user.parent / "cache")
    environment["TMPDIR"] = str(user.parent / "temporary")
    (user.parent / "temporary").mkdir(exist_ok=True)
    with (user / "terminal.txt").open("w") as terminal:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=user,
            env=environment,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )


@pytest.mark.slow
def test_a_training_that_was_killed_resumes_and_names_the_next_command(user, address):
    checkpoints = user.parent / "cache" / "qrl"
    killed = mlflow_run(user, address, "train", **SMALL)
    while not list(checkpoints.glob("train-*/trainer/checkpoint-*/trainer_state.json")):
        assert killed.poll() is None, (user / "terminal.txt").read_text()[-3000:]
        time.sleep(0.1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()

    assert mlflow_run(user, address, "train", **SMALL).wait() == 0, (user / "terminal.txt").read_text()[-3000:]
    printed = (user / "terminal.txt").read_text()
    assert "Resumed from the checkpoint of step" in printed
    (line,) = [line for line in printed.splitlines() if " -e quantize " in line]
    repeated = f"-m mlflow run {address} -v {BRANCH} -e quantize --env-manager local --experiment-name 'my sums' -P "
    assert repeated in line and shlex.split(line)

    assert not list(checkpoints.glob("train-*"))  # it has ended
    assert not list((user.parent / "temporary").glob("*/.qrl"))
    assert not list(user.glob("*.lock"))
    client = mlflow.MlflowClient(f"sqlite:///{user}/mlflow.db")
    experiment = client.get_experiment_by_name("my sums")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.status for run in runs) == ["FINISHED", "KILLED"]


@pytest.mark.slow
@pytest.mark.process
def test_relative_paths_count_from_the_users_folder(user, address):
    (user / "answers.jsonl").write_text('{"completion": "So #### 4", "answer": "4"}\n')
    graded = mlflow_run(user, address, "grade", task="gsm8k", file="answers.jsonl", out="graded.jsonl")
    assert graded.wait() == 0, (user / "terminal.txt").read_text()[-3000:]
    assert '"strict": true' in (user / "graded.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.process
def test_a_project_that_python_runs_works_in_the_callers_folder_and_names_its_address(user, address):
    cells = [{"variant": variant, "scheme": "full"} for variant in ("base", "grpo")]
    answered = {"completion": "So #### 4", "answer": "4"}
    rows = [cell | {"question": question} | answered for cell in cells for question in ("a", "b")]
    (user / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    called = f"""
import mlflow
parameters = {{"task": "gsm8k", "file": "answers.jsonl", "out": "graded.jsonl"}}
mlflow.projects.run("{address}", "grade", version="{BRANCH}", env_manager="local", parameters=parameters)
"""
    assert start(user, "-c", called).wait() == 0, (user / "terminal.txt").read_text()[-3000:]
    assert (user / "graded.jsonl").exists()
    assert f"mlflow run {address} -e compare --experiment-id 0 -P " in (user / "terminal.txt").read_text()
