"""What a step asks of a store that has grown: rows and files are counted, not seconds."""

from pathlib import Path

import mlflow

from qrl import names
from qrl.tracking import keys, reuse, runs


def test_the_sweep_loads_no_failure_that_has_its_reason(store, monkeypatch):
    for place in range(5):
        with mlflow.start_run(tags={names.TAG_PID: "host:1:1"} | ({names.TAG_REASON: "It broke."} if place else {})):
            pass
        mlflow.MlflowClient().set_terminated(mlflow.last_active_run().info.run_id, "FAILED")
    loaded, search = [], mlflow.search_runs
    monkeypatch.setattr(mlflow, "search_runs", lambda **how: loaded.extend(found := search(**how)) or found)
    runs.dead_runs.sweep()
    assert [names.TAG_REASON in run.data.tags for run in loaded] == [False]


def test_what_differs_is_read_once_however_many_cells_ask(store, monkeypatch):
    for place in range(3):
        key = f"{place:064}"
        monkeypatch.setitem(keys.PARTS, key, {"step": "train", "train.steps": str(place)})
        with runs.step("train", tags={names.TAG_CACHE_KEY: key}):
            reuse.record_outputs()
    read, load = [], reuse.load_text
    monkeypatch.setattr(reuse, "load_text", lambda place: read.append(place) or load(place))
    monkeypatch.setitem(keys.PARTS, "wanted", {"step": "train", "train.steps": "9"})
    for _ in range(4):
        assert reuse.changes("train", "wanted") == ["train.steps 2 → 9"]
    assert len(read) == 3


def test_of_many_results_with_one_key_the_newest_is_loaded_alone(store, monkeypatch):
    for _ in range(4):
        with runs.step("train", tags={names.TAG_CACHE_KEY: "key"}) as made:
            mlflow.log_text("x", "a.txt")
            reuse.record_outputs(artifacts=["a.txt"])
    loaded, search = [], mlflow.search_runs
    monkeypatch.setattr(mlflow, "search_runs", lambda **how: loaded.extend(found := search(**how)) or found)
    assert reuse.find("train", "key").info.run_id == made.info.run_id and len(loaded) == 1
    Path(made.info.artifact_uri, "a.txt").write_text("changed")
    assert reuse.find("train", "key").info.run_id != made.info.run_id  # the one before it
