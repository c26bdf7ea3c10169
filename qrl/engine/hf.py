"""The transformers engine: any checkpoint of the study, greedy or sampled, in batches.

The model computes with the values that the checkpoint stores. AWQ's codes are unpacked exactly and run as ordinary
matrices on any device, so that no machine's kernel changes the accuracy. The same holds for compressed-tensors, where
rounded activations are rounded in software (`simulated`), and for bitsandbytes on a CPU, where its kernels would
repack NF4 in place.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, process
from qrl.engine import attention, pretrained
from qrl.errors import PANIC, BadInput
from qrl.formats import kind, plain

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

NAME = "transformers"  # in the records of an answer
_LOGITS = 2**27  # of one batch of `log_likelihoods`, at most: half a GB in float32
_GROWTH = 1000  # times that a tokenizer may lengthen a text; published ones: 12
_LONGEST_TABLE = 1 << 20  # characters; published ones have 400,000
_POSITIONS = 2**14  # of one batch, padding included


@dataclass(frozen=True)
class Completion:
    """A model's answer to one prompt."""

    text: str  # without special tokens
    raw: str  # with special tokens except the end token: a chat marker in here is a leak
    n_tokens: int  # the end token included
    finish_reason: str  # "stop": the model wrote the end token; "length": it was cut


def tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the checkpoint's tokenizer, padding on the left as batched decoding needs.

    Raises:
        BadInput: its files cannot be read, or are larger than those of any tokenizer.
    """
    import transformers

    if transformers.__version__ < "5":  # AutoAWQ's, which misreads a list of special tokens of transformers 5
        return plain_tokenizer(path)
    with _readable(path):
        tokens = transformers.AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=False)
        tokens("a")  # some settings, such as a model_max_length that is a text, fail only then
    if tokens.pad_token_id is None:
        tokens.pad_token = tokens.eos_token
    return tokens


def plain_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """Return the source's tokenizer with its chat template and special tokens, the same in transformers 4 and 5.

    Raises:
        BadInput: the folder has no tokenizer.json, or its files cannot be read.
    """
    from transformers import PreTrainedTokenizerFast

    if not (source / "tokenizer.json").is_file():
        raise BadInput(f"{source} has no tokenizer.json: load its tokenizer with transformers 5 and save it.")
    with _readable(source):
        settings = _settings(source / "tokenizer_config.json")
        template = _settings(source / "chat_template.json").get("chat_template") or settings.get("chat_template")
        for name in ("chat_template.jinja", f"{checkpoint.TEMPLATES}/default.jinja"):  # transformers prefers the last
            if (source / name).is_file():
                template = (source / name).read_text(encoding="utf-8")
        tokens = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
        tokens = {name: token for name, token in tokens.items() if token is not None}
        return PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"), chat_template=template, **tokens)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what libraries raise while they read a tokenizer into BadInput; check the sizes of its files first."""
    try:
        checkpoint.text_files(path)
        _check_growth(_settings(path / "tokenizer.json"))
        yield
    except BaseException as error:  # transformers' own, the Rust library's, or JSON's
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise BadInput(f"The tokenizer of {path} cannot be read ({reason}): copy or save it again.") from error


def _check_growth(tokenizer: dict) -> None:
    """Raise ValueError if a tokenizer.json makes texts so long that a prompt would not fit into memory."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (times := _growth(tokenizer.get(name))) > _GROWTH:
            raise ValueError(f"its {name} makes a text {times:,.0f} times longer, but {_GROWTH:,} were expected")


def _growth(part: object) -> float:
    """Return how many times longer a part of a tokenizer.json may make a text; infinite if it replaces nothing."""
    if isinstance(part, list):  # one after the other
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    kind, times = part.get("type"), math.prod(_growth(value) for value in part.values())
    if kind == "Replace":
        pattern = part["pattern"]
        least = len(pattern["String"]) if "String" in pattern else bool(pattern["Regex"])
        times = max(1, len(part["content"]) / least) if least else math.inf
    elif kind == "Prepend":
        times = 1 + len(part["prepend"])
    elif kind == "Precompiled":  # a table of characters and what each becomes
        times = math.inf if len(part["precompiled_charsmap"]) > _LONGEST_TABLE else 1
    elif kind == "TemplateProcessing":
        added = [item["SpecialToken"]["id"] for item in part["single"] if "SpecialToken" in item]
        times = 1 + sum(len(part["special_tokens"][name]["ids"]) for name in added)
    return times


def _settings(file: Path) -> dict:
    return json.loads(file.read_text()) if file.is_file() else {}


def load(path: Path, device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a checkpoint's model, in eval mode, and its tokenizer; nothing in the folder is executed.

    Args:
        path: a folder that `checkpoint.check` accepts: full precision, bitsandbytes, AWQ or compressed-tensors.
        device: "cpu" or "cuda".
        dtype: of activations and of weights that are not quantized; AWQ runs in fp16 instead of bf16, which cannot
            hold its values.

    Raises:
        BadInput: the folder is not a checkpoint that qrl loads.
    """
    import torch
    from transformers import GenerationConfig

    process.hush_transformers()
    quantization = checkpoint.check(path).quantization
    if quantization == "awq":
        model = plain.load(path, torch.float16 if dtype is torch.bfloat16 else dtype).to(device)
    elif quantization == "compressed-tensors":
        model = _decompressed(path, device, dtype)
    else:
        model = pretrained.load(path, dtype=dtype, device_map=device)
        if quantization == "bitsandbytes" and device == "cpu":
            model = model.dequantize(dtype=dtype)
    if model.config.is_encoder_decoder:
        raise BadInput(f"{path} is an encoder and a decoder by its config.json: give a model that continues a text.")
    own = model.generation_config  # its sampling settings would change every accuracy: keep its end tokens only
    first_end, *_ = end_tokens(own, path)
    pad = first_end if own.pad_token_id is None else own.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=pad)
    if device == "cpu":
        attention.use_grouped(model)
    return model.eval(), tokenizer(path)


def end_tokens(generation: GenerationConfig, path: Path) -> list[int]:
    """Return the end tokens that a checkpoint's generation settings name.

    Raises:
        BadInput: they name none.
    """
    if generation.eos_token_id is None:
        raise BadInput(f"{path} names no end token (eos_token_id) in generation_config.json: answers could never stop.")
    return _listed(generation.eos_token_id)


def simulated(path: Path, device: str) -> str:
    """Describe how this engine's arithmetic on a device departs from the checkpoint's format; empty if it does not."""
    quantization = checkpoint.config(path).get("quantization_config") or {}
    if quantization.get("quant_method") == "bitsandbytes" and quantization.get("load_in_8bit") and device == "cpu":
        return "activations not rounded to int8"
    if rounded := kind.rounded(quantization):
        return f"activations rounded to {rounded[0]} in software, products in full precision"
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
    """Return completions of N token-id prompts, in the given order.

    Args:
        prompts: N lists of token ids, generation prompt included.
        max_new_tokens: longest completion, in tokens.
        batch_size: prompts decoded together; prompts are sorted by length first, so that batches need little padding.
        temperature: 0 is greedy; above 0, tokens are sampled from the whole distribution at this temperature.
        seed: of sampling; the same prompts in batches of the same size get the same completions.
        progress: called with the number of prompts in each finished batch.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    ends, special = set(_listed(model.generation_config.eos_token_id)), set(tokens.all_special_ids)
    completions: dict[int, Completion] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        written = _decode(model, tokens, [prompts[i] for i in batch], max_new_tokens, temperature, (seed, start))
        for index, ids in zip(batch, written, strict=True):
            completions[index] = completion(tokens, ids, ends, special)
        progress(len(batch))
    return [completions[index] for index in range(len(prompts))]


def completion(tokens: PreTrainedTokenizerBase, ids: list[int], ends: set[int], special: set[int]) -> Completion:
    """Return the completion of generated tokens, cut at the first end token; most answers need decoding only once."""
    stop = next((position for position, token in enumerate(ids) if token in ends), None)
    body = ids if stop is None else ids[:stop]
    raw = tokens.decode(body, skip_special_tokens=False)
    text = raw if special.isdisjoint(body) else tokens.decode(body, skip_special_tokens=True)
    return Completion(text, raw, len(body) + (stop is not None), "length" if stop is None else "stop")


def log_likelihoods(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], *, batch_size: int
) -> list[float]:
    """Return the mean log-likelihood per token, in nats, of N texts, each after its prompt.

    Args:
        prompts, texts: N lists of token ids each, none empty.
        batch_size: texts read together, at most; long ones or a large vocabulary make batches smaller.
    """
    import torch

    order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), -len(prompts[i])))
    found, start = [0.0] * len(texts), 0
    with torch.inference_mode():
        while start < len(order):
            longest = len(texts[order[start]])
            fitting = min(batch_size, _LOGITS // (longest * model.config.vocab_size))
            batch = order[start : start + max(1, fitting)]
            width = max(len(prompts[i]) + len(texts[i]) for i in batch)
            batch = batch[: max(1, _POSITIONS // width)]
            rows = [[*prompts[i], *texts[i]] for i in batch]
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
            places = (mask.cumsum(-1) - 1).clamp(min=0)
            asked = {"attention_mask": mask, "position_ids": places, "use_cache": False, "logits_to_keep": longest + 1}
            logits = model(input_ids=ids, **asked).logits[:, :-1].float()  # of the tokens that follow
            scores = logits.gather(-1, ids[:, -longest:, None])[..., 0] - logits.logsumexp(-1)
            for i, row in zip(batch, scores, strict=True):
                found[i] = float(row[-len(texts[i]) :].double().mean())
            start += len(batch)
    return found


def _decompressed(path: Path, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a compressed-tensors checkpoint as plain matrices; activations are rounded where the scheme rounds them."""
    from transformers import CompressedTensorsConfig

    dequantize = CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # a warning that `dequantize` overrides, and bars
        warnings.simplefilter("ignore", UserWarning)
        model = pretrained.load(path, dtype=dtype, device_map=device, quantization_config=dequantize)
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            module.weight.data = module.weight.data.to(dtype)  # some formats always unpack to bfloat16
            if scheme.input_activations is None:
                module.__dict__.pop("forward", None)  # nothing is left to round: an ordinary linear
    return model


def _decode(model, tokens, prompts: list, longest: int, temperature: float, seed: tuple[int, int]) -> list[list[int]]:
    import numpy as np
    import torch

    padded = tokens.pad({"input_ids": [list(ids) for ids in prompts]}, return_tensors="pt").to(model.device)
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    devices = [model.device] if model.device.type == "cuda" else []
    # FSDP would keep the weights that it gathers in inference mode.
    without_gradients = torch.no_grad() if process.sharded() else torch.inference_mode()
    with without_gradients, torch.random.fork_rng(devices=devices, enabled=bool(temperature)):
        if temperature:  # a batch's samples depend on its own seed alone, not on earlier batches
            torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1))
        written = model.generate(**padded, max_new_tokens=longest, do_sample=bool(temperature), **sampling)
    return written[:, padded["input_ids"].shape[1] :].tolist()


def _listed(ids: int | Sequence[int]) -> list[int]:
    return list(ids) if isinstance(ids, list | tuple) else [ids]
