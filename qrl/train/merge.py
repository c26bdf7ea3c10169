"""Folding a low-rank adapter into its base: in full precision, never into codes of four or eight bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qrl import checkpoint
from qrl.errors import BadInput, QrlError
from qrl.formats import header
from qrl.train import save


@dataclass(frozen=True)
class Merged:
    """A merged checkpoint and how far it is from the model that was trained."""

    path: Path
    max_logit_diff: float  # largest |logit difference| to the adapter-on model over the prompts
    merge_residual: float  # ‖stored − exact‖ / ‖exact − base‖ over merged weights: what the base's dtype rounded away


def run(base: Path, adapter: Path, out: Path, prompts: Sequence[Sequence[int]], *, max_logit_diff: float) -> Merged:
    """Merges an adapter into a full-precision base and checks the result against the adapter-on model.

    Args:
        base: full-precision checkpoint folder; its digest is the same afterwards.
        adapter: a PEFT folder (adapter_config.json, adapter_model.safetensors).
        out: folder to make; it appears whole, by rename.
        prompts: lists of token ids to compare logits on.
        max_logit_diff: limit on the largest logit difference.

    Raises:
        BadInput: the base is quantized, or the adapter is not one.
        QrlError: the merged model differs by more than the limit.
    """
    found = checkpoint.check(base)
    if found.quantization:
        raise BadInput(
            f"{base} is stored in {found.quantization}: an adapter merges into full precision only, since merging into "
            "codes rounds the update away. Give the full-precision or the dequantized base."
        )
    check_adapter(adapter)
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, use_safetensors=True)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    adapted = PeftModel.from_pretrained(model, adapter).eval()
    wanted = _logits(adapted, prompts)
    merged = adapted.merge_and_unload()
    exact = {name: weight.detach().clone() for name, weight in merged.named_parameters()}
    merged = merged.to(getattr(torch, found.dtype))
    residual = _residual(before, exact, dict(merged.named_parameters()))
    stored = _logits(merged.to(torch.float32), prompts)
    difference = max(float((a - b).abs().max()) for a, b in zip(wanted, stored, strict=True))
    if difference > max_logit_diff:
        raise QrlError(
            f"The merged model's logits differ from the adapter-on model's by {difference:.3g}, above merge.max_logit_diff "
            f"= {max_logit_diff:g}: the base's dtype rounds too much of the update away; merge into a wider one."
        )
    save.write(merged, base, out, dtype=found.dtype)
    return Merged(out, difference, residual)


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
        return [model(torch.tensor([list(ids)])).logits.float() for ids in prompts]


def _residual(before: dict, exact: dict, stored: dict) -> float:
    moved = {name for name in exact if not exact[name].equal(before[name])}
    lost = sum(float((stored[name].float() - exact[name]).square().sum()) for name in moved)
    update = sum(float((exact[name] - before[name]).square().sum()) for name in moved)
    return (lost / update) ** 0.5 if update else 0.0
