"""`qrl doctor`: what a store lacks is named, each in a sentence, and decides the exit code."""

import os
import re
import sqlite3
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import mlflow
import pytest

from qrl import workspace
from qrl.cli.ending import main
from qrl.tracking import doctor


def levels(findings) -> dict[str, list[str]]:
    """Return the sentences of each level."""
    found: dict[str, list[str]] = {}
    for finding in findings:
        assert re.match(r"[A-Z0-9/].*\.$", finding.sentence), finding
        found.setdefault(finding.level, []).append(f"{finding.about}: {finding.sentence}")
    return found


@pytest.fixture
def roomy(monkeypatch):
    """A disk with enough space, whatever this machine has."""
    for module in (workspace, doctor):
        monkeypatch.setattr(module, "free_bytes", lambda folder: 10**12)


@pytest.mark.usefixtures("roomy")
def test_a_usual_store_lacks_nothing_and_one_that_is_not_there_is_not_made(store, tmp_path, monkeypatch, capsys):
    main(["doctor"])
    out = capsys.readouterr().out
    assert "lacks   " not in out and "Writing works: artifacts of the experiment Default" in out
    assert not list((tmp_path / "store" / "mlruns").rglob("qrl-doctor*"))
    (tmp_path / "none").mkdir()
    monkeypatch.chdir(tmp_path / "none")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/none/mlflow.db")
    main(["doctor"])
    assert "no store here yet" in capsys.readouterr().out and not list((tmp_path / "none").iterdir())


def test_space_clock_and_old_folders_are_named(store, monkeypatch, capsys):
    for module in (workspace, doctor):
        monkeypatch.setattr(module, "free_bytes", lambda folder: 10**8)
    with mlflow.start_run() as run:
        pass
    later = int((time.time() + 7200) * 1000)
    with sqlite3.connect(store.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE runs SET start_time = ? WHERE run_uuid = ?", (later, run.info.run_id))
    workspace.WORK.mkdir()
    (workspace.WORK / "train-0123").mkdir()
    (workspace.WORK / "train-0123" / "optimizer.pt").write_bytes(bytes(1000))
    os.utime(workspace.WORK / "train-0123", (0, 0))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and "lacks 3 things" in err
    assert re.search(r"lacks +clock .* 7\d\d\d s in the future, so this clock went back", out)
    assert out.count("the default study needs 4 GB") == 2
    assert "train-0123 of a stopped step holds 1e-06 GB" in out


class Open(BaseHTTPRequestHandler):
    """A server that lets everybody in, runs jobs, is of another version, and whose clock is an hour late."""

    def do_GET(self) -> None:
        """Answer everything."""
        self._answer(b"2.0.0" if self.path == "/version" else b'{"multipart_uploads_enabled": false}')

    def do_POST(self) -> None:
        """Answer as if the job lacked its parameters."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(b'{"detail": "Missing parameters"}')

    def _answer(self, body: bytes) -> None:
        self.send_response_only(200)
        self.send_header("Date", formatdate(time.time() - 3600, usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Keep the test's output clean."""


@pytest.mark.process
def test_an_open_server_lacks_all_of_it(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Open)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    found = levels(doctor._check_server(address))
    server.shutdown()
    lacks = "\n".join(found["lacks"])
    for words in (
        "--app-name basic-auth",
        "--allowed-hosts 127.0.0.1:",
        "JOB_EXECUTION=false",
        "3600 s apart|3599 s apart",
    ):
        assert re.search(words, lacks), words
    assert "MLflow 2.0.0" in "\n".join(found["advice"]) and "temporary folder" in "\n".join(found["advice"])
    assert "ok" not in found


@pytest.mark.process
def test_a_server_that_nobody_answers_at_and_other_versions_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    try:
        found = levels(doctor.examine())
    finally:
        mlflow.set_tracking_uri(None)
    assert len([line for line in found["lacks"] if line.startswith("store: The store http://127.0.0.1:9")]) == 1
    monkeypatch.setattr(doctor, "installed", lambda package: None if package == "trl" else "9.9")
    (packages,) = doctor._check_packages()
    assert packages.level == doctor.ADVICE and "trl missing instead of 1." in packages.sentence
