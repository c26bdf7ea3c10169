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
from qrl.tasks import turns

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

GENERATION = "generation_config.json"
NAME = "transformers"  # in the records of an answer
_MAX_LOGITS = 2**27  # in one batch of `log_likelihoods`: half a GB in float32
_MAX_POSITIONS = 2**14  # in one batch of `log_likelihoods`, padding included
_MAX_GROWTH = 1000  # factor by which a tokenizer may lengthen a text; published ones: 12
_MAX_TABLE = 1 << 20  # characters; published ones have 400,000


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
        special_tokens = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = settings.get(name)
            if isinstance(token, dict):
                token = token["content"]
            if token is not None:
                special_tokens[name] = token
        return PreTrainedTokenizerFast(
            tokenizer_file=str(source / "tokenizer.json"), chat_template=template, **special_tokens
        )


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
        growth = _growth(tokenizer.get(name))
        if growth > _MAX_GROWTH:
            raise ValueError(f"its {name} makes a text {growth:,.0f} times longer, but {_MAX_GROWTH:,} were expected")


def _growth(part: object) -> float:
    """Return how many times longer a part of a tokenizer.json may make a text; infinite if it has no bound."""
    if isinstance(part, list):  # a sequence of steps, each applied to the result of the last
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    growth = math.prod(_growth(value) for value in part.values())
    part_type = part.get("type")
    if part_type == "Replace":
        growth = _replacement_growth(part["pattern"], part["content"])
    elif part_type == "Prepend":
        growth = 1 + len(part["prepend"])
    elif part_type == "Precompiled":  # a table of characters and what each becomes
        growth = 1 if len(part["precompiled_charsmap"]) <= _MAX_TABLE else math.inf
    elif part_type == "TemplateProcessing":
        added = [item["SpecialToken"]["id"] for item in part["single"] if "SpecialToken" in item]
        growth = 1 + sum(len(part["special_tokens"][name]["ids"]) for name in added)
    return growth


def _replacement_growth(pattern: dict, content: str) -> float:
    if "String" in pattern:
        shortest_match = len(pattern["String"])
    else:
        shortest_match = 1 if pattern["Regex"] else 0
    if not shortest_match:
        return math.inf  # an empty pattern matches between all characters
    return max(1, len(content) / shortest_match)


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

    # The checkpoint's sampling settings would change every accuracy: keep its end tokens only.
    generation = model.generation_config
    tokens = tokenizer(path)
    ends = end_tokens(generation, path, tokens)
    pad = generation.pad_token_id
    if pad is None or pad < 0:  # older models have -1 for none
        pad = ends[0]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)

    if device == "cpu":
        attention.use_grouped(model)
    return model.eval(), tokens


def end_tokens(
    generation: GenerationConfig | None, path: Path, tokens: PreTrainedTokenizerBase | None = None
) -> list[int]:
    """Return the tokens that end an answer of a checkpoint, for every engine, in training and after it.

    Args:
        generation: its generation settings; None reads them.
        path: its folder.
        tokens: its tokenizer; None loads it.

    Raises:
        BadInput: no file names any.
    """
    ends = turns.end_tokens(tokens or tokenizer(path), _named_ends(generation, path))
    if not ends:
        raise BadInput(f"{path} names no end token (eos_token_id) in generation_config.json: answers could never stop.")
    return ends


def describe_ends(path: Path) -> str:
    """Return a sentence where a checkpoint's files name different ends of a turn; empty if they agree."""
    return turns.describe_disagreement(tokenizer(path), _named_ends(None, path))


def names_all_ends(path: Path) -> bool:
    """Return whether a checkpoint's own generation settings name all tokens that end its answers, as others read."""
    return set(end_tokens(None, path)) <= set(_named_ends(None, path))


def name_ends(folder: Path) -> None:
    """Write into a checkpoint's generation settings all tokens that end its answers, if they do not name them all."""
    if not names_all_ends(folder):
        file = folder / GENERATION
        file.write_text(json.dumps(_settings(file) | {"eos_token_id": end_tokens(None, folder)}, indent=2) + "\n")


def _named_ends(generation: GenerationConfig | None, path: Path) -> list[int]:
    """Return the end tokens that a checkpoint's generation settings name, or without such a file its config.json."""
    if generation is not None:
        named = generation.eos_token_id
    elif (path / GENERATION).is_file():
        named = _settings(path / GENERATION).get("eos_token_id")
    else:
        named = checkpoint.config(path).get("eos_token_id")
    return [] if named is None else _listed(named)


def describe_departure(path: Path, device: str) -> str:
    """Describe how this engine's arithmetic on a device departs from the checkpoint's format; empty if it does not."""
    quantization = checkpoint.config(path).get("quantization_config") or {}
    if quantization.get("quant_method") == "bitsandbytes" and quantization.get("load_in_8bit") and device == "cpu":
        return "activations not rounded to int8"
    rounded_to = kind.rounded_activations(quantization)
    if rounded_to:
        return f"activations rounded to {rounded_to[0]} in software, products in full precision"
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
    _check_ids(model, tokens, prompts)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    ends = set(_listed(model.generation_config.eos_token_id))
    special = set(tokens.all_special_ids)
    completions: dict[int, Completion] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        answers = _decode(model, tokens, [prompts[i] for i in batch], max_new_tokens, temperature, (seed, start))
        for index, ids in zip(batch, answers, strict=True):
            completions[index] = completion(tokens, ids, ends, special)
        progress(len(batch))
    return [completions[index] for index in range(len(prompts))]


def _check_ids(model: PreTrainedModel, tokens: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]) -> None:
    """Raise BadInput if a prompt holds a token without a row in the embedding, such as a text model's image token."""
    rows = model.config.get_text_config().vocab_size
    largest = max((max(prompt, default=0) for prompt in prompts), default=0)
    if largest >= rows:
        token = tokens.convert_ids_to_tokens(largest)
        raise BadInput(
            f"A prompt holds the token '{token}' with the id {largest}, but the model's embedding has {rows} rows, for "
            f"ids 0 to {rows - 1}: leave the text of this token out of the questions."
        )


def completion(tokens: PreTrainedTokenizerBase, ids: list[int], ends: set[int], special: set[int]) -> Completion:
    """Return the completion of generated tokens, cut at the first end token; most answers need decoding only once."""
    stop = next((position for position, token in enumerate(ids) if token in ends), None)
    body = ids if stop is None else ids[:stop]
    raw = tokens.decode(body, skip_special_tokens=False)
    text = raw if special.isdisjoint(body) else tokens.decode(body, skip_special_tokens=True)
    if stop is None:
        return Completion(text, raw, len(body), "length")
    return Completion(text, raw, len(body) + 1, "stop")


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
    means = [0.0] * len(texts)
    start = 0
    with torch.inference_mode():
        while start < len(order):
            # The first text of a batch is its longest, and decides how many logits a row has.
            longest = len(texts[order[start]])
            max_rows = min(batch_size, _MAX_LOGITS // (longest * model.config.vocab_size))
            batch = order[start : start + max(1, max_rows)]
            width = max(len(prompts[i]) + len(texts[i]) for i in batch)
            batch = batch[: max(1, _MAX_POSITIONS // width)]

            rows = [[*prompts[i], *texts[i]] for i in batch]  # padded on the left, so that all texts end together
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                use_cache=False,
                logits_to_keep=longest + 1,
            )

            logits = output.logits[:, :-1].float()  # a position's logits are of the token that follows it
            scores = logits.gather(-1, ids[:, -longest:, None])[..., 0] - logits.logsumexp(-1)
            for i, row in zip(batch, scores, strict=True):
                means[i] = float(row[-len(texts[i]) :].double().mean())
            start += len(batch)
    return means


def _decompressed(path: Path, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a compressed-tensors checkpoint as plain matrices; activations are rounded where the scheme rounds them."""
    from transformers import CompressedTensorsConfig

    dequantize = CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # a warning that `dequantize` overrides, and bars
        warnings.simplefilter("ignore", UserWarning)
        model = pretrained.load(path, dtype=dtype, device_map=device, quantization_config=dequantize)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        if not hasattr(module, "weight"):
            # Attention, with scales of keys and values. Only a cell SCHEME+kv-fp8 rounds these, and vLLM answers it.
            module.quantization_enabled = False
            continue
        module.weight.data = module.weight.data.to(dtype)  # some formats always unpack to bfloat16
        if scheme.input_activations is None:
            # Nothing is left to round. Without the library's forward method it is an ordinary linear.
            module.__dict__.pop("forward", None)
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
        ids = model.generate(**padded, max_new_tokens=longest, do_sample=bool(temperature), **sampling)
    return ids[:, padded["input_ids"].shape[1] :].tolist()


def _listed(ids: int | Sequence[int]) -> list[int]:
    return list(ids) if isinstance(ids, list | tuple) else [ids]
