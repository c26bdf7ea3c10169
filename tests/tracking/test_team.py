"""A team's store: MLflow with basic auth on PostgreSQL and S3, two users at once, rights, and what doctor says."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

import qrl
from tests.ports import free_port
from tests.tracking import team

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not team.postgres(), reason="PostgreSQL's initdb is not installed"),
    pytest.mark.skipif(not shutil.which("uvx"), reason="uvx, which runs the servers, is not installed"),
]
ROOT = Path(qrl.__file__).parents[1]
SMALL = ["--train.steps", "1", "--evaluate.n", "40", "--quantize.schemes", "nf4", "--yes"]
LOAD = "import qrl, sys; print(type(qrl.load('ann-tiny', sys.argv[1])[0]).__name__, qrl.resolve('ann-tiny', 'base'))"
PASSWORD = "{}-long-password"


def run(folder: Path, variables: dict[str, str], *words: str) -> subprocess.CompletedProcess:
    """Run a program of Python as a user, in a folder of the user's."""
    folder.mkdir(exist_ok=True)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")}
    environment = inherited | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )


@pytest.mark.long
def test_two_users_study_at_once_and_rights_decide_who_loads_and_serves(tmp_path):
    with team.serving(tmp_path) as server:
        users = {}
        for name in ("ann", "bob", "eve"):
            team.add_user(server, name, PASSWORD.format(name))
            users[name] = team.login(server, name, PASSWORD.format(name)) | {"MLFLOW_EXPERIMENT_NAME": name}
        done = {}

        def study(name: str) -> None:
            options = [*SMALL, "--registered_name", f"{name}-tiny"]
            done[name] = run(tmp_path / name, users[name], "-m", "qrl", "study", *options)

        both = [threading.Thread(target=study, args=(name,)) for name in ("ann", "bob")]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        for name, result in done.items():  # one step of GRPO may gain nothing: its gate decides, and base stands
            assert result.returncode in (0, 3), result.stderr[-3000:]
            assert f"base is version 1 of {name}-tiny" in result.stdout + result.stderr
        kept = list((tmp_path / "ann" / ".qrl" / "models").glob("*/model/model.safetensors"))
        assert len(kept) >= 4 and not list((tmp_path / "ann" / ".qrl").glob("train-*"))
        lines = (tmp_path / "server.log").read_text().splitlines()
        fetches = [line for line in lines if '"GET' in line and "model.safetensors" in line]
        assert len(fetches) <= 2, (
            fetches
        )  # the base of each, a folder of ours that was copied; nothing that a step made

        loaded = run(tmp_path / "ann", users["ann"], "-c", LOAD, "base")
        assert "Qwen2ForCausalLM ann-tiny version 1" in loaded.stdout, loaded.stderr
        refused = run(tmp_path / "eve", users["eve"], "-c", LOAD, "base")
        assert refused.returncode == 1 and "denies eve" in refused.stderr and "READ to load" in refused.stderr
        nobody = run(tmp_path / "eve", team.login(server), "-m", "qrl", "serve", "--stage", "base")
        assert nobody.returncode == 2 and "does not accept requests without a user" in nobody.stderr
        examined = run(tmp_path / "bob", users["bob"], "-m", "qrl", "doctor", "--registered_name", "ann-tiny")
        assert examined.returncode == 1, examined.stdout + examined.stderr
        lacks = [line for line in examined.stdout.splitlines() if line.startswith("lacks")]
        assert len(lacks) == 1 and "ann-tiny" in lacks[0] and "EDIT to write" in lacks[0]
        assert examined.stdout.count("ok ") >= 9
        well = run(tmp_path / "ann", users["ann"], "-m", "qrl", "doctor", "--registered_name", "ann-tiny")
        assert well.returncode == 0 and "Nobody gets in without a user" in well.stdout

        ann = ("ann", PASSWORD.format("ann"))
        team.grant(server, ann, "bob", "READ", "registered_model", "ann-tiny")
        team.grant(server, ann, "bob", "READ", "experiment", team.experiment(server, ann, "ann"))
        check_served(tmp_path / "bob", users["bob"])


PARTS = {f"MLFLOW_MULTIPART_{way}_MINIMUM_FILE_SIZE": "1000000" for way in ("UPLOAD", "DOWNLOAD")}  # the model has 5 MB


def test_a_model_passes_the_server_in_parts_once_and_nobody_without_rights_promotes_or_serves_it(tmp_path):
    with team.serving(tmp_path) as server:
        for name in ("ann", "eve"):
            team.add_user(server, name, PASSWORD.format(name))
        ann, eve = (team.login(server, name, PASSWORD.format(name)) for name in ("ann", "eve"))
        ann |= PARTS | {"MLFLOW_EXPERIMENT_NAME": "ann"}
        named = ["--registered_name", "ann-tiny"]
        made = run(tmp_path / "ann", ann, "-m", "qrl", "evaluate", "--evaluate.n", "40", *named)
        assert made.returncode == 0, made.stderr[-3000:]
        promote = [
            "-m",
            "qrl",
            "promote",
            "--stage",
            "base",
            "--cell",
            re.search(r"--cell (\w+)", made.stdout)[1],
            *named,
        ]
        done = run(tmp_path / "ann", ann, *promote)
        assert done.returncode == 0, done.stderr[-3000:]
        for _ in range(2):
            loaded = run(tmp_path / "elsewhere", ann, "-c", LOAD, "base")
            assert "Qwen2ForCausalLM ann-tiny version 1" in loaded.stdout, loaded.stderr
        server_log, s3_log = ((tmp_path / f"{name}.log").read_text().splitlines() for name in ("server", "s3"))
        about = [line for line in server_log if "mlflow-artifacts" in line and "model.safetensors" in line]
        assert about and all("/presigned/" in line for line in about), about  # no byte of it passed the server
        parts, got = (
            [line for line in s3_log if each in line and "model.safetensors" in line] for each in ("PUT", "GET")
        )
        assert len(parts) == 1 and "partNumber=1" in parts[0], parts
        assert len(got) == 2, got  # once for each folder, however often it is loaded there
        for words in (
            promote,
            ["-m", "qrl", "serve", "--stage", "base", *named],
            ["-m", "qrl", "study", *SMALL, *named],
        ):
            refused = run(tmp_path / "eve", eve, *words)
            assert refused.returncode in (1, 2) and "denies eve" in refused.stderr, refused.stderr[-3000:]
            assert "Traceback" not in refused.stderr and len(refused.stderr) < 2000


def check_served(folder: Path, variables: dict[str, str]) -> None:
    """Check that a user can serve a stage of a model that another user owns."""
    port = str(free_port())
    options = ["--stage", "base", "--registered_name", "ann-tiny", "--port", port]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", "qrl", "serve", *options]
    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert "Serving ann-tiny version 1" in "".join(server.stdout.readline() for _ in range(2))
        body = {"model": "ann-tiny@1", "messages": [{"role": "user", "content": "Tom has 3 apples and buys 12 more."}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def test_doctor_names_what_an_open_server_lacks(tmp_path):
    with team.serving(tmp_path, auth=False, jobs=True, allowed=False) as server:
        examined = run(tmp_path / "ann", team.login(server), "-m", "qrl", "doctor")
    assert examined.returncode == 1 and "lacks 3 things" in examined.stderr, examined.stdout + examined.stderr
    for words in ("--app-name basic-auth", "--allowed-hosts 127.0.0.1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false"):
        assert words in examined.stdout
