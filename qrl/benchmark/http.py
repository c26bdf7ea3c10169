"""A running server under load, measured by vLLM's own `bench serve`, which the field compares by."""

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path

from qrl import process
from qrl.benchmark import Subject, summary
from qrl.errors import BadInput, QrlError
from qrl.recipe import Benchmark

# The core of `vllm bench serve`, which imports vLLM once for all rounds; the command itself imports all other commands,
# and crashes in the CPU build. Each line is a list of rounds' options and a file that says that they are done.
_PROGRAM = """
import json, pathlib, sys
root, parent = sys.argv[1:]
sys.path.append(root)
from qrl import process
process.die_with_parent(int(parent))
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
for line in sys.stdin:
    rounds, done = json.loads(line)
    for options in rounds:
        serve.main(parser.parse_args(options))
    pathlib.Path(done).touch()
"""

# Our estimate → a result's key, and how many of its units make one of ours.
_KEYS = (("output_throughput", 1), ("p50_e2el_ms", 1000), ("p95_e2el_ms", 1000), ("p50_ttft_ms", 1000))
UNITS = dict(zip(summary.ESTIMATES, _KEYS, strict=True))


class Client(AbstractContextManager):
    """Clients of one server, in a process of their own; use it in a `with` block, which ends them."""

    def __init__(
        self,
        url: str,
        model: str,
        prompts: Sequence[str],
        tokenizer: Path,
        settings: Benchmark,
        api_key: str | None = None,
    ) -> None:
        """Start the process.

        Args:
            url: of an OpenAI-compatible server, without /v1.
            model: id that it serves.
            prompts: rendered prompts, sent to /v1/completions as they are.
            tokenizer: folder of the model's tokenizer, which counts the tokens.
            settings: batches are numbers of clients; `requests` is the least number of requests for each.
            api_key: the server's key; passed by the environment, since anybody may read a command line.

        Raises:
            BadInput: vLLM is not installed here.
        """
        if importlib.util.find_spec("vllm") is None:
            raise BadInput(
                "Measuring a server needs `vllm bench serve`, but vLLM is not installed in this environment: run "
                "`mlflow run . -e benchmark -P url=… --env-manager uv` on a machine with a GPU, or measure without "
                "--url."
            )
        self._server, self._tokenizer, self._settings, self._asked = (url, model), tokenizer, settings, 0
        self._temporary = tempfile.TemporaryDirectory(prefix="qrl-benchmark-")
        self._folder = Path(self._temporary.name)
        self._prompts, self._log = self._folder / "prompts.jsonl", self._folder / "log"
        self._prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        key = {"OPENAI_API_KEY": api_key} if api_key else {}
        with open(self._log, "w") as log:
            words = [sys.executable, "-c", _PROGRAM, str(process.ROOT), str(os.getpid())]
            streams = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            self._process = subprocess.Popen(words, env=os.environ | key, text=True, **streams)

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._temporary.cleanup()

    def measure(self, rate: float | None = None) -> list[dict]:
        """Ask in rounds, the first time after a warm-up: with each batch's number of clients, or at a rate of arrivals.

        Args:
            rate: requests that arrive a second, whether or not earlier ones are answered; None: clients wait for
                answers.

        Returns:
            The results of `vllm bench serve`: a dict per round and number of clients or rate, each with its "round" and
            "clients" or "rate".

        Raises:
            QrlError: the benchmark failed; its last lines are quoted.
        """
        settings, folder = self._settings, self._folder / str(self._asked)
        plan = {} if self._asked else {folder / "warm-up.json": {"clients": max(settings.batches)}}
        self._asked += 1
        folder.mkdir()
        key, values = ("clients", settings.batches) if rate is None else ("rate", (rate,))
        for number, value in product(range(settings.rounds), values):
            plan[folder / f"{number}-{value}.json"] = {"round": number, key: value}
        where = (*self._server, self._prompts, self._tokenizer)
        rounds, done = [options(*where, load, settings, path) for path, load in plan.items()], folder / "done"
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([rounds, str(done)]), file=self._process.stdin, flush=True)
        while not done.is_file() and self._process.poll() is None:
            time.sleep(0.05)
        if not all(path.is_file() for path in (*plan, done)):
            last = "\n".join(f"  {line}" for line in self._log.read_text().splitlines()[-8:])
            failed = f"`vllm bench serve` failed against {self._server[0]} (exit code {self._process.poll()})"
            raise QrlError(f"{failed}. Its last lines:\n{last}")
        return [run | json.loads(path.read_text()) for path, run in plan.items() if "round" in run]


def options(
    url: str, model: str, prompts: Path, tokenizer: Path, load: Mapping[str, float], settings: Benchmark, result: Path
) -> list[str]:
    """Return the options of vLLM's benchmark for one round, with a number of `clients` or at a `rate` of arrivals."""
    least = settings.requests
    if "rate" in load:  # a seed of its own: other arrivals in every round
        least = max(least, math.ceil(load["rate"] * settings.round_s))
        how = {"num-prompts": least, "request-rate": load["rate"], "seed": load["round"]}
    else:
        how = {"num-prompts": max(least, load["clients"]), "max-concurrency": load["clients"], "seed": 0}
    values = how | {
        "backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": model, "served-model-name": model,
        "tokenizer": str(tokenizer), "dataset-name": "custom", "dataset-path": str(prompts),
        "custom-output-len": settings.new_tokens, "temperature": 0, "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "50,95", "result-dir": str(result.parent), "result-filename": result.name,
    }  # fmt: skip
    flags = ["--save-result", "--skip-chat-template", *(["--ignore-eos"] if settings.length == "fixed" else [])]
    return [word for key, value in values.items() for word in (f"--{key}", str(value))] + flags


def lines(results: Sequence[dict], subject: Subject, engine: str) -> list[summary.Line]:
    """Return a line per number of clients, over the rounds of `Client.measure`.

    Raises:
        QrlError: the server failed requests, or completed none: its speed would be that of errors.
    """
    failed = sum(result.get("failed", 0) for result in results)
    if failed or not all(result["completed"] for result in results):
        total = sum(result["num_prompts"] for result in results)
        raise QrlError(f"The server failed {failed} of {total} requests, so its speed does not count: see its log.")
    by_line = []
    for clients in sorted({result["clients"] for result in results}):
        rounds = [result for result in results if result["clients"] == clients]
        requests = sum(result["completed"] for result in rounds)
        estimates = [summary.over_rounds([result[key] / per for result in rounds]) for key, per in UNITS.values()]
        cell = (subject.variant, subject.scheme, engine)
        by_line.append(summary.Line(*cell, clients, requests, *estimates, subject.stored_bytes))
    return by_line
