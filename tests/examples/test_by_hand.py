"""The study by hand runs from top to bottom and ends with a verdict."""

import subprocess
import sys

import pandas as pd
import pytest

QUESTIONS = 24


@pytest.mark.slow
@pytest.mark.process
def test_the_study_by_hand_trains_quantizes_evaluates_and_compares(tmp_path):
    out = tmp_path / "study"
    script = [sys.executable, "-m", "qrl.examples.by_hand"]
    options = ["--steps", "1", "--questions", str(QUESTIONS), "--out", str(out)]
    done = subprocess.run([*script, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    for folder in ("grpo", "base-nf4", "grpo-nf4"):
        assert (out / folder / "model.safetensors").is_file()
    answers = pd.read_parquet(out / "questions.parquet")
    answers_per_cell = answers.groupby(["variant", "scheme"]).question.nunique()
    assert answers_per_cell.to_dict() == dict.fromkeys(
        [("base", "full"), ("base", "nf4"), ("grpo", "full"), ("grpo", "nf4")], QUESTIONS
    )

    table_rows = [line for line in done.stdout.splitlines() if line.startswith("| nf4 |")]
    assert table_rows and "**" in table_rows[0]  # the verdict
