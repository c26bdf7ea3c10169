"""One real server, queried over HTTP; and every case in which a server must stop, or not start."""

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

import qrl
from qrl import checkpoint, registry, tiny
from qrl.errors import BadInput, QrlError
from qrl.process import is_gone
from qrl.registry import versions
from qrl.serve import engines, log, process, server
from qrl.serve.log import cause
from qrl.tracking import models, runs
from tests.ports import free_port

pytestmark = pytest.mark.process

ROOT = Path(qrl.__file__).parents[1]
QUESTION = "Tom has 3 apples and buys 12 more. How many apples does Tom have?"
# Like the serve step: a signal raises, the server stops, and the program ends by itself.
PROGRAM = """
import signal, sys
from pathlib import Path
from qrl.serve import engines, process, server
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
with process.Engine("transformers") as child:
    model = engines.ServedModel("qrl-tiny", 3, Path(sys.argv[1]))
    server.run(child, model, "127.0.0.1", int(sys.argv[2]), on_ready=lambda url: print(url, flush=True))
print("stopped", flush=True)
"""
# Hands the serve step to another environment, as the command line does; here to this one, under its own project.
HAND_OVER = """
import sys
from pathlib import Path
from qrl.study import environments
environments.hand_over(Path(sys.argv[1]), "serve", {"stage": "base", "engine": "transformers", "port": sys.argv[2]})
print("ended well", flush=True)
"""


def start(path: Path, port: int, log: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, str(path), str(port)]
    with log.open("w") as stderr:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)


def serve(path: Path, port: int, verify=lambda: None, on_ready=print) -> None:
    """Serve in this process, until the engine ends."""
    with process.Engine("transformers") as child:
        server.run(child, engines.ServedModel("qrl-tiny", 3, path, verify), "127.0.0.1", port, on_ready=on_ready)


def engine_of(process: subprocess.Popen) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: children.read_text().strip())
    return int(children.read_text().split()[0])


def until(condition, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Yield the address of a running server, and its process."""
    log = tmp_path_factory.mktemp("serve") / "log"
    process = start(tiny.PATH, free_port(), log)
    address = process.stdout.readline().strip()
    assert address, log.read_text()
    yield address, process
    process.kill()
    process.wait()


def ask(address: str, path: str, body: dict | None = None) -> dict:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"{address}/{path}", data, {"content-type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return json.load(answer)


def chat(model: str, max_tokens: int) -> dict:
    return {
        "model": model,
        "temperature": 0,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": QUESTION}],
    }


def test_the_list_of_models_is_the_registered_version(served):
    listed = ask(served[0], "models")["data"]
    assert [model["id"] for model in listed] == ["qrl-tiny@3"]


def test_a_greedy_answer_is_what_transformers_generates(served):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    answer = ask(served[0], "chat/completions", chat("qrl-tiny@3", 100))

    tokens = AutoTokenizer.from_pretrained(tiny.PATH)
    model = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokens.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt, max_new_tokens=100, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer["model"] == "qrl-tiny@3"
    assert answer["choices"][0]["message"]["content"] == tokens.decode(written, skip_special_tokens=True)
    assert answer["choices"][0]["finish_reason"] == "stop"  # at <|im_end|>, well before the 100
    assert answer["usage"]["completion_tokens"] == len(written)


def test_an_answer_is_cut_at_max_tokens(served):
    answer = ask(served[0], "chat/completions", chat("qrl-tiny@3", 3))
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_another_model_is_rejected(served):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(served[0], "chat/completions", chat("qrl-tiny@2", 3))


def test_a_port_in_use_is_reported_before_anything_starts(served):
    port = int(served[0].split(":")[2].split("/")[0])
    began = time.monotonic()
    with pytest.raises(BadInput, match=f"127.0.0.1:{port}"):
        serve(tiny.PATH, port)
    assert time.monotonic() - began < 1


def test_sigterm_ends_the_server_and_its_engine(served):
    """Keep this the last test with the server."""
    _, process = served
    engine = engine_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "stopped\n"
    assert process.returncode == 0
    assert is_gone(engine)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, -signal.SIGINT)])
def test_an_engine_outlives_neither_a_kill_nor_an_interrupted_load(tmp_path, sent, code):
    process = start(tiny.PATH, free_port(), tmp_path / "log")
    engine = engine_of(process)
    process.send_signal(sent)
    assert process.communicate(timeout=15)[0] == ""
    assert process.returncode == code
    until(lambda: is_gone(engine))


@pytest.mark.slow
def test_an_engine_that_dies_gives_the_reason_in_one_sentence(tmp_path, capfd):
    broken = tmp_path / "model"
    shutil.copytree(tiny.PATH, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "NoSuchModel"}))
    with pytest.raises(
        QrlError, match=r"died while loading the model \(exit code 1\): \w+Error: .*NoSuchModel"
    ) as caught:
        serve(broken, free_port())
    assert caught.value.exit_code == 1 and len(str(caught.value).splitlines()) == 1
    assert "model type `NoSuchModel`" in capfd.readouterr().err  # the end of its log


def test_an_engine_that_does_not_answer_in_time_is_ended(monkeypatch, capfd):
    monkeypatch.setattr(server, "READY_TIMEOUT_S", 0.2)
    before = psutil.Process().children(True)  # another test's server, with its engine
    with pytest.raises(QrlError, match=r"did not answer within 0\.2 s") as caught:
        serve(tiny.PATH, free_port(), on_ready=lambda address: pytest.fail("It answered."))
    assert caught.value.exit_code == 1
    left = set(psutil.Process().children(True)) - set(before)
    assert not [each for each in left if "qrl.serve" in " ".join(each.cmdline())]


@pytest.mark.slow
def test_the_files_are_read_while_the_engine_loads_and_nothing_answers_before_both_are_done():
    port, seen = free_port(), []

    def slow() -> None:
        until(lambda: answers(port), 60)
        time.sleep(1)  # the engine answers already, but its files are not verified yet
        seen.append("verified")

    def ready(_address: str) -> None:
        seen.append("ready")
        raise KeyboardInterrupt

    serve(tiny.PATH, port, slow, on_ready=ready)
    assert seen == ["verified", "ready"]


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_files_other_than_the_evaluated_ones_end_the_load_at_once():
    def refuse() -> None:
        raise QrlError("The files have changed.")

    began, port = time.monotonic(), free_port()
    with pytest.raises(QrlError, match="have changed"):
        serve(tiny.PATH, port, refuse)
    assert time.monotonic() - began < 6 and not answers(port)


@pytest.mark.slow
def test_files_that_are_swapped_and_put_back_while_the_engine_loads_are_never_served(tmp_path):
    path, port = Path(shutil.copytree(tiny.PATH, tmp_path / "model")), free_port()

    def deceived() -> None:  # it reads the right files, when the engine has read others
        shutil.copyfile(path / "model.safetensors", tmp_path / "others")
        os.replace(tmp_path / "others", path / "model.safetensors")

    with pytest.raises(QrlError, match="changed while they were loaded"):
        serve(path, port, deceived, on_ready=lambda address: pytest.fail("It answered."))


def test_the_cause_is_the_first_error_of_a_log_and_not_a_warning():
    core = "(EngineCore pid=7) ERROR 11-21 19:49:15 [core.py:1020]"
    log = [
        "(APIServer pid=5) WARNING 11-21 19:49:10 [launcher.py:18] This may fail with "
        "`OSError: [Errno 24] Too many open files`.",
        f"{core} Traceback (most recent call last):",
        f'{core}   File "linear.py", line 3, in choose',
        f"{core} ValueError: No kernel for NVFP4 on this CPU.",
        "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    assert cause(log) == "ValueError: No kernel for NVFP4 on this CPU."
    assert cause(log[:3]) is None
    pydantic = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, no such model.",
    ]
    assert cause(pydantic) == "ValidationError: 1 validation error for ModelConfig: Value error, no such model."
    assert cause(["NotImplementedError"]) == "NotImplementedError"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qrl-tiny", "qrl-tiny@3"),
        ("qrl-qwen2.5-1.5b-instruct", "qrl-qwen2.5-1.5b-instruct@3"),
        ("my model: a/b", "my-model-a-b@3"),
        ("..odd--name..", "odd-name@3"),
    ],
)
def test_every_registered_name_becomes_an_id_that_the_hub_client_accepts(name, expected):
    from huggingface_hub.utils import validate_repo_id

    served_id = engines.served_id(name, 3)
    assert served_id == expected
    validate_repo_id(served_id.split("@")[0])


@pytest.fixture
def registered(store):
    """Return the shipped model as version 1 of a new registry, at stage base."""
    digest = checkpoint.digest(tiny.PATH)
    cell = {"digest": digest, "variant": "base", "scheme": "full"}
    with runs.step("evaluate"):
        uri, _ = models.log_checkpoint(tiny.PATH, name="base", task="arithmetic", move=False, **cell)
    version = registry.register("qrl-tiny", uri, accuracy=0.6, stderr=0.01, n=2000, **cell)
    return registry.promote("qrl-tiny", "base", version.version, record={"reasons": ["for a test"]})


def newest_run():
    import mlflow

    return mlflow.search_runs(output_format="list", order_by=["attributes.start_time DESC"], max_results=1)[0]


@pytest.mark.slow
def test_a_server_in_another_environment_stops_like_one_in_this(registered, tmp_path):
    command = f"cd {ROOT} && exec {sys.executable} -m qrl serve"
    project = tmp_path / "mlflow"  # an environment's folder is named after a package that it has
    project.mkdir()
    (project / "MLproject").write_text(
        json.dumps({"name": "elsewhere", "entry_points": {"serve": {"command": command}}})
    )
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", HAND_OVER, str(project), str(port)],
            cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    ready = process.stdout.readline()
    assert ready.startswith("Serving qrl-tiny version 1"), (tmp_path / "log").read_text()
    assert ask(f"http://127.0.0.1:{port}/v1", "models")["data"][0]["id"] == "qrl-tiny@1"
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert (process.returncode, output.endswith("ended well\n")) == (0, True), (tmp_path / "log").read_text()
    socket.create_server(("127.0.0.1", port)).close()
    run = newest_run()
    assert (run.info.status, run.data.params["engine"]) == ("FINISHED", "transformers")
    assert "qrl.reason" not in run.data.tags


@pytest.mark.slow
def test_a_version_that_cannot_be_served_is_reported_in_one_sentence_and_never_answers(registered):
    """A missing version or a refusal is reported before an environment is built; changed weights before it answers."""
    registry.refuse("qrl-tiny", "grpo", registered.version, record={"reasons": ["it gained nothing"]})
    before = newest_run().info.run_id
    weights = versions.folder(registered) / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    for stage, engine, code, sentence in (
        ("grpo", "vllm", 2, "has no version yet"),
        ("base", "transformers", 1, "have changed"),
    ):
        command = [sys.executable, "-m", "qrl", "serve", "--stage", stage, "--engine", engine]
        command += ["--port", str(free_port())]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (code, "")
        sentences = [line for line in done.stderr.splitlines() if line.startswith("qrl: ")]
        assert len(sentences) == 1 and sentence in sentences[0] and "Traceback" not in done.stderr
    run = newest_run()
    assert run.info.run_id != before and (run.info.status, run.data.tags["qrl.reason"]) == (
        "FAILED",
        sentences[0].removeprefix("qrl: "),
    )


def test_a_key_is_passed_by_the_environment_and_never_ignored():
    assert engines.environment("transformers", "s3cret")["QRL_API_KEY"] == "s3cret"
    assert engines.environment("transformers", None)["QRL_API_KEY"] == ""  # not one of this process's environment
    assert engines.environment("vllm", "s3cret")["VLLM_API_KEY"] == "s3cret"


def test_missing_vllm_is_reported_in_one_sentence():
    with pytest.raises(BadInput, match="vLLM is not installed"):
        process.Engine("vllm")


def test_a_log_file_rotates_and_a_line_without_an_end_is_cut(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(log, "FILE_BYTES", 3000)
    write = log.rotating_writer(tmp_path / "logs" / "serve.log")
    lines = io.StringIO("".join(f"INFO {number:04} {'x' * 90}\n" for number in range(400)) + "y" * 200_000)
    engine = log.EngineLog(lines, write)
    engine.join()
    kept = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert kept == ["serve.log", *(f"serve.log.{number}" for number in range(1, 6))]
    assert all(path.stat().st_size <= log.LONGEST + 1 for path in (tmp_path / "logs").iterdir())
    assert max(map(len, engine._lines)) == log.LONGEST and not capsys.readouterr().err
    engine.reason()
    assert "yyy" in capsys.readouterr().err  # the last lines of an engine that failed, also with a file
    (tmp_path / "taken").write_text("")
    with pytest.raises(BadInput, match=r"The log .*taken/serve\.log cannot be written"):
        log.rotating_writer(tmp_path / "taken" / "serve.log")
