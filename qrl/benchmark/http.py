"""A running server under load, measured by vLLM's own `bench serve`, which the field compares by."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from qrl.benchmark import Subject, summary
from qrl.errors import BadInput, QrlError
from qrl.recipe import Benchmark

# The core of `vllm bench serve`, for several lists of options; the command itself imports all other commands, and
# crashes in the CPU build.
_PROGRAM = """
import json, sys
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
for options in json.load(sys.stdin):
    serve.main(parser.parse_args(options))
"""

# Our estimate → a result's key, and how many of its units make one of ours.
_KEYS = (("output_throughput", 1), ("p50_e2el_ms", 1000), ("p95_e2el_ms", 1000), ("p50_ttft_ms", 1000))
UNITS = dict(zip(summary.ESTIMATES, _KEYS, strict=True))


def run(
    url: str,
    model: str,
    prompts: Sequence[str],
    tokenizer: Path,
    settings: Benchmark,
    api_key: str | None = None,
    rate: float | None = None,
) -> list[dict]:
    """Measure a server in rounds: with each batch's number of concurrent clients, or with arrivals at a rate.

    Args:
        url: of an OpenAI-compatible server, without /v1.
        model: id that it serves.
        prompts: rendered prompts, sent to /v1/completions as they are.
        tokenizer: folder of the model's tokenizer, which counts the tokens.
        settings: batches are numbers of clients; `requests` is the least number of requests for each.
        api_key: the server's key; passed by the environment, since anybody may read a command line.
        rate: requests that arrive a second, whether or not earlier ones are answered; None: clients wait for answers.

    Returns:
        The results of `vllm bench serve`: a dict per round and number of clients or rate, each with its "round" and
        "clients" or "rate".

    Raises:
        BadInput: vLLM is not installed here.
        QrlError: the benchmark failed; its last lines are quoted.
    """
    if importlib.util.find_spec("vllm") is None:
        raise BadInput(
            "Measuring a server needs `vllm bench serve`, but vLLM is not installed in this environment: run "
            "`mlflow run . -e benchmark -P url=… --env-manager uv` on a machine with a GPU, or measure without --url."
        )
    with tempfile.TemporaryDirectory(prefix="qrl-benchmark-") as name:
        folder = Path(name)
        file = folder / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        plan = {folder / "warm-up.json": {"clients": max(settings.batches)}}
        key, values = ("clients", settings.batches) if rate is None else ("rate", (rate,))
        for number, value in product(range(settings.rounds), values):
            plan[folder / f"{number}-{value}.json"] = {"round": number, key: value}
        commands = [options(url, model, file, tokenizer, load, settings, path) for path, load in plan.items()]
        words, key = [sys.executable, "-c", _PROGRAM], {"OPENAI_API_KEY": api_key} if api_key else {}
        how = {"input": json.dumps(commands), "env": os.environ | key, "capture_output": True, "text": True}
        done = subprocess.run(words, **how, check=False)
        if done.returncode or not all(path.is_file() for path in plan):
            last = "\n".join(f"  {line}" for line in (done.stdout + done.stderr).splitlines()[-8:])
            failed = f"`vllm bench serve` failed against {url} (exit code {done.returncode})"
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
    """Return a line per number of clients, over the rounds of `run`.

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
