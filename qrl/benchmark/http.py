"""A running server under load: vLLM's own `bench serve`, which is the measure that the field compares by."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from qrl.errors import BadInput, QrlError
from qrl.recipe import Benchmark

# What `vllm bench serve` runs; the command itself imports all of vLLM's others, and crashes in the CPU build.
_PROGRAM = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def run(url: str, model: str, prompts: Sequence[str], tokenizer: Path, settings: Benchmark) -> list[dict]:
    """Asks a server with as many clients at once as each batch has prompts.

    Args:
        url: of an OpenAI-compatible server, up to and without /v1.
        model: id that it serves.
        prompts: rendered prompts, sent to /v1/completions as they are.
        tokenizer: folder of the model's tokenizer, which counts the tokens.
        settings: batches are clients, `requests` those of one client at a time.

    Returns:
        What `vllm bench serve` found, one mapping a number of clients.

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
        return [_clients(url, model, file, tokenizer, clients, settings, Path(folder)) for clients in settings.batches]


def command(url: str, model: str, prompts: Path, tokenizer: Path, clients: int, settings: Benchmark, folder: Path) -> list[str]:
    """How vLLM's benchmark is started."""
    options = {
        "backend": "openai", "base-url": url, "endpoint": "/v1/completions", "model": model, "served-model-name": model,
        "tokenizer": str(tokenizer), "dataset-name": "custom", "dataset-path": str(prompts), "custom-output-len": settings.new_tokens,
        "num-prompts": max(settings.requests, clients), "max-concurrency": clients, "temperature": 0, "seed": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el", "metric-percentiles": "50,95", "result-dir": str(folder), "result-filename": f"{clients}.json",
    }  # fmt: skip
    given = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    flags = ["--save-result", "--skip-chat-template", *(["--ignore-eos"] if settings.length == "fixed" else [])]
    return [sys.executable, "-c", _PROGRAM, *given, *flags]


def _clients(url: str, model: str, file: Path, tokenizer: Path, clients: int, settings: Benchmark, folder: Path) -> dict:
    done = subprocess.run(
        command(url, model, file, tokenizer, clients, settings, folder), capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    result = folder / f"{clients}.json"
    if done.returncode or not result.is_file():
        said = "\n".join(f"  {line}" for line in (done.stdout + done.stderr).splitlines()[-8:])
        raise QrlError(f"`vllm bench serve` failed against {url} (exit code {done.returncode}). Its last lines:\n{said}")
    return {"clients": clients} | json.loads(result.read_text())
