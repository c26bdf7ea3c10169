"""How each serving engine is started: its module, environment and options.

vLLM has an option for the model's name. `transformers serve` has none: the id is the name that it loads, and
`/v1/models` lists the hub's cache. So it gets a cache of its own, with the registered name and version as a symbolic
link to the checkpoint folder. Nothing is copied, and requests, answers and the list show the same id.
"""

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qrl.errors import BadInput
from qrl.formats import plain

TRANSFORMERS, VLLM = "transformers", "vllm"
# Run as `python -m`: the `vllm` command crashes in the CPU build.
MODULES = {TRANSFORMERS: "transformers.cli.transformers", VLLM: "vllm.entrypoints.openai.api_server"}
DRAIN_S = 25  # how long an engine may finish running answers once it is told to stop
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# No downloads, no telemetry, no check for newer versions.
_QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
_QUIET |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_CPU_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB, read only on a CPU; the default takes half of the memory


@dataclass(frozen=True)
class ServedModel:
    """A registered version for an engine to serve."""

    name: str  # of the registered model
    version: int | str
    path: Path  # of the checkpoint, opened in place
    # Reads the files while the engine loads them; raises QrlError if they differ from the evaluated ones.
    verify: Callable[[], object] = lambda: None
    device: str = "cpu"  # or "cuda"
    dtype: str = "auto"  # or "fp32", "bf16", "fp16", as the recipe's `evaluate.dtype`
    aliases: tuple[str, ...] = ()  # other ids that clients may use; vLLM only
    memory: float | None = None  # share of the GPU's memory, for vLLM; None: its default

    @property
    def id(self) -> str:
        """The id in requests and answers."""
        return served_id(self.name, self.version)


def served_id(name: str, version: str | int) -> str:
    """Return the id of a registered model and its version for clients: `qrl-tiny@3`.

    Characters of the name that a hub id cannot have (blanks, slashes, colons) become dashes.
    """
    allowed = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    single = re.sub(r"([-.])[-.]+", r"\1", allowed)  # a hub id has no two of these in a row, nor at its ends
    return f"{single[:96].strip('-.')}@{version}"


def default(device: str) -> str:
    """Return the engine for `auto`: vLLM where it is installed and the device is not the CPU, else transformers."""
    return VLLM if device != "cpu" and importlib.util.find_spec("vllm") else TRANSFORMERS


def check(engine: str, api_key: str | None) -> None:
    """Raise BadInput if an engine is not installed, or knows no API key and would serve unguarded."""
    if api_key and engine == TRANSFORMERS:
        unguarded = "on loopback without --api-key and QRL_API_KEY"
        raise BadInput(f"`transformers serve` knows no API key: serve with --engine vllm, or {unguarded}.")
    if engine == VLLM and importlib.util.find_spec("vllm") is None:
        raise BadInput(
            "vLLM is not installed in this environment: run `mlflow run . -e serve … --env-manager uv`, which builds "
            "one with vLLM, or serve with --engine transformers."
        )


def environment(engine: str, scratch: Path, api_key: str | None, shares: bool = False) -> dict[str, str]:
    """Return an engine's environment variables; `scratch` is its empty folder, `shares`: beside another engine."""
    if engine == TRANSFORMERS:
        return _QUIET | {"HF_HUB_CACHE": str(scratch)}
    # Otherwise every vLLM on a CPU pins itself to the same cores, and the serving engine, spinning, starves the other.
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if shares else {}
    return _QUIET | _CPU_CACHE | unbound | ({"VLLM_API_KEY": api_key} if api_key else {})


def arguments(engine: str, model: ServedModel, listen: tuple[str, int] | Path, scratch: Path) -> list[str]:
    """Return the options for an engine to serve a checkpoint folder, in place.

    Args:
        listen: host and port, or the path of a Unix socket (vLLM).
        scratch: the same folder as for `environment`.
    """
    address = ["--uds", str(listen)] if isinstance(listen, Path) else ["--host", listen[0], "--port", str(listen[1])]
    if engine == VLLM:
        path, dtype = model.path, model.dtype
        if unpacks(engine, path, model.device):
            path, dtype = plain.write(path, scratch / "plain"), "fp32" if dtype == "auto" else dtype
        options = ["--model", str(path.resolve()), "--served-model-name", model.id, *model.aliases]
        options += ["--dtype", _DTYPES.get(dtype, "auto")]
        options += ["--shutdown-timeout", str(DRAIN_S), *address]  # without it, running answers are cut off
        if model.device == "cpu":
            return [*options, "--enforce-eager"]
        return [*options, "--gpu-memory-utilization", str(model.memory)] if model.memory else options
    name, version = model.id.split("@")
    refs, snapshots = (scratch / f"models--{name}" / part for part in ("refs", "snapshots"))
    refs.mkdir(parents=True)
    snapshots.mkdir()
    (refs / version).write_text(version)
    (snapshots / version).symlink_to(model.path.resolve(), target_is_directory=True)
    return ["serve", model.id, "--device", model.device, "--dtype", _transformers_dtype(model), *address]


def unpacks(engine: str, path: Path, device: str) -> bool:
    """Return whether an engine gets an unpacked copy of a quantized checkpoint, because this machine lacks a kernel."""
    return engine == VLLM and device == "cpu" and plain.needed(path)


def _transformers_dtype(model: ServedModel) -> str:
    """Return the dtype of evaluation on a CPU, fp32, so that the server gives the answers that were graded.

    Two exceptions use bf16. bitsandbytes: evaluation unpacks its codes first, but the server does so at every product,
    and only bf16 has a CPU kernel for that (one token of a 2.5 M model took 0.2 s in fp32, 7 ms in bf16). NVFP4 and
    MXFP4: the server unpacks them to bf16 in any case.
    """
    stored = json.loads((model.path / "config.json").read_text()).get("quantization_config", {})
    if model.dtype == "auto" and model.device == "cpu":
        formats = [group.get("format") or "" for group in stored.get("config_groups", {}).values()]
        in_bf16 = any(name.startswith(("nvfp4", "mxfp4")) for name in formats)
        return "bfloat16" if in_bf16 or stored.get("quant_method") == "bitsandbytes" else "float32"
    return _DTYPES.get(model.dtype, "auto")
