"""Cells record which training made their model, also if one seed evaluates several; with the real MLflow."""

import json
import shutil

import pandas as pd
import pytest
from click.testing import CliRunner

from qrl import checkpoint, cli, names, tiny
from qrl.tracking import lineage, models

ASKED = [
    "--evaluate.n",
    "6",
    "--evaluate.max_new_tokens",
    "48",
    "--evaluate.min_parse_rate",
    "0",
    "--evaluate.min_eos_rate",
    "0",
    "--evaluate.max_truncation_rate",
    "1",
    "--device",
    "cpu",
]


def logged(tmp_path, name, step, *, parent=None, **params):
    """Log qrl-tiny's weights with a changed config, and so a digest of its own, as the model of a step."""
    import mlflow

    folder = tmp_path / name
    shutil.copytree(tiny.PATH, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"note": name}))
    digest = checkpoint.digest(folder)
    with mlflow.start_run(tags={names.TAG_STEP: step}) as run:
        mlflow.log_params(params)
        metadata = {"parent": parent} if parent else {}
        uri, _ = models.log_checkpoint(
            folder,
            name=name,
            digest=digest,
            variant="grpo",
            scheme="full",
            task="arithmetic",
            move=False,
            metadata=metadata,
        )
    return uri, digest, run.info.run_id


@pytest.fixture
def trained(store, tmp_path):
    base = checkpoint.digest(tiny.PATH)
    return {seed: logged(tmp_path, f"trained-{seed}", "train", parent=base, seed=seed) for seed in (3, 4)}


def test_a_models_training_is_found_through_quantizing_and_merging_and_a_base_has_none(trained, tmp_path):
    assert {lineage.training_seed(uri) for uri, _, _ in trained.values()} == {3, 4}
    quantized, _, _ = logged(tmp_path, "quantized", "quantize", parent=trained[4][1], seed=99)
    assert lineage.training_seed(quantized) == 4
    merged, _, _ = logged(
        tmp_path, "merged", "merge", parent="of the base", adapter=f"runs:/{trained[3][2]}/adapter", seed=99
    )
    assert lineage.training_seed(merged) == 3
    given, _, _ = logged(tmp_path, "given", "evaluate", seed=99)
    assert lineage.training_seed(given) is None
    assert lineage.training_seed("models:/m-none") is None


@pytest.mark.slow
def test_cells_of_two_trainings_evaluated_under_one_seed_are_two_seeds_on_the_same_questions(trained):
    import mlflow

    cells = [f"grpo:full={trained[3][0]}", f"grpo:full={trained[4][0]}", f"base:full={tiny.PATH}"]
    for cell in cells:
        done = CliRunner().invoke(
            cli.cli, ["evaluate", "--cells", cell, "--seed", "7", "--evaluate.samples", "2", *ASKED]
        )
        assert done.exit_code == 0, (done.output, done.exception)
    runs = [run for run in mlflow.MlflowClient().search_runs(["0"]) if names.ACCURACY in run.data.metrics]
    assert all(run.data.metrics[names.N] == 6 and "eval/pass_at_2" in run.data.metrics for run in runs)
    rows = pd.concat(
        [
            pd.read_parquet(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=names.QUESTIONS))
            for run in runs
        ]
    )
    assert set(rows["question_seed"]) == {7} and len(rows) == 3 * 6 * 2
    assert rows.groupby("variant")["seed"].unique().map(set).to_dict() == {"base": {7}, "grpo": {3, 4}}
    done = CliRunner().invoke(cli.cli, ["compare", "--cells", ",".join(run.info.run_id for run in runs)])
    assert done.exit_code == 0 and "All 2 seeds answered the same questions" in done.output and "pass@2" in done.output
