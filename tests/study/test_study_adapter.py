"""A small study that trains an adapter, in a store and a file of its own, so that it runs beside `test_study.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qrl
from qrl import names

pytestmark = [pytest.mark.study, pytest.mark.slow]

ROOT = Path(qrl.__file__).parents[1]
SMALL = {
    "train.method": "lora",
    "train.steps": "1",
    "train.prompts_per_step": "8",
    "train.micro_batch": "64",
    "quantize.schemes": "nf4",
    "evaluate.n": "64",
    "promote.min_gain": "-1",
}


def test_an_adapter_is_merged_on_its_way_through_the_study(tmp_path):
    import mlflow

    address = f"sqlite:///{tmp_path}/mlflow.db"
    words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    done = subprocess.run(
        [sys.executable, "-m", "qrl", "study", *words],
        env=os.environ | {"MLFLOW_TRACKING_URI": address},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[2/7] merge" in done.stderr
    client = mlflow.MlflowClient(address)

    def runs_of(step: str) -> list:
        return client.search_runs(["0"], f"tags.`{names.TAG_STEP}` = '{step}'")

    (merge,) = runs_of("merge")
    assert 0 <= merge.data.metrics["merge/kl"] <= 0.01
    assert 0 <= merge.data.metrics["merge/max_logit_diff"] <= 0.25
    merged = client.get_model_version_by_alias("qrl-tiny", "grpo").tags[names.TAG_DIGEST]
    assert merged != client.get_model_version_by_alias("qrl-tiny", "base").tags[names.TAG_DIGEST]
    quantized = [run.data.tags[names.TAG_PARENT_DIGEST] for run in runs_of("quantize") if run.outputs.model_outputs]
    assert merged in quantized  # what was quantized is the merged model, not the adapter
