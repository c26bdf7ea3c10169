"""Fold a low-rank adapter into its base: in full precision, never into codes of four or eight bits."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qrl import checkpoint, process
from qrl.checkpoint import header
from qrl.errors import BadInput, QrlError
from qrl.formats.kept import Kept
from qrl.recipe import Train
from qrl.train import policy, save
from qrl.train.kept import Update

Prompts = Sequence[Sequence[int]]  # lists of token ids
_OTHER_BASE = 0.01  # of the limit: that base's errors, which the adapter corrects, are no rounding


@dataclass(frozen=True)
class Merged:
    """A merged checkpoint and how far it is from the trained model."""

    path: Path
    kl: float  # from the adapter-on model, as it was trained, to this one: nats per token, mean over the prompts
    update_kl: float  # the same to the model with the adapter off: what training changed
    max_logit_diff: float  # largest |logit difference| to the adapter-on model; grows with the vocabulary and rounding
    merge_residual: float  # ‖stored − exact‖ / ‖exact − base‖ over merged weights: the loss to the dtype of storage
    kept: Kept | None  # what the stored weights keep of the update; None for an adapter without linears
    into: str  # full: the original weights; int8, nf4: these, dequantized
    base_shift: float  # ‖dequantized − original‖ / ‖original‖ over packed weights; 0 for full


def run(
    base: Path,
    adapter: Path,
    out: Path,
    prompts: Prompts,
    *,
    max_kl: float,
    into: str = "auto",
    store_dtype: str = "auto",
    device: str = "cpu",
) -> Merged:
    """Merge an adapter into its base in full precision, and compare the result with the adapter-on model.

    Args:
        base: full-precision checkpoint folder; never written to.
        adapter: a PEFT folder (adapter_config.json, adapter_model.safetensors).
        out: folder to make; it appears whole, by rename.
        prompts: to compare the two models' next-token distributions on.
        max_kl: limit of `Merged.kl`; a hundredth of it, if the adapter was trained over a base in another storage.
        into: `full`: the original weights; `int8`, `nf4`: these, dequantized; `auto`: what the adapter's record says it
            was trained over, else full.
        store_dtype: `fp32`, or `auto` for the base's own.
        device: where the base is packed again, as in training; merging itself runs on the CPU.

    Raises:
        BadInput: the base is quantized or not the one that was trained over, or the adapter is not one.
        QrlError: the merged model is further from the trained one than the limit.
    """
    full = checkpoint.check(base)
    if full.quantization:
        raise BadInput(
            f"{base} is stored in {full.quantization}, but an adapter merges into full precision only, since merging "
            "into codes rounds the update away: give the full-precision base. If the adapter was trained over int8 or "
            "nf4, merge.into quantizes and dequantizes that base here."
        )
    check_adapter(adapter)
    over = _trained_over(adapter, full, into)
    target = over if into == "auto" else _settings(into, over.compute)
    process.hush_transformers()
    process.hush_gptqmodel()
    from peft import PeftModel

    expected, before = _adapter_on(base, adapter, over, device, prompts)
    stored_in = full.dtype if store_dtype == "auto" else "float32"
    dtype = getattr(torch, stored_in)
    original, shift = policy.load(base, Train(), "cpu"), 0.0
    if target.packed:
        shift = _dequantize_into(original, policy.load(base, target, device).dequantize(dtype=torch.float32))
    merged, update = fold(PeftModel.from_pretrained(original, adapter), stored_in)
    stored = _logits(merged.to(dtype).to(torch.float32), prompts)
    kl, update_kl = _kl(expected, stored), _kl(expected, before)
    other_base = over.storage != target.storage
    limit = max_kl * (_OTHER_BASE if other_base else 1)
    if not kl <= limit:
        reason = f"Storing it in {stored_in} rounds too much of the update away: set merge.store_dtype = fp32."
        limit_text = f"merge.max_kl = {max_kl:g}"
        if other_base:
            limit_text = f"{limit:g}, a hundredth of merge.max_kl, since the base is another one than in training"
            reason = (
                f"The adapter was trained over the base in {over.storage} and corrects its errors: leave merge.into at "
                "auto."
            )
        raise QrlError(
            f"The merged model answers differently from the trained one: their KL is {kl:.2g} nats per token, and at "
            f"most {limit_text} is allowed. {reason}"
        )
    difference = max(float((on - off).abs().max()) for on, off in zip(expected, stored, strict=True))
    save.write(merged, base, out, dtype=stored_in)
    into = target.storage if target.packed else "full"
    return Merged(out, kl, update_kl, difference, update.residual, update.kept, into, shift)


def fold(adapted, stored_in: str) -> tuple[Any, Update]:
    """Return the plain model of a PEFT model, its adapters merged, and what weights stored in this dtype keep of that.

    The update is that of the merged linears: no other weight has one.

    Raises:
        TypeError: the model holds bitsandbytes' codes.
    """
    from peft.tuners.lora import LoraLayer

    if any(policy.packed(adapted)):
        raise TypeError("An adapter merges into full-precision weights only, not into codes: dequantize them first.")
    update = Update(stored_in)
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            base = module.get_base_layer().weight.data.float()
            delta = module.get_delta_weight(module.active_adapters[0]).float()
            update.add(base, base + delta)
    return adapted.merge_and_unload(), update


def _trained_over(adapter: Path, base: checkpoint.Checkpoint, into: str) -> Train:
    """Return settings that load the base as it was stored when the adapter was trained."""
    if not (note := policy.recorded(adapter)):
        return _settings("full" if into == "auto" else into, "auto")
    if note["base_digest"] != base.digest:
        wanted, has = f"{note['base_digest'][:12]}…", f"{base.path} has {base.digest[:12]}…"
        raise BadInput(f"{adapter} was trained over the base with digest {wanted}, but {has}: give that base.")
    return _settings(note["base_storage"], note["compute"])


def _settings(storage: str, compute: str) -> Train:
    """Return settings that load a base stored that way; an adapter's `full` is fp32."""
    storage = "fp32" if storage == "full" else storage
    return Train(method="lora", base_storage=storage, dtype="auto" if storage == "fp32" else compute)


def _adapter_on(base: Path, adapter: Path, over: Train, device: str, prompts: Prompts) -> tuple[list, list]:
    """Return logits of the base as stored in training, with its adapter on and off, in fp32 arithmetic.

    Training's own arithmetic, in bf16 or with INT8's rounded activations, would hide what the merge loses.
    """
    from peft import PeftModel

    model = policy.load(base, over, device)
    if over.storage == "int8":
        model = model.dequantize(dtype=torch.float32)
    policy.compute_in_fp32(model)
    adapted = PeftModel.from_pretrained(model, adapter).eval()
    trained = _logits(adapted, prompts)
    with adapted.disable_adapter():
        return trained, _logits(adapted, prompts)


def _dequantize_into(original, dequantized) -> float:
    """Copy dequantized values into the original model, and return their relative distance from the original ones."""
    values, moved, size = dequantized.state_dict(), 0.0, 0.0
    for name, weight in original.state_dict().items():
        value = values[name].to(weight.device, weight.dtype)
        if not value.equal(weight):
            moved += float((value - weight).square().sum())
            size += float(weight.square().sum())
            weight.copy_(value)
    return (moved / size) ** 0.5 if size else 0.0


def check_adapter(path: Path) -> None:
    """Raise BadInput if a folder is no PEFT adapter in safetensors, or a file of it is damaged."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (path / name).is_file():
            raise BadInput(f"{path} is no adapter: {name} is missing; expected a PEFT folder with safetensors.")
    header.read(path / "adapter_model.safetensors")
    try:
        json.loads((path / "adapter_config.json").read_text())
    except ValueError as error:
        raise BadInput(f"{path / 'adapter_config.json'} is not JSON: {error}.") from None


def _logits(model, prompts: Prompts) -> list:
    with torch.inference_mode():
        return [model(torch.tensor([list(ids)], device=model.device)).logits[0].float().cpu() for ids in prompts]


def _kl(logits: list, others: list) -> float:
    """Return the mean of KL(softmax(logits) || softmax(others)) per token, in nats; items are (tokens, vocabulary)."""
    total = 0.0
    for expected, other in zip(logits, others, strict=True):
        pair = (other.double().log_softmax(-1), expected.double().log_softmax(-1))
        total += float(torch.nn.functional.kl_div(*pair, reduction="sum", log_target=True))
    return total / sum(map(len, logits))
