"""What a study reports at its end: in the terminal, on its page and in its run's description."""

from datetime import UTC, datetime, timedelta

import mlflow
import pandas as pd
import pytest

from qrl import compare, names, recipe, registry
from qrl.errors import BadInput
from qrl.registry.history import Record
from qrl.registry.versions import Version
from qrl.steps import compare as steps_compare
from qrl.study import page, report
from qrl.study.launch import Launcher, Obtained, Result
from qrl.tracking import contents
from qrl.tracking.reuse import Outputs

COUNTS = {"n": 10000, "base": {"full": 6800, "nf4": 6500}, "grpo": {"full": 8200, "nf4": 7950}}


def test_the_ui_is_opened_on_the_store_that_was_used_from_any_folder():
    (line,) = report.look("sqlite:////elsewhere/a b/mlflow.db")
    assert "mlflow ui --backend-store-uri 'sqlite:////elsewhere/a b/mlflow.db', then http://127.0.0.1:5000" in line
    (whole,) = report.look("sqlite:///s.db", "/#/experiments/0/runs/1")
    assert whole.endswith("then http://127.0.0.1:5000/#/experiments/0/runs/1")
    assert report.look("http://tracking:5000") == []  # its run's page is printed at the end


def step(folder, tables: dict[str, pd.DataFrame], *, reused: bool = False, **values) -> Result:
    """Log a finished step's run with these tables beside the files of a folder."""
    (folder / names.FIGURES).mkdir(parents=True, exist_ok=True)
    (folder / names.FIGURES / f"{folder.name}.png").write_bytes(b"a picture")
    for name, frame in tables.items():
        frame.to_parquet(folder / name)
    with mlflow.start_run(nested=True) as run:
        contents.log_folder(folder)
    return Result(run.info.run_id, Outputs({}, sorted(tables), values), reused)


@pytest.fixture
def study(store, tmp_path):
    """The launcher of a study in its open run, and its steps compare, diagnose (without results) and train."""
    comparison = compare.from_counts(COUNTS)
    steps_compare.write(comparison, tmp_path / "compare")
    with mlflow.start_run(run_name="study") as run:
        steps = [
            step(tmp_path / "compare", {names.QUESTIONS: pd.DataFrame({"id": [1]})}, metrics=comparison.metrics()),
            step(tmp_path / "diagnose", {}, reused=True),
            step(tmp_path / "train", {names.HISTORY: pd.DataFrame({"step": [1, 2], "reward": [0.5, 0.6]})}),
        ]
        launcher = Launcher({}, run.info.run_id, 3)
        launcher.results = [
            Obtained(name, name, made) for name, made in zip(("compare", "diagnose", "train"), steps, strict=True)
        ]
        yield launcher, *steps


def test_a_studys_page_links_its_report_and_figures_and_marks_reused_steps(study):
    launcher, *steps = study
    report.show(recipe.load("tiny"), launcher)
    report.close(recipe.load("tiny"), launcher, 60.0, stage="awq")
    run = mlflow.get_run(launcher.run_id)
    text = run.data.tags["mlflow.note.content"]
    place = f"#/experiments/{run.info.experiment_id}/runs/{launcher.run_id}/artifacts"
    assert text.startswith("**The gain survives nf4")
    for file in (names.REPORT, names.TABLE_JSON, f"{names.FIGURES}/train.png", f"{names.FIGURES}/compare.png"):
        assert f"({place}/{file})" in text and contents.artifact(launcher.run_id, file).is_file()
    assert contents.artifact(launcher.run_id, names.TABLE_MD).read_text().strip() in text
    assert f"[diagnose](#/experiments/{run.info.experiment_id}/runs/{steps[1].run_id}) (reused)" in text
    assert steps[2].run_id in text and text.count("(reused)") == 1
    assert run.data.metrics["study/seconds"] == 60
    html = contents.artifact(launcher.run_id, names.REPORT).read_text()
    for part in ("qrl-tiny", "arithmetic", "10,000 held-out", "mlflow 3", "Verdicts</h2>", "Training</h2>"):
        assert part in html
    assert "Gates and versions" not in html  # none decided in this study


def test_a_refusal_is_on_the_page_and_nothing_is_offered_to_load(study, capsys):
    launcher, *_ = study
    report.show(recipe.load("tiny"), launcher)
    report.close(
        recipe.load("tiny"), launcher, 60.0, refused="Stage grpo is refused: No gain. The stage stays as it was."
    )
    html = contents.artifact(launcher.run_id, names.REPORT).read_text()
    assert "The gate refused grpo" in html and "No gain. The stage stays as it was." in html
    out = capsys.readouterr().out
    assert "Load " not in out
    *_, decided, last = out.strip().splitlines()
    assert decided == "Decided     grpo refused: No gain. The stage stays as it was."
    assert "The study is complete, and its results stand" in last


def test_gates_of_this_study_are_on_its_page_and_those_of_earlier_ones_are_not(study, monkeypatch):
    launcher, *_ = study

    def resolve(name, stage):
        if stage == "awq":
            raise BadInput("There is no version.")
        at = (datetime.now(UTC) - timedelta(days=stage == "base")).isoformat(timespec="seconds")
        gate = Record("promote", stage, 4, reasons=("Stage grpo passes: It gains.",), time=at)
        return Version(name, 4, "digest", "grpo", "full", stage, records=(gate,))

    monkeypatch.setattr(registry, "resolve", resolve)
    decided = page.gates(recipe.load("tiny"), launcher, "")
    assert [(gate.stage, gate.version, gate.cell, gate.decision, gate.reason) for gate in decided] == [
        ("grpo", "4", "grpo · full", "passed", "It gains.")
    ]


def test_a_description_that_would_be_cut_keeps_its_tables_and_steps(study, monkeypatch):
    launcher, *steps = study
    monkeypatch.setattr(page, "MAX_DESCRIPTION", 1000)
    report.show(recipe.load("tiny"), launcher)
    text = mlflow.get_run(launcher.run_id).data.tags["mlflow.note.content"]
    assert "| nf4 |" in text and "## Verdict" not in text and steps[2].run_id in text
