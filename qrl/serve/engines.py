"""How each serving engine is started: its command, its environment, and how it learns the model's name.

vLLM has an option for the name. `transformers serve` has none: its model's id is what it loads, and `/v1/models` lists
the hub's cache. So it is given a cache of its own, in which the registered name and version lead to the checkpoint
folder through one symbolic link. Nothing is copied, and the id is the same in requests, answers and the list.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from qrl.errors import BadInput

TRANSFORMERS, VLLM = "transformers", "vllm"
DRAIN_S = 25  # how long answers that are being written may go on once the engine is told to stop
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Nothing is fetched and nobody is told: no hub, no telemetry, no look for newer versions.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True)
class Start:
    """What to execute, where, and with which variables added to the environment."""

    command: list[str]
    folder: Path
    environment: dict[str, str]


def served_id(name: str, version: str | int) -> str:
    """The id that clients ask for, `qrl-tiny@3`: a registered model and its version.

    Args:
        name: of the registered model; what a hub id cannot hold (blanks, slashes, colons) becomes a dash.
        version: its number.
    """
    allowed = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    single = re.sub(r"([-.])[-.]+", r"\1", allowed)  # a hub id has no two of these in a row, nor at its ends
    return f"{single[:96].strip('-.')}@{version}"


def prepare(
    engine: str, path: Path, served: str, host: str, port: int, device: str, dtype: str, scratch: Path, api_key: str | None = None
) -> Start:
    """How to start an engine on a checkpoint folder, in place.

    Args:
        engine: "transformers" or "vllm".
        path: the checkpoint's folder.
        served: id from `served_id`.
        host: address to listen on.
        port: port to listen on.
        device: "cpu" or "cuda".
        dtype: "auto", "fp32", "bf16" or "fp16", as the recipe's `evaluate.dtype`.
        scratch: an empty folder that lives as long as the engine.
        api_key: what clients must send; goes by the environment, since anybody may read a command line.

    Raises:
        BadInput: vLLM is asked for where it is not installed, or a key of an engine that knows none.
    """
    check_key(engine, api_key)
    listen = ["--host", host, "--port", str(port)]
    if engine == VLLM:
        return Start(_vllm(path, served, device, dtype) + listen, scratch, _QUIET | _vllm_environment(device, api_key))
    name, version = served.split("@")
    repository = scratch / f"models--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / version).write_text(version)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / version).symlink_to(path.resolve(), target_is_directory=True)
    options = ["--device", device, "--dtype", _transformers_dtype(path, device, dtype)]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", served, *options, *listen]
    # The working folder matters: a folder called like the model in the user's own would be taken for it.
    return Start(command, scratch, _QUIET | {"HF_HUB_CACHE": str(scratch)})


def _vllm(path: Path, served: str, device: str, dtype: str) -> list[str]:
    if importlib.util.find_spec("vllm") is None:
        raise BadInput(
            "vLLM is not installed in this environment: run under `mlflow run . -e serve … --env-manager uv`, which builds one "
            "that has it, or serve with --engine transformers."
        )
    # Not the `vllm` command, which crashes in the CPU build.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path.resolve())]
    command += ["--served-model-name", served, "--dtype", _DTYPES.get(dtype, "auto")]
    command += ["--shutdown-timeout", str(DRAIN_S)]  # left out, it breaks off what it is writing
    return command + (["--enforce-eager"] if device == "cpu" else [])


def check_key(engine: str, api_key: str | None) -> None:
    """Refuses to serve unguarded what was meant to be guarded.

    Raises:
        BadInput: a key was given, and the engine knows none.
    """
    if api_key and engine == TRANSFORMERS:
        raise BadInput("`transformers serve` knows no API key: serve with --engine vllm, or without --api-key and QRL_API_KEY on loopback.")


def _vllm_environment(device: str, api_key: str | None) -> dict[str, str]:
    key = {"VLLM_API_KEY": api_key} if api_key else {}
    return key | ({"VLLM_CPU_KVCACHE_SPACE": "1"} if device == "cpu" else {})  # GiB; the default takes half of the memory


def _transformers_dtype(path: Path, device: str, dtype: str) -> str:
    """What `auto` means in evaluation: fp32 on a CPU, so that the server gives the answers that were graded.

    Except bitsandbytes: evaluation unpacks its codes first, the server does so at every product, and only bf16 has
    a CPU kernel for that (in fp32 one token of a 2.5 M model took 0.2 s, in bf16 7 ms). And except NVFP4 and MXFP4, which
    the server unpacks to bf16, whatever it is told.
    """
    stored = json.loads((path / "config.json").read_text()).get("quantization_config", {})
    if dtype == "auto" and device == "cpu":
        formats = {group.get("format") or "" for group in stored.get("config_groups", {}).values()}
        in_bf16 = stored.get("quant_method") == "bitsandbytes" or any(each.startswith(("nvfp4", "mxfp4")) for each in formats)
        return "bfloat16" if in_bf16 else "float32"
    return _DTYPES.get(dtype, "auto")
