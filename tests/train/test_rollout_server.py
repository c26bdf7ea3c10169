"""A server for rollouts: what is asked of it before training, with servers of a test's own."""

import contextlib
import http.server
import json
import socketserver
import threading

import pytest

from qrl import tasks, tiny
from qrl.engine import rollout_server
from qrl.errors import BadInput
from qrl.formats.fakequant import operation
from qrl.recipe import Rollout, Train
from qrl.train import Job, rollout
from qrl.train.rollout import server as servers
from qrl.train.teacher import server as teachers

pytestmark = pytest.mark.process

VLLM = Rollout(engine="vllm")


def test_a_server_that_stores_otherwise_than_the_recipe_says_is_refused():
    plain = {"model_config": {"quantization": None}, "cache_config": {"cache_dtype": "auto"}}
    narrow = {"model_config": {"quantization": "fp8_per_tensor"}, "cache_config": {"cache_dtype": "fp8"}}
    servers.check_configuration(plain, Rollout(), Train())
    servers.check_configuration(narrow, Rollout(quantization="fp8", kv_cache="fp8"), Train())
    with pytest.raises(BadInput, match="start it with --quantization fp8_per_tensor"):
        servers.check_configuration(plain, Rollout(quantization="fp8"), Train())
    with pytest.raises(
        BadInput, match=r"keys and values as auto, but rollout\.kv_cache = fp8: start it with --kv-cache-dtype fp8"
    ):
        servers.check_configuration(plain, Rollout(kv_cache="fp8"), Train())
    with pytest.raises(BadInput, match=r"keys and values as fp8.* without --kv-cache-dtype"):
        servers.check_configuration(narrow, Rollout(quantization="fp8"), Train())


def server_info(name: str, **changed) -> dict:
    """Return what vLLM's server reports about a format that `rollout_server` was started with."""
    config = operation.engine_config(name)
    overrides = {"quantization_config": config | changed} if config else {}
    model = {"quantization": operation.METHOD if config else None, "hf_overrides": overrides}
    return {"model_config": model, "cache_config": {"cache_dtype": "auto"}}


@pytest.mark.parametrize(
    ("changed", "train", "sentence"),
    [
        ({"dtype": "torch.float16"}, Train(), r"computes in float16, .*start it with --dtype bfloat16"),
        ({"dtype": "torch.bfloat16"}, Train(), ""),
        (
            {"logprobs_mode": "raw_logprobs"},
            Train(temperature=0.7),
            r"of temperature 1, .*= 0\.7, .*processed_logprobs",
        ),
        ({"logprobs_mode": "raw_logprobs"}, Train(), ""),  # the same at temperature 1
        ({"logprobs_mode": "raw_logprobs"}, Train(temperature=0.7, teacher="t"), ""),  # which reads none
        ({"logprobs_mode": "processed_logprobs"}, Train(temperature=0.7), ""),
    ],
)
def test_a_server_with_other_options_is_refused(changed, train, sentence):
    info = server_info("none") | {"weight_transfer_config": {"backend": "nccl"}}
    info["model_config"] |= changed
    with pytest.raises(BadInput, match=sentence) if sentence else contextlib.nullcontext():
        servers.check_configuration(info, VLLM, train)


@pytest.mark.parametrize("transfer", [None, {"backend": "ipc"}])
def test_a_server_that_takes_no_weights_is_refused(transfer):
    info = server_info("none") | {"weight_transfer_config": transfer}
    with pytest.raises(BadInput, match="takes no weights over NCCL: start it with --weight-transfer-config"):
        servers.check_configuration(info, VLLM, Train())


@pytest.mark.parametrize(
    "answer",
    {
        "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
        "cut": b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"ver',
        "no object": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        "nothing": b"",
    }.items(),
    ids=lambda answer: answer[0],
)
def test_what_is_no_rollout_server_is_a_sentence(answer, monkeypatch):
    class Raw(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(4096)
            self.request.sendall(answer[1])

    with socketserver.TCPServer(("127.0.0.1", 0), Raw) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{there.server_address[1]}"
        said = "(What answers at {0} is no {1} of vLLM's|No {1} answers at {0}) .*: start one as"  # nothing: no answer
        with pytest.raises(BadInput, match=said.format(f"rollout.server = {address}", "rollout server")):
            servers.check(Rollout(engine="vllm", mode="server", server=address), Train())
        with pytest.raises(BadInput, match=said.format(f"train.teacher_server = {address}", "teacher's server")):
            teachers.Server(Train(teacher="t", teacher_placement="server", teacher_server=address), 100)
        there.shutdown()


def test_a_configuration_of_another_form_is_a_sentence(monkeypatch):
    monkeypatch.setattr(servers, "_vllm_version", lambda: None)
    for wrong, why in (
        ("VllmConfig(...)", "no attribute 'get'"),
        ({"model_config": "m"}, "its model_config is no mapping"),
    ):
        answer = {"version": "1", "vllm_config": wrong}
        monkeypatch.setattr(servers, "_get", lambda address, timeout, answer=answer: answer)
        with pytest.raises(BadInput, match=rf"What answers at .*{why}"):
            servers.check(VLLM, Train())


def test_the_command_of_a_server_says_what_it_needs(monkeypatch):
    for words in ((), ("--model", "m")):
        with pytest.raises(BadInput, match=r"No format is named: .*FORMAT is none, int8, .*nvfp4-a4, .*or a file"):
            rollout_server.main(*words)
    monkeypatch.setattr(rollout_server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="vLLM is not installed in this environment"):
        rollout_server.main("fp8", "--model", "m")


def test_a_server_that_does_not_round_as_training_does_is_refused():
    for name in ("none", "int4", "nvfp4-a4", "fp8"):
        servers.check_configuration(server_info(name), VLLM, Train(qat=name))
    for theirs, qat, sentence in (
        (server_info("none"), "fp8", r"rounds no activations, but train\.qat = fp8 does: .*rollout_server fp8"),
        (server_info("fp8"), "nvfp4-a4", r"rounds activations as train\.qat = nvfp4-a4 does not"),
        (server_info("fp8"), "int4", r"rounds activations as train\.qat = int4 does not"),
        (server_info("fp8", version="0"), "fp8", "has version 0 of qrl's formats, but training"),
    ):
        with pytest.raises(BadInput, match=sentence):
            servers.check_configuration(theirs, VLLM, Train(qat=qat))


@pytest.mark.parametrize(
    ("theirs", "workers", "ours", "refused"),
    [
        (None, 2, None, True),
        (None, 1, None, True),
        ("0,1", 2, "1", True),
        ("1", 1, "1", True),
        ("GPU-a", 1, "GPU-a", True),
        ("1", 1, None, False),
        ("0,1", 1, "1", False),  # it sees two and uses the first
        ("0,1", 2, "2", False),
        (None, 2, "2,3", False),
    ],
)
def test_a_server_on_trainings_gpu_is_refused_before_nccl_waits(theirs, workers, ours, refused):
    with (
        pytest.raises(BadInput, match=f"no two processes on one GPU: .* together they need {workers + 1} GPUs")
        if refused
        else contextlib.nullcontext()
    ):
        servers.check_apart(theirs, workers, ours)


SERVERS = {  # what a server answers, and what is wrong with it
    "the same": ("0.31.0", "fp8", ""),
    "another build": ("0.31.0+cpu", "fp8", ""),
    "another vLLM": ("0.25.1", "fp8", r"runs vLLM 0\.25\.1, but this environment has 0\.31\.0"),
    "no version": (None, "fp8", "runs vLLM None"),
    "training's GPU": ("0.31.0", "fp8", "computes on GPU 3, 4 of this machine, .* would send weights from GPU 3"),
    "a GPU of training's second process": ("0.31.0", "fp8", ""),  # the first one alone sends weights
    "no plugin": ("0.31.0", "none", r"rounds no activations, but train\.qat = fp8 does"),
    "no development endpoints": ("0.31.0", None, "No rollout server answers at .*Not Found"),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_computes_otherwise_is_refused_before_any_weight_is_loaded(name, monkeypatch):
    version, format_of_server, sentence = SERVERS[name]
    answers = {"/version": {"version": version}}
    if format_of_server:
        config = server_info(format_of_server) | {"parallel_config": {"world_size": 2}}
        seen = f"CUDA_VISIBLE_DEVICES={'3,4,5' if 'GPU' in name else '0,1'}\n"
        environment = {"env_vars": f"NCCL_DEBUG=WARN\n{seen}"}
        answers["/server_info?config_format=json"] = {"vllm_config": config, "system_env": environment}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def log_message(self, *_):
            pass

    monkeypatch.setattr(servers, "_vllm_version", lambda: "0.31.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("RANK", str(int("second" in name)))
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = Rollout(engine="vllm", mode="server", server=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(BadInput, match=sentence) if sentence else contextlib.nullcontext():
            rollout.check(settings, "cuda", Train(qat="fp8"))
        server.shutdown()


@pytest.mark.parametrize(("limit", "fits"), [(None, True), (1000, True), (20, False)])
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_texts_that_the_engine_would_cut_are_refused(mode, limit, fits, monkeypatch, tmp_path):
    own = {"max_model_tokens": limit} if mode == "colocate" else {"mode": "server", "server": "http://a:1"}
    monkeypatch.setattr(
        servers, "_get", lambda address, timeout: {"vllm_config": {"model_config": {"max_model_len": limit}}}
    )
    data = {"base": tiny.PATH, "questions": tasks.load("arithmetic", "train", 16, 0), "task": "arithmetic"}
    where = {"template": "plain", "seed": 0, "device": "cuda", "work": tmp_path, "out": tmp_path}
    asked = Job(settings=Train(max_completion_tokens=8), rollout=Rollout(engine="vllm", **own), **data, **where)
    with (
        contextlib.nullcontext() if fits else pytest.raises(BadInput, match=rf"is 20, .*raise it to {asked.longest()}")
    ):
        rollout.check_length(asked)
