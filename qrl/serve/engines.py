"""How each serving engine is started: its module, environment and options.

`transformers serve` ignores much of a request (n, logprobs, a temperature above 0, a prompt beyond the window), so
transformers has a server of this package. vLLM gets middleware for what it ignores, and OpenAI's defaults of sampling
instead of the model's own: a repetition penalty in generation_config.json would change greedy answers, too.
"""

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import qrl
from qrl import process
from qrl.engine import hf
from qrl.engine.vllm_support import cache_options, memory_options
from qrl.errors import BadInput
from qrl.formats import plain

TRANSFORMERS = "transformers"
VLLM = "vllm"
# Run as `python -m`: the `vllm` command crashes in the CPU build.
MODULES = {TRANSFORMERS: "qrl.serve.transformers_server", VLLM: "vllm.entrypoints.openai.api_server"}
API_KEY = "QRL_API_KEY"  # the variable with the key that clients must send
# How long an idle connection stays open. One that the server closes just as a request comes loses it; vLLM's default is
# 5 s, when the clients of httpx, openai's among them, close theirs too; our proxy's does at 15 s.
KEEP_ALIVE_S = 30
DRAIN_S = 25  # how long an engine may finish running answers once it is told to stop
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# No downloads, no telemetry, no check for newer versions, no pickles.
_QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
_QUIET |= {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S)}
_QUIET |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
_ROOT = str(Path(qrl.__file__).parents[1])  # an engine runs in another folder, and imports this package
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
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
    cache_gib: float | None = None  # size of the key-value cache instead of that share
    chat: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template, as in the evaluation
    kv_fp8: bool = False  # keep the key-value cache in FP8, as evaluation did; vLLM only
    gpus: int = 1  # that divide the weights; vLLM only

    @property
    def id(self) -> str:
        """The id in requests and answers."""
        return served_id(self.name, self.version)


def served_id(name: str, version: str | int) -> str:
    """Return the id of a registered model and its version for clients: `qrl-tiny@3`.

    Characters of the name that a hub id cannot have (blanks, slashes, colons) become dashes.
    """
    allowed_characters = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    # A hub id has no two dots or dashes in a row, nor one at its ends.
    single_marks = re.sub(r"([-.])[-.]+", r"\1", allowed_characters)
    return f"{single_marks[:96].strip('-.')}@{version}"


def default_engine(device: str) -> str:
    """Return the engine for `auto`: vLLM where it is installed and the device is not the CPU, else transformers."""
    return VLLM if device != "cpu" and importlib.util.find_spec("vllm") else TRANSFORMERS


def check_installed(engine: str) -> None:
    """Raise BadInput if an engine is not installed."""
    if engine == VLLM and importlib.util.find_spec("vllm") is None:
        raise BadInput(
            f"vLLM is not installed in this environment: run {process.environment_command('serve')}, which builds one "
            "with vLLM, or serve with --engine transformers."
        )


def environment(engine: str, api_key: str | None, shares_machine: bool = False) -> dict[str, str]:
    """Return an engine's environment variables; `shares_machine`: another engine runs on this machine."""
    python_path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    variables = _QUIET | {"PYTHONPATH": python_path}
    if engine == TRANSFORMERS:
        return variables | {API_KEY: api_key or ""}
    variables |= _CPU_CACHE
    if shares_machine:
        # Otherwise every vLLM on a CPU pins itself to the same cores, and the serving engine, spinning, starves the
        # new one.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if api_key:
        variables["VLLM_API_KEY"] = api_key
    return variables


def arguments(engine: str, model: ServedModel, listen: tuple[str, int] | Path, scratch: Path) -> list[str]:
    """Return the options for an engine to serve a checkpoint folder, in place.

    Args:
        listen: host and port, or the path of a Unix socket (vLLM).
        scratch: the engine's empty folder.
    """
    if isinstance(listen, Path):
        address = ["--uds", str(listen)]
    else:
        host, port = listen
        address = ["--host", host, "--port", str(port)]
    if engine == VLLM:
        return _vllm_options(model, address, scratch)
    return [
        *("--model", str(model.path.resolve())),
        *("--name", model.id),
        *("--device", model.device),
        *("--dtype", model.dtype),
        *("--chat", json.dumps(model.chat)),
        *address,
    ]


def _vllm_options(model: ServedModel, address: list[str], scratch: Path) -> list[str]:
    path = model.path
    dtype = model.dtype
    if unpacks(VLLM, path, model.device):
        path = plain.write(path, scratch / "plain")
        if dtype == "auto":
            dtype = "fp32"
    options = [
        *("--model", str(path.resolve())),
        *("--served-model-name", model.id, *model.aliases),
        *("--dtype", _DTYPES.get(dtype, "auto")),
        *("--middleware", "qrl.serve.requests.Check"),
        *("--override-generation-config", json.dumps(_NEUTRAL)),
        *("--shutdown-timeout", str(DRAIN_S)),  # without it, running answers are cut off
        *address,
    ]
    if not hf.names_all_ends(path):
        options += ["--generation-config", str(_write_ends(path, scratch / "generation"))]
    if model.chat:
        options += ["--default-chat-template-kwargs", json.dumps(model.chat)]
    cache = cache_options(path, kv_fp8=model.kv_fp8)
    if model.kv_fp8:
        options += ["--kv-cache-dtype", cache["kv_cache_dtype"]]
    if "hf_overrides" in cache:
        options += ["--hf-overrides", json.dumps(cache["hf_overrides"])]
    if model.gpus > 1:
        options += ["--tensor-parallel-size", str(model.gpus)]
    if model.device == "cpu":
        options.append("--enforce-eager")
    elif model.memory or model.cache_gib:
        for name, value in memory_options(model.memory or 1.0, model.cache_gib).items():
            options += [f"--{name.replace('_', '-')}", str(value)]
    return options


def _write_ends(path: Path, folder: Path) -> Path:
    """Write generation settings that name all tokens which end an answer of a checkpoint, and return their folder."""
    folder.mkdir(parents=True)
    (folder / hf.GENERATION).write_text(json.dumps({"eos_token_id": hf.end_tokens(None, path)}))
    return folder


def unpacks(engine: str, path: Path, device: str) -> bool:
    """Return whether an engine gets an unpacked copy of a quantized checkpoint, because this machine lacks a kernel."""
    return engine == VLLM and device == "cpu" and plain.needed(path)
