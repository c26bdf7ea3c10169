"""Run vLLM's server for rollouts in a format: `python -m qrl.engine.rollout_server FORMAT --model MODEL …`.

FORMAT is a `train.qat`: one that rounds activations, or any other, `none` too. Further options are vLLM's. A worker
that multiprocessing spawns imports this file first, so the plugin needs no installation.
"""

import json
import os
import runpy
import sys

from qrl.engine import vllm_fakequant  # noqa: F401 (makes its method known to vLLM)
from qrl.formats.fakequant import operation


def main(name: str, more: list[str]) -> None:
    """Run the server; raise BadInput if the format is unknown."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the trainer reads the server's configuration and sends weights
    words = ["--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs"]
    words += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    if config := operation.engine_config(name):
        words += ["--hf-overrides", json.dumps({"quantization_config": config})]
    sys.argv = ["vllm", *words, *more]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
