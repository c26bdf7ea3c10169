"""MLflow's webhooks: a server tells a receiver of every promotion, rollback and refusal."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import mlflow
import pytest
import requests
from mlflow.entities.webhook import WebhookEvent

from qrl import names, registry
from tests.ports import free_port
from tests.registry import made
from tests.tracking import team

# A server sends to public addresses by https alone, unless these say otherwise.
HERE = {"MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http", "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true"}
KEY = "VnNkpq1TUqNlnOvtHVWcxEhO7TqZiWHTmTJ0FbHT4sA="  # a Fernet key, with which MLflow encrypts webhooks' secrets


@pytest.fixture
def received():
    """Yield an address that accepts POST requests, and the list of what arrived there."""
    arrived = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            arrived.append((json.loads(body), dict(self.headers)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args):
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", arrived
        server.shutdown()


@pytest.fixture
def server(store, tmp_path, monkeypatch):
    """Run MLflow's server on the store, and use it."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", "--no-serve-artifacts"]
    command += ["--backend-store-uri", store, "--default-artifact-root", str(tmp_path / "artifacts")]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")} | HERE
    variables |= {"MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": KEY} | team.SAFE
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        try:
            until = time.monotonic() + 120
            while time.monotonic() < until:
                with contextlib.suppress(requests.RequestException):
                    if requests.get(f"{address}/health", timeout=5).ok:
                        break
                time.sleep(0.2)
            before = mlflow.get_tracking_uri()
            mlflow.set_tracking_uri(address)
            yield address
            mlflow.set_tracking_uri(before)
        finally:
            os.killpg(process.pid, 15)
            process.wait(15)


@pytest.mark.slow
@pytest.mark.process
def test_a_receiver_hears_of_promotions_rollbacks_and_refusals(server, received):
    address, arrived = received
    client = mlflow.MlflowClient()
    events = [WebhookEvent("model_version_alias", "created"), WebhookEvent("model_version_tag", "set")]
    client.create_webhook("decisions", address, events, secret="only for this test")
    for _ in range(2):
        made.version()
    registry.promote(made.NAME, "awq", 1, record={"run": "r"})
    registry.promote(made.NAME, "awq", 2, record={"run": "r"})
    registry.rollback(made.NAME, "awq")
    registry.refuse(made.NAME, "grpo", 2, record={"run": "r", "reasons": ["it was worse."]})

    def told() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        said = sorted((each["timestamp"], each["entity"], each["data"]) for each, _ in list(arrived))
        aliases = [(data["alias"], data["version"]) for _, entity, data in said if entity == "model_version_alias"]
        tags = [(data["version"], data["key"], data["value"]) for _, kind, data in said if kind == "model_version_tag"]
        return aliases, [tag for tag in tags if tag[1] in map(names.gate_tag, ("awq", "grpo"))]

    until = time.monotonic() + 30
    while len(told()[0]) < 5 or len(told()[1]) < 3:
        assert time.monotonic() < until, told()
        time.sleep(0.1)
    aliases, gates = told()
    assert aliases[0] == ("awq", "1") and set(aliases[1:3]) == {("awq", "2"), ("awq-previous", "1")}
    assert set(aliases[3:]) == {("awq", "1"), ("awq-previous", "2")}
    assert gates == [
        ("1", "qrl.gate.awq", "passed"),
        ("2", "qrl.gate.awq", "passed"),
        ("2", "qrl.gate.grpo", "refused"),
    ]
    assert all(headers["X-MLflow-Signature"].startswith("v1,") for _, headers in arrived)
