"""Folding a low-rank adapter into its base: in full precision, never into codes of four or eight bits.

An adapter that was trained over packed weights corrects what packing did to them, so it belongs to those values and not to the
original ones: the base is packed afresh, unpacked into full precision, and the adapter folded into that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, process
from qrl.errors import BadInput, QrlError
from qrl.formats import header
from qrl.recipe import Train
from qrl.train import policy, save

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Merged:
    """A merged checkpoint and how far it is from the model that was trained."""

    path: Path
    max_logit_diff: float  # largest |logit difference| to the adapter-on model, as it was trained, over the prompts
    merge_residual: float  # ‖stored − exact‖ / ‖exact − base‖ over merged weights: what the base's dtype rounded away
    into: str  # full: the original weights; int8, nf4: what these unpack to
    base_shift: (
        float  # ‖unpacked − original‖ / ‖original‖ over packed weights: what packing did to the base; 0 for full
    )


def run(
    base: Path,
    adapter: Path,
    out: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_logit_diff: float,
    into: str = "auto",
    device: str = "cpu",
) -> Merged:
    """Merges an adapter into its base in full precision and checks the result against the adapter-on model.

    Args:
        base: full-precision checkpoint folder; its digest is the same afterwards.
        adapter: a PEFT folder (adapter_config.json, adapter_model.safetensors).
        out: folder to make; it appears whole, by rename.
        prompts: lists of token ids to compare logits on.
        max_logit_diff: limit on the largest logit difference.
        into: `full`: the original weights; `int8`, `nf4`: what these unpack to; `auto`: what the adapter was trained over, as it
            records, else full.
        device: where the base is packed again, as in training; merging itself runs on the CPU.

    Raises:
        BadInput: the base is quantized or another one than was trained over, or the adapter is not one.
        QrlError: the merged model differs by more than the limit.
    """
    found = checkpoint.check(base)
    if found.quantization:
        raise BadInput(
            f"{base} is stored in {found.quantization}: an adapter merges into full precision only, since merging into "
            "codes rounds the update away. Give the full-precision base; one that was trained over int8 or nf4 is packed and "
            "unpacked here, as merge.into says."
        )
    check_adapter(adapter)
    over = _trained_over(adapter, found, into)
    target = over if into == "auto" else _settings(into, over.compute)
    process.hush_transformers()
    process.hush_gptqmodel()
    import torch
    from peft import PeftModel

    wanted = _adapter_on(base, adapter, over, device, prompts)
    original, shift = policy.load(base, Train(), "cpu"), 0.0
    if target.packed:
        shift = _unpack(policy.load(base, target, device).dequantize(dtype=torch.float32), original)
    merged, residual = fold(PeftModel.from_pretrained(original, adapter), getattr(torch, found.dtype))
    stored = _logits(merged.to(getattr(torch, found.dtype)).to(torch.float32), prompts)
    difference = max(float((a - b).abs().max()) for a, b in zip(wanted, stored, strict=True))
    if not difference <= max_logit_diff:
        raise QrlError(
            f"The merged model's logits differ from the adapter-on model's by {difference:.3g}, above merge.max_logit_diff "
            f"= {max_logit_diff:g}: {_why(over, target)}"
        )
    save.write(merged, base, out, dtype=found.dtype)
    return Merged(out, difference, residual, target.storage if target.packed else "full", shift)


def fold(adapted, stored: torch.dtype):
    """Adds each adapter to the matrix that it stands beside, and takes it away.

    Args:
        adapted: a PEFT model over full-precision weights.
        stored: dtype that the merged weights will be kept in.

    Returns:
        The plain model, and ‖stored − exact‖ / ‖exact − base‖ over the merged matrices.

    Raises:
        TypeError: the model holds bitsandbytes' codes, into which nothing is ever merged.
    """
    from peft.tuners.lora import LoraLayer

    if any(policy.packed(adapted)):
        raise TypeError("An adapter merges into full-precision weights only, but these are codes: unpack them first.")
    lost = update = 0.0
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            delta = module.get_delta_weight(module.active_adapters[0]).float()
            exact = module.get_base_layer().weight.data.float() + delta
            lost += float((exact.to(stored).float() - exact).square().sum())
            update += float(delta.square().sum())
    return adapted.merge_and_unload(), (lost / update) ** 0.5 if update else 0.0


def _trained_over(adapter: Path, found: checkpoint.Checkpoint, asked: str) -> Train:
    """The base's storage under which the adapter was trained, as settings that load it again."""
    note = policy.recorded(adapter)
    if note and note["base_digest"] != found.digest:
        raise BadInput(
            f"{adapter} was trained over the base with digest {note['base_digest'][:12]}…, but {found.path} has "
            f"{found.digest[:12]}…: give the base that it was trained over."
        )
    return (
        _settings(note["base_storage"], note["compute"])
        if note
        else _settings("full" if asked == "auto" else asked, "auto")
    )


def _settings(storage: str, compute: str) -> Train:
    """Settings that load a base stored that way; an adapter's `full` is fp32."""
    storage = {"full": "fp32"}.get(storage, storage)
    return Train(method="lora", base_storage=storage, dtype="auto" if storage == "fp32" else compute)


def _why(over: Train, target: Train) -> str:
    if over.storage != target.storage:
        return f"it was trained over a base in {over.storage}, whose errors it corrects; leave merge.into at auto."
    return "the base's dtype rounds too much of the update away; give a base in a wider one."


def _adapter_on(base: Path, adapter: Path, over: Train, device: str, prompts: Sequence[Sequence[int]]) -> list:
    """Logits of the model that was trained: the base as it lay in memory, with the adapter beside it, in fp32 arithmetic.

    The values are those of training; its arithmetic would bury what the merge loses under its own rounding: bf16's, or that of
    activations, which bitsandbytes' INT8 rounds along with the weights and no merged model repeats.
    """
    import torch
    from peft import PeftModel

    model = policy.load(base, over, device)
    if over.storage == "int8":
        model = model.dequantize(dtype=torch.float32)
    policy.compute_in_fp32(model)
    return _logits(PeftModel.from_pretrained(model, adapter).eval(), prompts)


def _unpack(unpacked, original) -> float:
    """Puts a packed base's values into the original model; returns how far they lie from the original ones, relatively."""
    values, moved, size = unpacked.state_dict(), 0.0, 0.0
    for name, weight in original.state_dict().items():
        value = values[name].to(weight.device, weight.dtype)
        if not value.equal(weight):
            moved += float((value - weight).square().sum())
            size += float(weight.square().sum())
            weight.copy_(value)
    return (moved / size) ** 0.5 if size else 0.0


def check_adapter(path: Path) -> None:
    """Refuses a folder that is no PEFT adapter in safetensors."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (path / name).is_file():
            raise BadInput(f"{path} is no adapter: {name} is missing; expected a PEFT folder with safetensors.")
    header.read(path / "adapter_model.safetensors")
    try:
        json.loads((path / "adapter_config.json").read_text())
    except ValueError as error:
        raise BadInput(f"{path / 'adapter_config.json'} is not JSON: {error}.") from None


def _logits(model, prompts: Sequence[Sequence[int]]) -> list:
    import torch

    with torch.inference_mode():
        return [model(torch.tensor([list(ids)], device=model.device)).logits.float().cpu() for ids in prompts]
