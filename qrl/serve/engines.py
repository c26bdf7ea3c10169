"""How each serving engine is started: its module, its environment, its options, and how it learns the model's name.

vLLM has an option for the name. `transformers serve` has none: its model's id is what it loads, and `/v1/models` lists
the hub's cache. So it is given a cache of its own, in which the registered name and version lead to the checkpoint
folder through one symbolic link. Nothing is copied, and the id is the same in requests, answers and the list.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from qrl.errors import BadInput
from qrl.formats import plain

TRANSFORMERS, VLLM = "transformers", "vllm"
# What is run as `python -m`: not the `vllm` command, which crashes in the CPU build.
MODULES = {TRANSFORMERS: "transformers.cli.transformers", VLLM: "vllm.entrypoints.openai.api_server"}
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
_CPU_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB, read on a CPU alone; the default takes half of the memory


def served_id(name: str, version: str | int) -> str:
    """The id that clients ask for, `qrl-tiny@3`: a registered model and its version.

    Args:
        name: of the registered model; what a hub id cannot hold (blanks, slashes, colons) becomes a dash.
        version: its number.
    """
    allowed = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    single = re.sub(r"([-.])[-.]+", r"\1", allowed)  # a hub id has no two of these in a row, nor at its ends
    return f"{single[:96].strip('-.')}@{version}"


def default(device: str) -> str:
    """The engine that `auto` means here: vLLM where it is installed, unless a CPU is asked for."""
    return VLLM if device != "cpu" and importlib.util.find_spec("vllm") else TRANSFORMERS


def check(engine: str, api_key: str | None) -> None:
    """Refuses what cannot be started, and to serve unguarded what was meant to be guarded.

    Raises:
        BadInput: vLLM is asked for where it is not installed, or a key of an engine that knows none.
    """
    if api_key and engine == TRANSFORMERS:
        raise BadInput(
            "`transformers serve` knows no API key: serve with --engine vllm, or without --api-key and QRL_API_KEY on loopback."
        )
    if engine == VLLM and importlib.util.find_spec("vllm") is None:
        raise BadInput(
            "vLLM is not installed in this environment: run under `mlflow run . -e serve … --env-manager uv`, which builds one "
            "that has it, or serve with --engine transformers."
        )


def environment(engine: str, scratch: Path, api_key: str | None, shares: bool = False) -> dict[str, str]:
    """Variables that an engine is started with.

    Args:
        engine: "transformers" or "vllm".
        scratch: an empty folder that lives as long as the engine.
        api_key: what clients must send; for vLLM.
        shares: it will not be the only engine of this machine.
    """
    if engine == TRANSFORMERS:
        return _QUIET | {"HF_HUB_CACHE": str(scratch)}
    # Else every vLLM on a CPU pins itself to the same cores, and one that serves, spinning, starves one that loads.
    free = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if shares else {}
    return _QUIET | _CPU_CACHE | free | ({"VLLM_API_KEY": api_key} if api_key else {})


def arguments(
    engine: str,
    path: Path,
    ids: list[str],
    listen: tuple[str, int] | Path,
    device: str,
    dtype: str,
    scratch: Path,
    memory: float | None = None,
) -> list[str]:
    """Options that have an engine serve a checkpoint folder, in place.

    Args:
        engine: "transformers" or "vllm".
        path: the checkpoint's folder.
        ids: what clients may ask for; the first, from `served_id`, is what answers say. `transformers serve` takes that alone.
        listen: host and port, or the path of a Unix socket (vLLM).
        device: "cpu" or "cuda".
        dtype: "auto", "fp32", "bf16" or "fp16", as the recipe's `evaluate.dtype`.
        scratch: as `environment` took it.
        memory: share of the GPU's memory, for vLLM; None: its default.
    """
    address = ["--uds", str(listen)] if isinstance(listen, Path) else ["--host", listen[0], "--port", str(listen[1])]
    if engine == VLLM:
        if unpacks(engine, path, device):
            path, dtype = plain.write(path, scratch / "plain"), "fp32" if dtype == "auto" else dtype
        options = ["--model", str(path.resolve()), "--served-model-name", *ids, "--dtype", _DTYPES.get(dtype, "auto")]
        options += ["--shutdown-timeout", str(DRAIN_S)]  # left out, it breaks off what it is writing
        if device == "cpu":
            return [*options, *address, "--enforce-eager"]
        return [*options, *address, *(["--gpu-memory-utilization", str(memory)] if memory else [])]
    name, version = ids[0].split("@")
    repository = scratch / f"models--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / version).write_text(version)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / version).symlink_to(path.resolve(), target_is_directory=True)
    return ["serve", ids[0], "--device", device, "--dtype", _transformers_dtype(path, device, dtype), *address]


def unpacks(engine: str, path: Path, device: str) -> bool:
    """Whether an engine gets the values that a checkpoint's codes stand for, because the machine lacks the kernel; a copy, then."""
    return engine == VLLM and device == "cpu" and plain.needed(path)


def _transformers_dtype(path: Path, device: str, dtype: str) -> str:
    """What `auto` means in evaluation: fp32 on a CPU, so that the server gives the answers that were graded.

    Except bitsandbytes: evaluation unpacks its codes first, the server does so at every product, and only bf16 has
    a CPU kernel for that (in fp32 one token of a 2.5 M model took 0.2 s, in bf16 7 ms). And except NVFP4 and MXFP4, which
    the server unpacks to bf16, whatever it is told.
    """
    stored = json.loads((path / "config.json").read_text()).get("quantization_config", {})
    if dtype == "auto" and device == "cpu":
        formats = {group.get("format") or "" for group in stored.get("config_groups", {}).values()}
        in_bf16 = stored.get("quant_method") == "bitsandbytes" or any(
            each.startswith(("nvfp4", "mxfp4")) for each in formats
        )
        return "bfloat16" if in_bf16 else "float32"
    return _DTYPES.get(dtype, "auto")
