"""The transformers engine: any checkpoint of the study, greedy or sampled, in batches.

Weights are what the checkpoint stores. AWQ's codes are unpacked to the values that they stand for, exactly, and run as
ordinary matrices, on any device: no kernel of one machine colours the accuracy. So are those of compressed-tensors, whose
rounded activations are rounded in software here (`simulated`), and bitsandbytes' on a CPU, where it repacks NF4 in place.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, process
from qrl.engine import attention, pretrained
from qrl.errors import BadInput

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


NAME = "transformers"  # in records of what answered


@dataclass(frozen=True)
class Completion:
    """What a model wrote after one prompt."""

    text: str  # without special tokens
    raw: str  # with them, the end token apart: a chat marker in here is a leak
    n_tokens: int  # the end token included
    finish_reason: str  # "stop": it wrote the end token; "length": it was cut


def tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, padding on the left, as decoding in batches needs.

    Raises:
        BadInput: its files cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=False)
    except Exception as error:  # whatever the library meets in them: its own, the Rust part's, JSON's
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadInput(f"The tokenizer of {path} cannot be read ({reason}): copy or save it again.") from error
    if found.pad_token_id is None:
        found.pad_token = found.eos_token
    return found


def load(path: Path, device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint folder as a model in eval mode and its tokenizer; nothing in the folder is executed.

    Args:
        path: a folder that `checkpoint.check` accepts: full precision, bitsandbytes or AWQ.
        device: "cpu" or "cuda".
        dtype: of activations, and of weights that are not quantized; AWQ's values do not fit into bf16 and take fp16 instead.

    Raises:
        BadInput: the folder is not a checkpoint that qrl loads.
    """
    import torch
    from transformers import GenerationConfig

    process.hush_transformers()
    found = checkpoint.check(path)
    if found.quantization == "awq":
        from qrl.formats import awq

        model = awq.load_unpacked(path, torch.float16 if dtype is torch.bfloat16 else dtype).to(device)
    elif found.quantization == "compressed-tensors":
        model = _decompressed(path, device, dtype)
    else:
        model = pretrained.load(path, dtype=dtype, device_map=device)
        if found.quantization == "bitsandbytes" and device == "cpu":
            model = model.dequantize(dtype=dtype)
    # Decoding is ours to set: a checkpoint's own sampling and repetition penalties would colour every accuracy.
    ends = model.generation_config
    if ends.eos_token_id is None:
        raise BadInput(f"{path} names no end token (eos_token_id) in generation_config.json: answers could never stop.")
    pad = ends.pad_token_id if ends.pad_token_id is not None else _first(ends.eos_token_id)
    model.generation_config = GenerationConfig(eos_token_id=ends.eos_token_id, pad_token_id=pad)
    if device == "cpu":
        attention.use_grouped(model)
    return model.eval(), tokenizer(path)


def simulated(path: Path, device: str) -> str:
    """What of a checkpoint's arithmetic is not run as its format means it, in words; empty where all of it is.

    Args:
        path: a checkpoint folder.
        device: that it runs on.
    """
    quantization = checkpoint.config(path).get("quantization_config") or {}
    if quantization.get("quant_method") == "bitsandbytes" and quantization.get("load_in_8bit") and device == "cpu":
        return "activations not rounded to int8"
    for group in (quantization.get("config_groups") or {}).values():
        rounded = group.get("input_activations")
        if rounded:
            return (
                f"activations rounded to {rounded['type']}{rounded['num_bits']} in software, products in full precision"
            )
    return ""


def generate(
    model: PreTrainedModel,
    tokens: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[int], object] = lambda n: None,
) -> list[Completion]:
    """Completions of token-id prompts, in the order given.

    Args:
        prompts: N lists of token ids, generation prompt included.
        max_new_tokens: longest completion, in tokens.
        batch_size: prompts decoded together; batches are cut from prompts sorted by length, to pad little.
        temperature: 0 is greedy; above, tokens are drawn from the whole distribution at this temperature.
        seed: of the draws; the same prompts in batches of the same size then get the same completions.
        progress: called with the number of prompts that each batch finished.

    Returns:
        N completions.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    special = set(tokens.all_special_ids)
    done: dict[int, Completion] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        for index, ids in zip(
            batch,
            _decode(model, tokens, [prompts[i] for i in batch], max_new_tokens, temperature, (seed, start)),
            strict=True,
        ):
            done[index] = completion(tokens, ids, _end_ids(model), special)
        progress(len(batch))
    return [done[index] for index in range(len(prompts))]


def _decompressed(path: Path, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A compressed-tensors checkpoint with its weights as plain matrices; activations are rounded where the scheme says so."""
    from transformers import CompressedTensorsConfig

    with (
        warnings.catch_warnings(),
        redirect_stderr(io.StringIO()),
    ):  # of a setting that is meant to be overridden; bars that flash
        warnings.simplefilter("ignore", UserWarning)
        model = pretrained.load(
            path, dtype=dtype, device_map=device, quantization_config=CompressedTensorsConfig(dequantize=True)
        )
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        module.weight.data = module.weight.data.to(dtype)  # some formats unpack to bfloat16 whatever is asked
        if scheme.input_activations is None:
            module.__dict__.pop("forward", None)  # nothing is left to round: the layer is an ordinary one
    return model


def _decode(
    model, tokens, prompts: list[Sequence[int]], max_new_tokens: int, temperature: float, seed: tuple[int, int]
) -> list[list[int]]:
    import numpy as np
    import torch

    padded = tokens.pad({"input_ids": [list(ids) for ids in prompts]}, return_tensors="pt").to(model.device)
    how = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    here = [model.device] if model.device.type == "cuda" else []
    quiet = (
        torch.no_grad() if process.sharded() else torch.inference_mode()
    )  # FSDP would keep what inference mode gathers
    with quiet, torch.random.fork_rng(devices=here, enabled=bool(temperature)):
        if temperature:  # a batch's draws depend on its own seed alone, not on what was drawn before
            torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1))
        written = model.generate(**padded, max_new_tokens=max_new_tokens, **how)
    return written[:, padded["input_ids"].shape[1] :].tolist()


def completion(tokens: PreTrainedTokenizerBase, ids: list[int], ends: set[int], special: set[int]) -> Completion:
    """What was written, from the tokens that a model gave: cut at the first of its end tokens.

    Args:
        ids: tokens written.
        ends: end tokens.
        special: the tokenizer's special tokens; most answers hold none but the end, and are decoded once.
    """
    stop = next((position for position, token in enumerate(ids) if token in ends), None)
    body = ids if stop is None else ids[:stop]
    raw = tokens.decode(body, skip_special_tokens=False)
    return Completion(
        text=raw if special.isdisjoint(body) else tokens.decode(body, skip_special_tokens=True),
        raw=raw,
        n_tokens=len(body) + (stop is not None),
        finish_reason="length" if stop is None else "stop",
    )


def _end_ids(model) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list | tuple) else {ends}


def _first(ids: int | list[int]) -> int:
    return ids[0] if isinstance(ids, list) else ids
