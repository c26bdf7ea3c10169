"""Tracking, with the real MLflow on a store in a temporary folder."""

import contextlib
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlflow
import pandas as pd
import psutil
import pytest
import sqlalchemy
import sqlalchemy.orm
from mlflow.protos.databricks_pb2 import UNAUTHENTICATED
from mlflow.store.tracking.dbmodels.models import SqlDataset

import qrl
from qrl import checkpoint, names, recipe, registry
from qrl.engine import hf
from qrl.errors import BadInput, GateRefused, QrlError, first_line
from qrl.tasks import prompt
from qrl.tracking import (
    cells,
    contents,
    dead_runs,
    description,
    keys,
    models,
    owners,
    projects,
    reuse,
    runs,
    signals,
    sources,
    store_errors,
)
from qrl.tracking import store as stores

ROOT = Path(qrl.__file__).parents[1]


def status(run: str | mlflow.ActiveRun) -> str:
    return mlflow.get_run(run if isinstance(run, str) else run.info.run_id).info.status


def reason(run: str | mlflow.ActiveRun) -> str:
    return mlflow.get_run(run if isinstance(run, str) else run.info.run_id).data.tags[names.TAG_REASON]


# store


@pytest.mark.parametrize("address", [None, "sqlite:///mlflow.db", "sqlite:///{here}/mlflow.db"])
def test_prepare_makes_the_address_absolute_for_children(store, monkeypatch, address):
    here = Path.cwd()
    mlflow.set_tracking_uri(None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address.format(here=here))
    assert stores.prepare() == f"sqlite:///{here}/mlflow.db" == os.environ["MLFLOW_TRACKING_URI"]
    assert mlflow.get_tracking_uri() == f"sqlite:///{here}/mlflow.db"


@pytest.mark.slow
@pytest.mark.process
def test_processes_that_race_for_a_cold_store_all_get_it(tmp_path):
    program = (
        "from qrl.tracking import store; import mlflow; store.prepare();"
        "print(mlflow.get_experiment('0').artifact_location)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert {racer.communicate()[0].strip() for racer in racers} == {str(tmp_path / "mlruns" / "0")}


@pytest.mark.parametrize(
    "address",
    [
        *("./mlruns", "sqlite:////proc/none/mlflow.db", "sqlite:///text.db", "http://127.0.0.1:9"),
        *("sqlite://", "sqlite:///:memory:", "sqlite+pysqlite:///:memory:?timeout=9"),
    ],
)
def test_a_store_that_cannot_be_used_gets_a_sentence(store, monkeypatch, address):
    Path("text.db").write_text("this is no database, only a text that is longer than sqlite's header " * 40)
    mlflow.set_tracking_uri(None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    with pytest.raises(BadInput, match="MLFLOW_TRACKING_URI"):
        stores.prepare()


@pytest.mark.parametrize("address", ["sqlite:///a.db?timeout=9", "sqlite+pysqlite:///a.db"])
def test_a_store_is_the_same_with_options_or_a_dialect_in_its_address(store, monkeypatch, address, tmp_path):
    mlflow.set_tracking_uri(None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert not stores.is_there()
    assert stores.prepare() == address.replace(":///", f":///{Path.cwd()}/")
    assert stores.is_there() and stores.database_of(stores.prepare()) == Path("a.db").absolute()


def test_a_full_disk_gets_a_sentence_in_the_middle_of_a_step(store):
    with pytest.raises(BadInput, match="No space left"), runs.step("train") as run:
        raise OSError(28, "No space left on device", "/dev/full")
    assert status(run) == "FAILED" and "No space left" in reason(run)
    copying = OSError(28, "No space left on device", "from/model.safetensors", None, "to/model.safetensors")
    assert "to/model.safetensors" in str(store_errors.explain(copying))


def test_an_experiment_that_was_deleted_is_named_with_the_way_back(store):
    mlflow.MlflowClient().delete_experiment("0")
    with pytest.raises(BadInput, match=r"experiment 0 of .* was deleted: .*mlflow experiments restore"), runs.step("a"):
        pass


# runs


def test_a_step_ends_finished_and_logs_its_recipe(store):
    with runs.step("train", recipe.load(), sections=("train",), tags={names.TAG_VARIANT: "grpo"}) as run:
        pass
    run = mlflow.get_run(run.info.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == recipe.load().flat("train") | {"prompt_hash": prompt.template_hash("plain")}
    assert run.data.tags[names.TAG_STEP] == "train" and run.data.tags[names.TAG_VARIANT] == "grpo"
    assert mlflow.get_experiment(run.info.experiment_id).tags["mlflow.experimentKind"] == "custom_model_development"


def test_a_step_joins_the_run_that_mlflow_opened_and_leaves_its_params_alone(store, monkeypatch):
    client = mlflow.MlflowClient()
    opened = client.create_run("0").info.run_id
    client.log_param(opened, "train.learning_rate", "1e-5")
    monkeypatch.setenv("MLFLOW_RUN_ID", opened)
    with runs.step("train", recipe.load(overrides={"train.learning_rate": "1e-5"}), sections=("train",)) as run:
        assert run.info.run_id == opened
    params = mlflow.get_run(opened).data.params
    assert params["train.learning_rate"] == "1e-5" and params["train.steps"] == str(recipe.load().train.steps)


def test_a_run_that_is_not_there_gets_a_sentence(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with pytest.raises(BadInput, match="unset it"), runs.step("train"):
        pass


@pytest.mark.parametrize(
    ("error", "ended", "says"),
    [
        (QrlError("The cell broke a limit."), "FAILED", "The cell broke a limit."),
        (ZeroDivisionError("division by zero\nand more"), "FAILED", "ZeroDivisionError: division by zero"),
        (signals.Stopped(signal.SIGTERM), "KILLED", "Stopped by SIGTERM."),
    ],
)
def test_however_a_step_ends_its_run_says_so(store, error, ended, says):
    with pytest.raises((type(error), SystemExit)) as raised, runs.step("train") as run:
        raise error
    assert status(run) == ended and reason(run) == says
    if ended == "KILLED":
        assert raised.value.code == 143


@pytest.mark.parametrize("opened_by", ["python -m qrl", "mlflow run"])
def test_a_gates_refusal_is_a_result_and_the_run_finishes_with_a_verdict(store, opened_by):
    tags = {"mlflow.project.env": "uv"} if opened_by == "mlflow run" else {}
    with pytest.raises(GateRefused), runs.step("promote", tags=tags) as run:
        contents.describe("- base is version 1.")
        raise GateRefused("The gain is not above 0.")
    tags = mlflow.get_run(run.info.run_id).data.tags
    assert status(run) == "FINISHED" and reason(run) == "The gain is not above 0."
    assert tags[names.TAG_VERDICT] == "refused" and tags[names.TAG_EXIT_CODE] == "3"
    page = tags["mlflow.note.content"]
    assert page.startswith("**The gain is not above 0.**") and page.endswith("- base is version 1.")
    assert ("MLflow calls this run FAILED" in page) == (opened_by == "mlflow run")


@pytest.mark.parametrize("how", ["killed", "refused", "failed", "not begun"])
def test_a_launched_step_has_one_end_and_one_reason(store, how):
    parent = mlflow.MlflowClient().create_run("0").info.run_id
    launched = projects.open_child(parent, "train")
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(QrlError):
        patch.setenv("MLFLOW_RUN_ID", launched)
        if how != "not begun":
            with runs.step("train"):
                if how == "killed":
                    patch.setattr(runs, "_end", lambda *_: None)
                raise GateRefused("No gain.") if how == "refused" else QrlError("It failed.")
    mlflow.MlflowClient().set_terminated(launched, "FAILED")  # as MLflow calls every run with an exit code
    while mlflow.active_run():
        mlflow.end_run("FAILED")
    found, code = projects.failure(launched)
    ends = {"killed": ("KILLED", dead_runs.DIED, None), "refused": ("FINISHED", "No gain.", 3)}
    ends |= {"failed": ("FAILED", "It failed.", 1), "not begun": ("FAILED", projects.NOT_BEGUN, None)}
    assert (status(launched), found, code) == ends[how]
    assert reason(launched) == found


@pytest.mark.parametrize(
    ("metrics", "tags", "expected"),
    [
        ({names.SECONDS: 1.0}, {}, "FINISHED"),  # a server that was stopped
        ({}, {names.TAG_REASON: "Stopped by SIGINT.", names.TAG_EXIT_CODE: "130"}, "KILLED"),
        ({}, {names.TAG_REASON: "It failed.", names.TAG_EXIT_CODE: "1"}, "FAILED"),
    ],
)
def test_what_mlflow_run_called_failed_after_a_signal_is_put_right_by_the_next_command(store, metrics, tags, expected):
    client, dead = mlflow.MlflowClient(), owners.this_process().rpartition(":")[0] + ":1"
    run = client.create_run("0", tags={names.TAG_PID: dead, **tags}).info.run_id
    for name, value in metrics.items():
        client.log_metric(run, name, value)
    client.set_terminated(run, "FAILED", 5)
    assert dead_runs.sweep() == []
    found = client.get_run(run)
    assert (found.info.status, found.info.end_time) == (expected, 5)
    assert found.data.tags.get(names.TAG_REASON) == tags.get(names.TAG_REASON)


def test_a_failing_cell_fails_alone(store):
    model = mlflow.initialize_logged_model("m")
    with runs.step("evaluate") as parent:
        dataset = contents.log_dataset(
            "arithmetic-heldout", digest="d" * 64, context="heldout", n=10, source="generated"
        )
        for scheme in ("full", "nf4"):
            try:
                with runs.child(names.cell_name("base", scheme), params={"scheme": scheme}) as cell:
                    contents.log_scores({names.ACCURACY: 0.5}, model_uri=f"models:/{model.model_id}", dataset=dataset)
                    if scheme == "nf4":
                        raise QrlError("Too many answers were cut.")
            except QrlError:
                pass
    assert status(parent) == "FINISHED" and status(cell) == "FAILED" and reason(cell) == "Too many answers were cut."
    assert mlflow.get_run(cell.info.run_id).data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert {metric.run_id for metric in mlflow.get_logged_model(model.model_id).metrics} >= {cell.info.run_id}
    assert mlflow.get_run(parent.info.run_id).inputs.dataset_inputs[0].dataset.name == "arithmetic-heldout"


def test_live_metrics_go_to_the_run_and_a_line_each_to_a_file_that_a_kill_cannot_break(store, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "time": 1.0, "train/loss": 0.5}\n{"step": 2, "tra')  # a killed process wrote
    with mlflow.start_run() as run:
        log = contents.live_log(file)
        log({"train/loss": 0.25, "train/kl": math.nan, "train/grad_norm": math.inf}, 2)
        log({"probe/n": 128}, 2)
        elsewhere = contents.live_log(tmp_path / "absent" / "metrics.jsonl")  # a folder that is gone ends no training
        elsewhere({"train/loss": 0.125}, 3)
    lines = file.read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 2] and abs(rows[-1]["time"] - time.time()) < 60
    assert {key: row for key, row in rows[1].items() if key != "time"} == {
        "step": 2,
        "train/loss": 0.25,
        "train/kl": None,
        "train/grad_norm": None,
    }
    assert rows[2]["probe/n"] == 128
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(2, 0.25), (3, 0.125)]


def test_a_dataset_that_another_process_inserts_at_the_same_moment_is_logged(store):
    inserted = []

    def insert_first(session, *_):
        for row in [row for row in session.new if isinstance(row, SqlDataset) and not inserted]:
            inserted.append(row.name)
            with sqlite3.connect(store.removeprefix("sqlite:///")) as other:
                columns = ("dataset_uuid", "experiment_id", "name", "digest", "dataset_source_type", "dataset_source")
                values = ["another", *(getattr(row, column) for column in columns[1:])]
                other.execute(f"INSERT INTO datasets ({', '.join(columns)}) VALUES (?, ?, ?, ?, ?, ?)", values)

    sqlalchemy.event.listen(sqlalchemy.orm.Session, "before_flush", insert_first)
    try:
        with runs.step("evaluate") as run:
            contents.log_dataset("arithmetic-heldout", digest="e" * 64, context="heldout", n=10, source="generated")
    finally:
        sqlalchemy.event.remove(sqlalchemy.orm.Session, "before_flush", insert_first)
    (logged,) = mlflow.get_run(run.info.run_id).inputs.dataset_inputs
    assert inserted == [logged.dataset.name]


def score_a_model() -> None:
    model = mlflow.MlflowClient().create_logged_model("0")
    contents.log_scores({"accuracy": 0.5}, model_uri=f"models:/{model.model_id}")


LATE = {  # what a step writes: the statement that finds the store locked, what the run holds then, and who writes it
    "params": ("INSERT INTO params", "device", lambda: contents.log_params({"device": "cpu"})),
    "a live metric": ("INSERT INTO metrics", "train/loss", lambda: contents.live_log()({"train/loss": 1.0}, 1)),
    "a tag": ("INSERT INTO tags", names.TAG_REASON, lambda: contents.tag(names.TAG_REASON, "seen")),
    "a description": ("INSERT INTO tags", "mlflow.note.content", lambda: contents.describe("A step.")),
    "a scored model": ("INSERT INTO inputs", "accuracy", score_a_model),
    "its seconds": ("INSERT INTO metrics", names.SECONDS, lambda: None),
    "its end": ("UPDATE runs SET status", names.SECONDS, lambda: None),
}


@pytest.mark.parametrize("late", LATE)
def test_a_store_that_others_keep_locked_longer_than_mlflow_waits_gets_what_a_step_writes(store, late):
    held, (locked, key, write) = [], LATE[late]

    def lock_first(_connection, _cursor, statement, parameters, *_):
        if statement.startswith(locked) and not held:
            other = sqlite3.connect(store.removeprefix("sqlite:///"), check_same_thread=False)
            other.execute("BEGIN IMMEDIATE")
            held.append(other)
            threading.Timer(0.5, other.close).start()
        return statement.replace("busy_timeout = 20000", "busy_timeout = 300"), parameters

    with runs.step("serve") as run:
        sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", lock_first, retval=True)
        write()
    sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", lock_first)
    ended = mlflow.get_run(run.info.run_id)
    assert held and ended.info.status == "FINISHED"
    assert key in {**ended.data.params, **ended.data.metrics, **ended.data.tags}


def test_a_run_that_no_step_joined_still_gets_the_reason(store, monkeypatch):
    opened = mlflow.MlflowClient().create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", opened)
    runs.close_opened(BadInput("There is no recipe 'x'."))
    assert status(opened) == "FAILED" and reason(opened) == "There is no recipe 'x'."
    assert mlflow.get_run(opened).data.tags[names.TAG_EXIT_CODE] == "2"


STEP = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs of its background deaf to Ctrl-C
from qrl.tracking import contents, runs, signals, store
signals.guard(ends=True)
store.prepare()
with runs.step("train") as run:
    print(run.info.run_id, flush=True)
    for _ in range(6000):
        time.sleep(0.1)  # a signal that comes just before a sleep is heeded after it
"""


def a_step(store: str, shell: bool = False, **environment: str) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-c", STEP]
    if shell:
        command = ["sh", "-c", '"$@" & wait', "sh", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": store, **environment}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    return process, process.stdout.readline().strip()


def wait_for(wanted: str, run_id: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while status(run_id) != wanted and time.monotonic() < until:
        time.sleep(0.1)
    assert status(run_id) == wanted


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_no_signal_leaves_a_run_running(store):
    opened = mlflow.MlflowClient().create_run("0").info.run_id
    ctrl_c, term, kill = (a_step(store) for _ in range(3))
    orphan = a_step(store, shell=True, MLFLOW_RUN_ID=opened)
    ctrl_c[0].send_signal(signal.SIGINT)
    ctrl_c[0].send_signal(signal.SIGTERM)  # as MLflow sends after a Ctrl-C
    term[0].terminate()
    kill[0].kill()
    orphan[0].kill()  # its parent alone, as one would kill `mlflow run`
    # Minutes, not seconds: a commit waits for the disk, and another job may be filling it.
    assert [process.wait(120) for process, _ in (ctrl_c, term)] == [130, 143]
    assert orphan[1] == opened
    for run_id in (ctrl_c[1], term[1], opened):
        wait_for("KILLED", run_id)
    kill[0].wait(120)
    assert status(kill[1]) == "RUNNING"
    assert dead_runs.sweep() == [kill[1]]
    assert status(kill[1]) == "KILLED"


def test_a_process_knows_when_it_began():
    before = time.time()
    program = "import time; from qrl.tracking import owners; print(owners.started_at(), time.time())"
    began, then = map(float, subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split())
    assert (
        before - 0.05 < began < then
    )  # the kernel's clock ticks a hundred times a second; the boot's time is whole seconds


class Server(BaseHTTPRequestHandler):
    """A tracking server on which another user's run is dead, and on which we may only read."""

    def do_POST(self) -> None:
        """Answer MLflow's client."""
        request = self.path.removeprefix("/api/2.0/mlflow/")
        self.server.asked.append(request)
        self.rfile.read(int(self.headers["Content-Length"]))
        data = {"tags": [{"key": names.TAG_PID, "value": owners.this_process().rpartition(":")[0] + ":1"}]}
        info = {"run_id": "a" * 32, "experiment_id": "0", "status": "RUNNING", "start_time": 1, "artifact_uri": "x"}
        answers = {"experiments/search": {"experiments": [{"experiment_id": "0", "name": "Default"}]}}
        answers["runs/search"] = {"runs": [{"info": info, "data": data}]}
        body = json.dumps(answers[request]).encode() if request in answers else b"Permission denied"
        self.send_response(200 if request in answers else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Answer the question whether the server lives, and no other one."""
        self.send_response(200 if self.path == "/health" else 403)
        body = b"Permission denied"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "alice")
        mlflow.set_tracking_uri(None)
        yield server
        server.shutdown()
    mlflow.set_tracking_uri(None)


@pytest.mark.process
def test_a_servers_refusal_is_one_sentence_and_anothers_dead_run_stops_nobody(server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stores.prepare()
    assert dead_runs.sweep() == [] and "runs/log-batch" in server.asked
    with (
        pytest.raises(BadInput, match=r"denies alice the request runs/create: ask for a permission on the experiment"),
        runs.step("train"),
    ):
        pass
    with pytest.raises(BadInput, match=r"denies alice .* permission on the registered model"):
        registry.resolve("qrl-tiny", "base")


def test_a_server_that_does_not_know_the_user_gets_a_sentence():
    unknown = mlflow.MlflowException("Body: 'You are not authenticated.'", error_code=UNAUTHENTICATED)
    assert "MLFLOW_TRACKING_PASSWORD" in str(store_errors.explain(unknown))


def test_a_run_knows_its_process_from_its_creation(store, monkeypatch):
    create = mlflow.MlflowClient.create_run

    def created_and_killed(*args, **how):
        create(*args, **how)
        raise signals.Stopped(signal.SIGTERM)

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", created_and_killed)
    with pytest.raises(signals.Stopped), runs.step("train"):
        pass
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "RUNNING" and run.data.tags[names.TAG_PID] == owners.this_process()  # for a later sweep


def test_sweep_spares_the_living_and_other_hosts(store):
    client = mlflow.MlflowClient()
    for owner in (owners.this_process(), "elsewhere:1:1"):
        client.set_tag(client.create_run("0").info.run_id, names.TAG_PID, owner)
    assert dead_runs.sweep() == []


# reuse


def test_an_artifact_that_is_not_there_gets_a_sentence(store):
    with runs.step("train") as run:
        mlflow.log_text("1", "adapter/adapter_config.json")
    assert (contents.artifact(run.info.run_id, "adapter") / "adapter_config.json").is_file()
    with pytest.raises(BadInput, match=r"holds no artifact 'table\.md'"):
        contents.artifact(run.info.run_id, "table.md")
    with pytest.raises(BadInput, match="There is no run '0123'"):
        contents.artifact("0123", "table.md")


def test_a_finished_step_is_found_until_a_file_of_it_is_gone(store, tmp_path):
    (tmp_path / "table.md").write_text("a table")

    def do(key: str, fail: bool = False) -> str:
        with runs.step("compare", tags={names.TAG_CACHE_KEY: key}) as run:
            mlflow.log_artifact(str(tmp_path / "table.md"))
            mlflow.log_artifact(str(tmp_path / "table.md"), "figures")
            reuse.record_outputs(artifacts=["table.md", "figures"], values={"digest": "d"})
            if fail:
                raise QrlError("It failed.")
        return run.info.run_id

    first, second = do("k"), do("k")
    with pytest.raises(QrlError):
        do("k", fail=True)
    assert reuse.find("compare", "k").info.run_id == second
    assert reuse.find("train", "k") is None and reuse.find("compare", "other") is None
    assert reuse.outputs(reuse.find("compare", "k")) == reuse.Outputs({}, ["table.md", "figures"], {"digest": "d"})
    contents.artifact(second, "figures/table.md").unlink()
    assert reuse.find("compare", "k").info.run_id == first
    contents.artifact(first, "table.md").write_text("cut")
    assert reuse.find("compare", "k") is None


def test_a_step_that_is_not_reused_names_what_changed_since_the_newest(store, monkeypatch):
    def key(base: str = "d", **overrides: str) -> str:
        return keys.trained(
            recipe.load("tiny", {f"train.{name}": text for name, text in overrides.items()}), base, "cpu"
        )

    def finish(made: str) -> None:
        with runs.step("train", tags={names.TAG_CACHE_KEY: made}):
            reuse.record_outputs()

    assert reuse.changes("train", key()) == []
    finish(key(steps="18"))
    finish(key())
    assert reuse.changes("train", key(steps="18", loss="grpo")) == ["train.steps 16 → 18", "train.loss dr_grpo → grpo"]
    assert reuse.changes("train", key()) == ["files of the last result are missing or were changed"]
    assert reuse.changes("merge", key(steps="18")) == []
    other = "e" * 64
    finish(key(base=other, steps="17"))
    assert reuse.changes("train", key(steps="18")) == ["train.steps 16 → 18"]  # since the newest of the same base
    assert reuse.changes("train", key(base="f" * 64, steps="17")) == ["base changed"]
    assert reuse.changes("train", key(base="f" * 64, steps="19", loss="grpo")) == ["base changed"]  # in one phrase
    first = keys.trained(recipe.load("tiny", {"task": "gsm8k"}), "d", "cpu")
    assert reuse.changes("train", first) == []  # of another task
    scheme = keys.quantized(recipe.load("tiny"), names.AWQ, "d", "cpu")
    with runs.step("quantize", tags={names.TAG_CACHE_KEY: keys.quantized(recipe.load("tiny"), "nf4", "d", "cpu")}):
        reuse.record_outputs()
    assert reuse.changes("quantize", scheme) == []  # of another scheme


def test_a_step_whose_sources_changed_names_the_files(store, monkeypatch):
    settings, read = recipe.load("tiny"), sources.digests
    with runs.step("train", tags={names.TAG_CACHE_KEY: keys.trained(settings, "d", "cpu")}):
        reuse.record_outputs()

    def edited(*files: str) -> list[str]:
        monkeypatch.setattr(sources, "digests", lambda *of: read(*of) | dict.fromkeys(files, "0" * 64))
        return reuse.changes("train", keys.trained(settings, "d", "cpu"))

    assert edited("train/grpo.py") == ["qrl/train/grpo.py changed"]
    (phrase,) = edited("train/grpo.py", "train/loop.py", "train/save.py", "train/new.py", "formats/kind.py")
    assert "qrl/train/grpo.py, " in phrase and phrase.endswith(" and 2 more sources changed")
    monkeypatch.setattr(sources, "digests", read)
    key = keys.trained(settings, "d", "cpu")
    monkeypatch.setitem(keys.PARTS, key, keys.PARTS[key] | {"train.steps": "9"})
    with runs.step("train", tags={names.TAG_CACHE_KEY: key}):
        reuse.record_outputs()
    assert edited() == ["train.steps 9 → 16"]
    assert edited("train/grpo.py") == ["train.steps 9 → 16", "qrl/train/grpo.py changed"]


def test_an_artifact_whose_bytes_changed_is_not_reused_and_its_rows_are_not_read(store, tmp_path):
    rows = pd.DataFrame({"question": [f"q{i}" for i in range(50)], "correct": [1, 0] * 25, "scheme": "full"})
    rows.to_parquet(tmp_path / names.QUESTIONS)
    with runs.step("evaluate", tags={names.TAG_CACHE_KEY: "k"}) as run:
        mlflow.log_artifact(str(tmp_path / names.QUESTIONS))
        mlflow.log_artifact(str(tmp_path / names.QUESTIONS), "figures")
        reuse.seal(tmp_path / names.QUESTIONS, {})
        reuse.record_outputs(artifacts=[names.QUESTIONS, "figures"])
    run_id = run.info.run_id
    assert reuse.find("evaluate", "k").info.run_id == run_id and len(cells.rows([run_id])) == 50
    for place in (names.QUESTIONS, f"figures/{names.QUESTIONS}"):
        path = contents.artifact(run_id, place)
        whole = path.read_bytes()
        path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])  # of the same size
        assert reuse.find("evaluate", "k") is None
        if place == names.QUESTIONS:
            with pytest.raises(QrlError, match=rf"{names.QUESTIONS} of run {run_id} is not what was logged"):
                cells.rows([run_id])
        path.write_bytes(whole)
        assert reuse.find("evaluate", "k")


def test_rows_that_nobody_recorded_and_nobody_can_read_get_a_sentence(store, tmp_path):
    (tmp_path / names.QUESTIONS).write_bytes(b"PAR1 and no more")
    with mlflow.start_run() as run:
        mlflow.log_artifact(str(tmp_path / names.QUESTIONS))
    with pytest.raises(QrlError, match=r"cannot be read .*: evaluate the cell again"):
        cells.rows([run.info.run_id])


# models


def log(folder: Path, move: bool) -> tuple[str, Path]:
    return models.log_checkpoint(
        folder,
        name="base-full",
        digest=checkpoint.digest(folder),
        variant="base",
        scheme="full",
        task="arithmetic",
        move=move,
    )


def test_a_steps_own_checkpoint_is_linked_and_a_users_is_copied(store, tiny_checkpoint, tmp_path):
    own = shutil.copytree(tiny_checkpoint, tmp_path / "own")
    (own / "optimizer.bin").write_bytes(bytes(1000))
    size = (own / "model.safetensors").stat().st_size
    with runs.step("train"):
        uri, stored = log(own, move=True)
        copied = log(tiny_checkpoint, move=False)[1]
    assert models.local_path(uri) == stored and checkpoint.digest(stored) == checkpoint.digest(tiny_checkpoint)
    assert os.path.samefile(stored / "model.safetensors", own / "model.safetensors")
    assert not os.path.samefile(copied / "model.safetensors", tiny_checkpoint / "model.safetensors")
    assert not (stored / "optimizer.bin").exists()
    shutil.rmtree(own)
    written = {file.stat().st_ino: file.stat().st_size for file in stored.parent.rglob("*") if file.is_file()}
    assert sum(written.values()) < 1.05 * size
    logged = mlflow.get_logged_model(uri.removeprefix("models:/"))
    assert str(logged.status) == "READY" and logged.tags[names.TAG_SCHEME] == "full"


def test_a_users_own_chat_templates_are_stored_and_loaded(store, tiny_checkpoint, tmp_path):
    """Transformers prefers `additional_chat_templates/default.jinja` to chat_template.jinja."""
    own = shutil.copytree(tiny_checkpoint, tmp_path / "own")
    (own / checkpoint.TEMPLATES).mkdir()
    (own / checkpoint.TEMPLATES / "default.jinja").write_text("my own: {{ messages[0].content }}")
    (own / "processor_config.json").write_text("{}")
    (own / "notes.json").write_text("{}")
    with runs.step("train"):
        _, stored = log(own, move=False)
    assert checkpoint.digest(stored) == checkpoint.digest(own) != checkpoint.digest(tiny_checkpoint)
    assert (stored / "processor_config.json").is_file() and not (stored / "notes.json").exists()
    chat = [{"role": "user", "content": "1 + 1?"}]
    for folder in (own, stored, stored.parent / "components" / "tokenizer"):
        assert hf.tokenizer(folder).apply_chat_template(chat, tokenize=False) == "my own: 1 + 1?"


def test_a_model_whose_weights_were_changed_is_not_reused(store, tiny_checkpoint):
    digest = checkpoint.digest(tiny_checkpoint)
    with runs.step("train", tags={names.TAG_CACHE_KEY: "k"}):
        uri, stored = log(tiny_checkpoint, move=False)
        reuse.record_outputs(models={"model": uri}, values={"digest": digest})
    weights = stored / "model.safetensors"
    later = time.time() + 60
    os.utime(weights, (later, later))
    assert reuse.find("train", "k") and models.find(digest) == uri  # touched, but the same
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, (later, later))  # of the same size and date
    assert reuse.find("train", "k") is None and models.find(digest) is None


def test_a_logged_checkpoint_loads_as_a_pipeline_and_answers_chats(store, tiny_checkpoint):
    with runs.step("train"):
        uri, _ = log(tiny_checkpoint, move=False)
    pipeline = mlflow.transformers.load_model(uri)
    assert str(pipeline.model.dtype) == "torch.bfloat16"
    chat = mlflow.pyfunc.load_model(uri)
    question = {"messages": [{"role": "user", "content": "How many apples?"}], "max_tokens": 4}
    first, second = (chat.predict(question)[0]["choices"][0]["message"] for _ in range(2))
    assert first["role"] == "assistant" and first == second  # greedy


def test_what_breaks_in_the_middle_leaves_no_model(store, tiny_checkpoint):
    with pytest.raises(QrlError, match="changed while it was logged"), runs.step("train") as run:
        models.log_checkpoint(
            tiny_checkpoint, name="m", digest="0" * 64, variant="base", scheme="full", task="arithmetic", move=False
        )
    (model,) = mlflow.search_logged_models(experiment_ids=["0"], output_format="list")
    assert str(model.status) == "FAILED" and not Path(model.artifact_location).exists()
    assert status(run) == "FAILED"


def test_a_signal_between_any_two_lines_leaves_no_half_made_model(store, tiny_checkpoint):
    """Also before the first file is written, where a study once left its model pending."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if event == "line" and frame.f_code is models.log_checkpoint.__code__:
            lines -= 1
            if lines == 0:
                raise signals.Stopped(signal.SIGINT)
        return trace if frame.f_code is models.log_checkpoint.__code__ else None

    for until in range(1, 100):
        lines = until
        with pytest.raises(SystemExit), runs.step("train") as run:
            sys.settrace(trace)
            try:
                log(tiny_checkpoint, move=False)
            finally:
                sys.settrace(None)
            raise signals.Stopped(signal.SIGINT)
        if lines > 0:
            break
        assert status(run) == "KILLED"
    assert until > 10
    states = [str(each.status) for each in mlflow.search_logged_models(experiment_ids=["0"], output_format="list")]
    assert "FAILED" in states and set(states) <= {"FAILED", "READY"}


def test_a_half_made_model_of_a_dead_run_is_discarded(store):
    client = mlflow.MlflowClient()
    run = client.create_run("0").info
    client.set_tag(run.run_id, names.TAG_PID, owners.this_process().rpartition(":")[0] + ":1")
    model = mlflow.initialize_logged_model("m", source_run_id=run.run_id)
    place = Path(model.artifact_location)
    half = place.with_name(f".{place.name}.0123abcd-1.partial")
    half.mkdir(parents=True)
    assert dead_runs.sweep() == [run.run_id]
    assert not half.exists() and str(mlflow.get_logged_model(model.model_id).status) == "FAILED"


def test_a_store_that_is_a_folder_is_a_sentence_at_once(tmp_path, monkeypatch):
    (tmp_path / "mlflow.db").mkdir()
    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(mlflow, "set_tracking_uri", lambda address: None)
    began = time.monotonic()
    with pytest.raises(BadInput, match=r"is a folder: set MLFLOW_TRACKING_URI to .*/mlflow\.db/mlflow\.db"):
        stores.prepare()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("number", ["junk", "999"])
def test_an_experiment_that_is_not_there_is_a_sentence(store, monkeypatch, number):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", number)
    with pytest.raises(BadInput, match=f"MLFLOW_EXPERIMENT_ID is '{number}'"):
        stores.prepare()


def test_requirements_are_the_projects_pins():
    pins = (ROOT / "conda.yaml").read_text()
    for scheme, needed in (("full", "torch"), ("nf4", "bitsandbytes"), ("awq", "gptqmodel")):
        required = description.requirements(scheme)
        assert any(line.startswith(needed + "==") for line in required)
        assert all(line in pins for line in required)


def test_a_clock_that_is_set_kills_no_living_process(monkeypatch):
    mine, boot = owners.this_process(), psutil.boot_time()
    for module in (psutil, psutil._pslinux):
        monkeypatch.setattr(module, "boot_time", lambda: boot - 3600)
    assert not owners.is_dead(mine) and owners.this_process() == mine
    assert owners.is_dead(f"{mine.rpartition(':')[0]}:{int(mine.rpartition(':')[2]) + 9}")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "no message"),
        ("one\ntwo", "one"),
        (
            "Failures while downloading from URL:\n##### File model #####\n404 Not Found",
            "Failures while downloading from URL: 404 Not Found",
        ),
        ("It ends:", "It ends:"),
    ],
)
def test_the_first_line_of_an_error_names_its_cause(message, line):
    assert first_line(Exception(message)) == line
