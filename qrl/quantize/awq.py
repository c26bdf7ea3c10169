"""AWQ in 4 bits with AutoAWQ: scales that spare the channels which activations make important, then clipping.

Runs in the environment of projects/awq: AutoAWQ 0.2.9 is archived and needs transformers 4.51. Two of its habits are
corrected through its own hooks, see `_autoawq` and `rows`; the method and the grid of its search are untouched.
Source: Lin et al., AWQ (arXiv 2306.00978).
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.errors import BadInput, QrlError
from qrl.quantize import staging

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

WORD = 8  # outputs that share an int32 of codes
CLIP_BLOCK = 64  # outputs that AutoAWQ's clipping takes together, at least


def quantize(
    source: Path,
    out: Path,
    *,
    texts: Sequence[str],
    group_size: int,
    max_tokens: int,
    seed: int,
    device: str,
    reference: Path | None = None,
) -> None:
    """Write `source` in AWQ's W4 with zero points, GEMM layout, to `out`: config.json and safetensors.

    Args:
        source: a full-precision checkpoint folder.
        out: an existing, empty folder.
        texts: chat-rendered training texts, end token included.
        group_size: input channels that share a scale.
        max_tokens: longest text allowed.
        seed: of torch; the search itself draws nothing.
        device: "cpu" or "cuda"; AutoAWQ's search takes a GPU wherever there is one.
        reference: see `staging.write_reference`.

    Raises:
        BadInput: no texts, a text that is too long, or an architecture or widths that AutoAWQ cannot quantize.
        QrlError: not the environment of projects/awq, or the staged copy is not the same model.
    """
    blocks = rows(_token_ids(source, texts), max_tokens)
    architectures, settings, quantizer = _autoawq()
    kind = checkpoint.config(source).get("model_type")
    if kind not in architectures:
        raise BadInput(f"AutoAWQ does not know the architecture '{kind}': expected one of {', '.join(architectures)}.")
    with tempfile.TemporaryDirectory(dir=out) as staged:
        staging.stage(source, Path(staged))
        model = _load(Path(staged), source, device, seed, reference)
        wrapped = architectures[kind](model, kind, False, model.config, settings(), None)
        check_widths(wrapped.get_model_layers(model), group_size)
        wrapped.quantize(
            tokenizer=None,  # the calibration is tokens already
            quant_config={"zero_point": True, "q_group_size": group_size, "w_bit": 4, "version": "GEMM"},
            calib_data=blocks,
            max_calib_samples=len(blocks),
            max_calib_seq_len=len(blocks[0]),
            quantizer_cls=quantizer,
        )
        model.half()  # norms and embeddings; codes are integers and scales are float16 already
        wrapped.save_quantized(str(out))
    _write_config(source, out, wrapped.quant_config.to_transformers_dict())


def rows(texts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Calibration texts as rows of one length, which is how AutoAWQ takes them.

    Left alone, AutoAWQ drops texts that are too long, glues the others together, cuts that into blocks of `max_calib_seq_len`
    without regard to where a text begins, and throws the rest away; a small set can give no block at all. Here every text
    begins a row, so that its tokens stand where they stand when the model is asked, and the row is filled up to the length
    of the longest text with the texts that follow it.

    Args:
        texts: N lists of token ids.
        max_tokens: longest text allowed.

    Returns:
        N rows of L token ids, L being the length of the longest text.

    Raises:
        BadInput: no texts, an empty one, or one that is too long.
    """
    lengths = [len(ids) for ids in texts]
    if not lengths or not min(lengths):
        raise BadInput("AWQ needs calibration texts that are not empty: expected chat-rendered training texts.")
    longest = max(lengths)
    if longest > max_tokens:
        raise BadInput(
            f"Calibration text {lengths.index(longest)} has {longest} tokens, but at most {max_tokens} are allowed: raise "
            "quantize.calibration_max_tokens."
        )
    filled = []
    for start in range(len(texts)):
        row = list(texts[start])
        following = start + 1
        while len(row) < longest:
            row += texts[following % len(texts)]
            following += 1
        filled.append(row[:longest])
    return filled


def _token_ids(source: Path, texts: Sequence[str]) -> list[list[int]]:
    tokenizer = staging.tokenizer(source)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def _autoawq() -> tuple[dict[str, type], type, type]:
    """AutoAWQ's architectures, its settings, and its quantizer with a search that leaves the weights as they were.

    The search scales weights in place and restores them from a copy made by `.cpu()`. On a CPU that is no copy: the first
    scale it tries stays in the weights, uncompensated, and every later one is judged on top of it.
    """
    try:
        with warnings.catch_warnings(record=True):  # a long notice of its end, at every import
            from awq.models._config import AwqConfig
            from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP
            from awq.quantize.quantizer import AwqQuantizer
    except ImportError as error:
        raise QrlError(f"AutoAWQ cannot be imported here ({error}): run this step in the environment of projects/awq.") from None

    class Quantizer(AwqQuantizer):
        def _compute_best_scale(self, x, w_mean, x_mean, module2inspect, *rest):
            copying = module2inspect.register_state_dict_post_hook(copy_state)
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *rest)
            finally:
                copying.remove()

    return AWQ_CAUSAL_LM_MODEL_MAP, AwqConfig, Quantizer


def _load(staged: Path, source: Path, device: str, seed: int, reference: Path | None) -> PreTrainedModel:
    """The staged copy, held against its source in float32; a CPU searches in that, too, a GPU in float16 as AutoAWQ does."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model, loading = AutoModelForCausalLM.from_pretrained(
        staged,
        torch_dtype=torch.float32,
        device_map=device,
        trust_remote_code=False,
        use_safetensors=True,
        use_cache=False,
        output_loading_info=True,
    )
    staging.verify(model, loading, source, reference)
    model.eval().requires_grad_(False)
    return model if device == "cpu" else model.half()


def copy_state(module: torch.nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    for name, value in state.items():
        state[name] = value.clone()


def check_widths(layers: torch.nn.ModuleList, group_size: int) -> None:
    from torch import nn

    for name, linear in layers.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        if linear.in_features % group_size:
            raise BadInput(
                f"Layer {name} has {linear.in_features} inputs, which groups of {group_size} do not divide: choose another "
                "quantize.group_size."
            )
        if linear.out_features % CLIP_BLOCK:
            raise BadInput(f"Layer {name} has {linear.out_features} outputs, but AutoAWQ needs a multiple of {CLIP_BLOCK}; use nf4.")


def _write_config(source: Path, out: Path, quantization: dict) -> None:
    """The source's own config.json, so that transformers 5 and vLLM read its rotary settings, and what was done to it."""
    config = checkpoint.config(source)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = "float16"
    config["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
