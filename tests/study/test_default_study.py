"""The default study as a new user gets it: cold environments, nothing downloaded but packages, a lift that is there."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

import qrl
from qrl import names
from tests.ports import free_port

ROOT = Path(qrl.__file__).parents[1]
pytestmark = [pytest.mark.study, pytest.mark.slow]


def mlflow_run(variables: dict[str, str], *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mlflow", "run", str(ROOT), "--env-manager", "uv", *words]
    environment = os.environ | variables
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", params=[["-P", "evaluate.n=1000"], pytest.param([], marks=pytest.mark.long)])
def default_study(request):
    """One default study in environments that did not exist before, and its seconds."""
    folder = Path(tempfile.mkdtemp(prefix="qrl-default-"))  # not pytest's, which may be in memory: it takes 4 GB
    request.addfinalizer(lambda: shutil.rmtree(folder, ignore_errors=True))
    variables = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_ENV_ROOT": str(folder / "environments"),
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",  # a download would fail, so there is none
    }
    began = time.monotonic()
    done = mlflow_run(variables, *request.param)
    print(f"the default study, environments included: {time.monotonic() - began:.0f} s")
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    import mlflow

    mlflow.set_tracking_uri(variables["MLFLOW_TRACKING_URI"])
    client = mlflow.MlflowClient()
    (study,) = client.search_runs(["0"], "tags.`qrl.step` = 'study'")
    yield client, study, variables
    mlflow.set_tracking_uri(None)


def test_grpo_lifts_held_out_accuracy(default_study):
    _, study, _ = default_study
    metrics = study.data.metrics
    print({key: round(value, 4) for key, value in metrics.items()})
    assert metrics["compare/delta_full_low"] > 0


def test_all_three_stages_are_earned(default_study):
    client, _, _ = default_study
    versions = [client.get_model_version_by_alias("qrl-tiny", stage).version for stage in ("base", "grpo", "awq")]
    assert list(map(int, versions)) == [1, 2, 3]


def test_the_table_says_whether_the_gain_survives(default_study):
    _, study, _ = default_study
    table = json.loads(Path(study.info.artifact_uri.removeprefix("file://"), "table.json").read_text())
    for scheme in ("nf4", "awq"):
        assert table[scheme]["verdict"] in ("survives", "reduced", "lost", "inconclusive") and table[scheme]["reason"]


def test_awq_alone_is_handed_to_its_own_environment_under_the_run_that_was_opened(default_study):
    client, _, variables = default_study
    done = mlflow_run(variables, "-e", "quantize", "-P", "scheme=awq", "-P", "quantize.calibration_samples=4")
    assert done.returncode == 0, done.stderr[-3000:]
    newest = client.search_runs(["0"], max_results=2)
    made = next(run for run in newest if run.data.tags.get(names.TAG_VARIANT))
    opened = client.get_run(made.data.tags["mlflow.parentRunId"])
    assert opened.data.tags["mlflow.project.entryPoint"] == "quantize" and opened.info.status == "FINISHED"
    assert made.data.tags[names.TAG_SCHEME] == "awq" and made.outputs.model_outputs


def test_a_stage_is_served_and_answers(default_study):
    _, _, variables = default_study
    port = free_port()
    words = ["serve", "--stage", "awq", "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "qrl", *words],
        env=os.environ | variables,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert "qrl-tiny version 3" in line and f"http://127.0.0.1:{port}/v1" in line, process.stderr.read()
        served = re.search(r"model '(.*?)'", line)[1]
        body = {
            "model": served,
            "messages": [{"role": "user", "content": "Tom has 3 apples."}],
            "max_tokens": 16,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert isinstance(json.load(answer)["choices"][0]["message"]["content"], str)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode in (0, 143)
