"""The built-in model in five schemes under vLLM on a CPU, queried with `openai` client and compared to transformers.

MLflow builds missing environments; QRL_VLLM_PYTHON and QRL_AWQ_PYTHON name existing ones.
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
from qrl.engine import hf
from qrl.evaluate import cells
from qrl.recipe import Evaluate, Recipe
from qrl.tasks import prompt
from qrl.tracking import models, runs
from tests.ports import free_port

ROOT = Path(qrl.__file__).parents[1]
SCHEMES = ("awq", *(pytest.param(name, marks=pytest.mark.long) for name in ("full", "awq-ct", "w8a8", "fp8")))
TEMPLATE, MAX_TOKENS, N = "answer-line", 128, 120
RECIPE = Recipe(task="arithmetic", prompt=TEMPLATE, evaluate=Evaluate(max_new_tokens=MAX_TOKENS, batch_size=64))
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
    """Return a function that stores the built-in model under a scheme and returns its folder."""
    folder = tmp_path_factory.mktemp("schemes")
    tokens = hf.plain_tokenizer(tiny.PATH)
    texts = [prompt.training_text(tokens, question, TEMPLATE) for question in tasks.load("arithmetic", "train", 128, 0)]

    def store(scheme: str) -> Path:
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

    return store


@pytest.fixture
def register(store):
    """Return a function that registers a checkpoint as a promoted version and returns its number."""

    def promote(scheme: str, path: Path) -> int:
        cell = {"digest": checkpoint.digest(path), "variant": "base", "scheme": scheme}
        with runs.step("evaluate"):
            uri, _ = models.log_checkpoint(path, name=f"base-{scheme}", task="arithmetic", move=False, **cell)
        version = registry.register("qrl-tiny", uri, accuracy=0.6, stderr=0.01, n=2000, **cell)
        return registry.promote("qrl-tiny", "base", version.version, record={"reasons": ["for a test"]}).version

    return promote


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

    def answers(self, model: str, questions) -> list[str]:
        """Return greedy answers to questions, sixteen at once, through the usual client."""
        client = openai.OpenAI(base_url=self.address, api_key=KEY, max_retries=0)

        def answer(question) -> str:
            reply = client.chat.completions.create(
                model=model, messages=prompt.messages(question.question, TEMPLATE), temperature=0, max_tokens=MAX_TOKENS
            )
            assert reply.model == model
            return reply.choices[0].message.content

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(answer, questions))

    def get(self, path: str) -> tuple[int, str]:
        request = urllib.request.Request(self.address.removesuffix("/v1") + path)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""


def command(scheme: str, stage: str, port: int, python_of) -> tuple[list[str], dict[str, str]]:
    """Return a command and variables that serve: `full` through `mlflow run`, the others in vLLM's environment."""
    options = {"stage": stage, "engine": "vllm", "device": "cpu", "port": str(port)}
    if scheme == "full":
        python_of("vllm_cpu")  # built before the server's time is measured
        words = [sys.executable, "-m", "mlflow", "run", str(ROOT), "-e", "serve", "--env-manager", "uv"]
        return [*words, *(word for key, value in options.items() for word in ("-P", f"{key}={value}"))], {}
    words = [python_of("vllm_cpu"), "-m", "qrl", "serve"]
    return [*words, *(word for key, value in options.items() for word in (f"--{key}", value))], {
        "QRL_PLACE": "vllm_cpu"
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_served_scheme_answers_as_evaluation_does(scheme, register, stored, questions, python_of, tmp_path):
    path, port = stored(scheme), free_port()
    version = register(scheme, path)
    words, variables = command(scheme, "base", port, python_of)
    with Served(words, port, tmp_path / "log", **variables) as served:
        model = f"qrl-tiny@{version}"
        assert model in served.ready
        texts = served.answers(model, questions)
        assert served.get("/v1/models")[0] == 401  # no access without the key
        metrics = served.get("/metrics")[1]
        assert f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{model}"}}' in metrics
    # MLflow itself dies of the signal; the server ends with 0.
    assert served.process.returncode == (-15 if scheme == "full" else 0)
    ours = cells.answer_questions(cells.Cell("base", scheme, path), questions, RECIPE, "cpu").frame
    correct = [
        verdict.strict for verdict in tasks.grade_many("arithmetic", texts, [question.answer for question in questions])
    ]
    same = sum(text == other for text, other in zip(texts, ours["completion"], strict=True)) / N
    reference = stats.accuracy(int(ours["correct"].sum()), N)
    interval = f"{reference.estimate:.3f} [{reference.low:.3f}, {reference.high:.3f}]"
    print(f"{scheme}: {same:.3f} of {N} answers equal, accuracy {sum(correct) / N:.3f}, transformers' {interval}")
    assert same >= 0.8  # vLLM computes in bf16 here, evaluation in float32: a near tie may be decided differently
    assert reference.low <= sum(correct) / N <= reference.high


def test_a_scheme_that_the_engine_cannot_run_is_reported_in_one_sentence(register, stored, python_of):
    stage = str(register("nvfp4a16", stored("nvfp4a16")))
    words = [python_of("vllm_cpu"), "-m", "qrl", "serve", "--stage", stage, "--engine", "vllm", "--device", "cpu"]
    words += ["--port", str(free_port())]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "QRL_PLACE": "vllm_cpu"}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("qrl: ")]
    assert (done.returncode, done.stdout) == (1, ""), done.stderr[-3000:]
    # The reason is vLLM's own.
    assert "died while loading the model (exit code 1): ValueError: " in sentence and "NVFP4" in sentence
