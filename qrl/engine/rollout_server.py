"""Run vLLM's server for rollouts in a format: `python -m qrl.engine.rollout_server FORMAT --model MODEL …`.

FORMAT is a `train.qat`: one that rounds activations, or any other, `none` too. Further options are vLLM's. A worker
that multiprocessing spawns imports this file first, so the plugin needs no installation.
"""

import importlib.util
import json
import os
import runpy
import sys

from qrl import names, process
from qrl.errors import BadInput
from qrl.formats.fakequant import operation

if importlib.util.find_spec("vllm"):
    from qrl.engine import vllm_fakequant  # noqa: F401 (makes its method known to vLLM)

_USAGE = "python -m qrl.engine.rollout_server FORMAT --model MODEL …"


def main(format_name: str = "--help", *vllm_options: str) -> None:
    """Run the server; raise BadInput if the format is unknown, or vLLM is not installed."""
    if format_name.startswith("-"):
        formats = f"FORMAT is none, {', '.join(names.FORMATS)} or a file"
        raise BadInput(f"No format is named: run `{_USAGE}`, where {formats}; further options are vLLM's.")
    if not importlib.util.find_spec("vllm"):
        raise BadInput(
            "vLLM is not installed in this environment: run it with the Python of an environment that "
            "`mlflow run … -P rollout.engine=vllm` has built."
        )
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the trainer reads the server's configuration and sends weights
    words = ["--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs"]
    words += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    quantization = operation.engine_config(format_name)
    if quantization:
        words += ["--hf-overrides", json.dumps({"quantization_config": quantization})]
    sys.argv = ["vllm", *words, *vllm_options]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    with process.sentences():
        main(*sys.argv[1:])
