"""A running server under load: vLLM's own `bench serve`, which is the measure that the field compares by."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from qrl.benchmark import Subject, summary
from qrl.errors import BadInput, QrlError
from qrl.recipe import Benchmark

# What `vllm bench serve` runs, for one list of options after the other; the command itself imports all of vLLM's others, and
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


def run(
    url: str, model: str, prompts: Sequence[str], tokenizer: Path, settings: Benchmark, api_key: str | None = None
) -> list[dict]:
    """Asks a server with as many clients at once as each batch has prompts, in rounds.

    Args:
        url: of an OpenAI-compatible server, up to and without /v1.
        model: id that it serves.
        prompts: rendered prompts, sent to /v1/completions as they are.
        tokenizer: folder of the model's tokenizer, which counts the tokens.
        settings: batches are clients, `requests` those of one client at a time.
        api_key: what the server asks for; goes by the environment, since anybody may read a command line.

    Returns:
        What `vllm bench serve` found, one mapping a round and number of clients, which it holds as "round" and "clients".

    Raises:
        BadInput: vLLM is not installed here.
        QrlError: it failed, with its last lines.
    """
    if importlib.util.find_spec("vllm") is None:
        raise BadInput(
            "Measuring a server needs `vllm bench serve`, and vLLM is not installed in this environment: run under "
            "`mlflow run . -e benchmark -P url=… --env-manager uv` on a machine with a GPU, or measure without --url."
        )
    with tempfile.TemporaryDirectory(prefix="qrl-benchmark-") as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        plan = [(number, clients) for number in range(settings.rounds) for clients in settings.batches]
        warm_up = options(url, model, file, tokenizer, max(settings.batches), settings, Path(folder) / "warm-up.json")
        timed = [
            options(url, model, file, tokenizer, clients, settings, Path(folder) / f"{number}-{clients}.json")
            for number, clients in plan
        ]
        _bench([warm_up, *timed], url, {"OPENAI_API_KEY": api_key} if api_key else {})
        return [
            {"round": number, "clients": clients} | json.loads((Path(folder) / f"{number}-{clients}.json").read_text())
            for number, clients in plan
        ]


def options(
    url: str, model: str, prompts: Path, tokenizer: Path, clients: int, settings: Benchmark, result: Path
) -> list[str]:
    """What vLLM's benchmark is told, for one round and number of clients."""
    given = {
        "backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": model, "served-model-name": model,
        "tokenizer": str(tokenizer), "dataset-name": "custom", "dataset-path": str(prompts), "custom-output-len": settings.new_tokens,
        "num-prompts": max(settings.requests, clients), "max-concurrency": clients, "temperature": 0, "seed": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el", "metric-percentiles": "50,95", "result-dir": str(result.parent), "result-filename": result.name,
    }  # fmt: skip
    flags = ["--save-result", "--skip-chat-template", *(["--ignore-eos"] if settings.length == "fixed" else [])]
    return [word for key, value in given.items() for word in (f"--{key}", str(value))] + flags


def _bench(plan: list[list[str]], url: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(plan),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not all(
        (Path(each[each.index("--result-dir") + 1]) / each[each.index("--result-filename") + 1]).is_file()
        for each in plan
    ):
        said = "\n".join(f"  {line}" for line in (done.stdout + done.stderr).splitlines()[-8:])
        raise QrlError(
            f"`vllm bench serve` failed against {url} (exit code {done.returncode}). Its last lines:\n{said}"
        )


def lines(found: Sequence[dict], subject: Subject, engine: str) -> list[summary.Line]:
    """A line per number of clients, over rounds.

    Args:
        found: of `run`.
        subject: the model that is served.
        engine: what serves it, and its version.

    Raises:
        QrlError: the server failed requests, or answered none: its speed would be that of refusing.
    """
    wrong = sum(each.get("failed", 0) for each in found)
    if wrong or not all(each["completed"] for each in found):
        raise QrlError(
            f"The server failed {wrong} of {sum(each['num_prompts'] for each in found)} requests, so its speed does not count: its log says why."
        )
    stored = sum(file.stat().st_size for file in subject.path.glob("*.safetensors"))
    return [
        _line([each for each in found if each["clients"] == clients], subject, engine, stored)
        for clients in sorted({each["clients"] for each in found})
    ]


def _line(rounds: Sequence[dict], subject: Subject, engine: str, stored: int) -> summary.Line:
    def seconds(key: str) -> summary.Estimate:
        return summary.over_rounds([each[key] / 1000 for each in rounds])

    return summary.Line(
        variant=subject.variant,
        scheme=subject.scheme,
        engine=engine,
        batch=rounds[0]["clients"],
        requests=sum(each["completed"] for each in rounds),
        tokens_per_s=summary.over_rounds([each["output_throughput"] for each in rounds]),
        relative=None,
        latency_p50_s=seconds("p50_e2el_ms"),
        latency_p95_s=seconds("p95_e2el_ms"),
        first_token_s=seconds("p50_ttft_ms"),
        stored_bytes=stored,
        weights_bytes=None,
        cache_bytes=None,
    )
