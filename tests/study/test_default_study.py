"""The default study as a new user gets it: cold environments, nothing downloaded but packages, a lift that is there."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import qrl

ROOT = Path(qrl.__file__).parents[1]
pytestmark = [pytest.mark.study, pytest.mark.slow]


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
    done = subprocess.run(
        [sys.executable, "-m", "mlflow", "run", str(ROOT), "--env-manager", "uv", *request.param],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"the default study, environments included: {time.monotonic() - began:.0f} s")
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    import mlflow

    mlflow.set_tracking_uri(variables["MLFLOW_TRACKING_URI"])
    client = mlflow.MlflowClient()
    (study,) = client.search_runs(["0"], "tags.`qrl.step` = 'study'")
    yield client, study
    mlflow.set_tracking_uri(None)


def test_grpo_lifts_held_out_accuracy(default_study):
    _, study = default_study
    metrics = study.data.metrics
    print({key: round(value, 4) for key, value in metrics.items()})
    assert metrics["compare/delta_full_low"] > 0


def test_all_three_stages_are_earned(default_study):
    client, _ = default_study
    versions = [client.get_model_version_by_alias("qrl-tiny", stage).version for stage in ("base", "grpo", "awq")]
    assert list(map(int, versions)) == [1, 2, 3]


def test_the_table_says_whether_the_gain_survives(default_study):
    _, study = default_study
    table = json.loads(Path(study.info.artifact_uri.removeprefix("file://"), "table.json").read_text())
    for scheme in ("nf4", "awq"):
        assert table[scheme]["verdict"] in ("survives", "reduced", "lost", "inconclusive") and table[scheme]["reason"]
