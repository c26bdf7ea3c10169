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
                f"{process.environment_command('benchmark')} on a machine with a GPU, or measure without --url."
            )
        self._url = url
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._measurements = 0  # begun so far
        self._temporary = tempfile.TemporaryDirectory(prefix="qrl-benchmark-")
        self._folder = Path(self._temporary.name)
        self._log = self._folder / "log"
        self._prompts = self._folder / "prompts.jsonl"
        self._prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))

        environment = dict(os.environ)
        if api_key:
            environment["OPENAI_API_KEY"] = api_key
        command = [sys.executable, "-c", _PROGRAM, str(process.ROOT), str(os.getpid())]
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stdout=log, stderr=log
            )

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
        settings = self._settings
        folder = self._folder / str(self._measurements)
        folder.mkdir()
        plan: dict[Path, dict[str, float]] = {}  # file of a result → the load that it is measured under
        if not self._measurements:  # the server's first requests compile and allocate
            plan[folder / "warm-up.json"] = {"clients": max(settings.batches)}
        self._measurements += 1
        for number in range(settings.rounds):
            if rate is None:
                for clients in settings.batches:
                    plan[folder / f"{number}-{clients}.json"] = {"round": number, "clients": clients}
            else:
                plan[folder / f"{number}-{rate}.json"] = {"round": number, "rate": rate}

        rounds = [
            options(self._url, self._model, self._prompts, self._tokenizer, load, settings, path)
            for path, load in plan.items()
        ]
        done = folder / "done"
        with contextlib.suppress(BrokenPipeError):  # the process has ended: its log says why, below
            print(json.dumps([rounds, str(done)]), file=self._process.stdin, flush=True)
        while not done.is_file() and self._process.poll() is None:
            time.sleep(0.05)

        if not all(path.is_file() for path in (*plan, done)):
            last_lines = "\n".join(f"  {line}" for line in self._log.read_text().splitlines()[-8:])
            failure = f"`vllm bench serve` failed against {self._url} (exit code {self._process.poll()})"
            raise QrlError(f"{failure}. Its last lines:\n{last_lines}")
        return [load | json.loads(path.read_text()) for path, load in plan.items() if "round" in load]


def options(
    url: str, model: str, prompts: Path, tokenizer: Path, load: Mapping[str, float], settings: Benchmark, result: Path
) -> list[str]:
    """Return the options of vLLM's benchmark for one round, with a number of `clients` or at a `rate` of arrivals."""
    if "rate" in load:
        requests = max(settings.requests, math.ceil(load["rate"] * settings.round_s))
        # The seed draws the times of arrival: they differ from round to round.
        load_options = {"num-prompts": requests, "request-rate": load["rate"], "seed": load["round"]}
    else:
        requests = max(settings.requests, load["clients"])
        load_options = {"num-prompts": requests, "max-concurrency": load["clients"], "seed": 0}
    values = load_options | {
        "backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": model, "served-model-name": model,
        "tokenizer": str(tokenizer), "dataset-name": "custom", "dataset-path": str(prompts),
        "custom-output-len": settings.new_tokens, "temperature": 0, "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "50,95", "result-dir": str(result.parent), "result-filename": result.name,
    }  # fmt: skip
    words = []
    for key, value in values.items():
        words += [f"--{key}", str(value)]
    words += ["--save-result", "--skip-chat-template"]
    if settings.length == "fixed":
        words.append("--ignore-eos")
    return words


def lines(results: Sequence[dict], subject: Subject, engine: str) -> list[summary.Line]:
    """Return a line per number of clients, over the rounds of `Client.measure`.

    Raises:
        QrlError: the server failed requests, or completed none: its speed would be that of errors.
    """
    failed = sum(result.get("failed", 0) for result in results)
    if failed or not all(result["completed"] for result in results):
        total = sum(result["num_prompts"] for result in results)
        raise QrlError(f"The server failed {failed} of {total} requests, so its speed does not count: see its log.")
    lines_by_clients = []
    for clients in sorted({result["clients"] for result in results}):
        rounds = [result for result in results if result["clients"] == clients]
        requests = sum(result["completed"] for result in rounds)
        estimates = {
            name: summary.over_rounds([result[key] / units for result in rounds])
            for name, (key, units) in UNITS.items()
        }
        line = summary.Line(
            subject.variant, subject.scheme, engine, clients, requests, stored_bytes=subject.stored_bytes, **estimates
        )
        lines_by_clients.append(line)
    return lines_by_clients
