"""Fold a low-rank adapter into its base: in full precision, never into codes of four or eight bits."""

import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qrl import checkpoint, process
from qrl.checkpoint import head
from qrl.errors import BadInput, QrlError
from qrl.formats.kept import Kept
from qrl.recipe import Train
from qrl.train import adapter as adapters
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
    changes: bool  # whether the adapter changes any weight
    untied: bool  # whether the head is now stored beside the embedding that it was tied to


def check(base: checkpoint.Checkpoint, adapter: Path, into: str) -> None:
    """Check that an adapter can be merged into a base, before any weight is loaded; `into` is as for `run`.

    Raises:
        BadInput: the base is quantized or not the one that was trained over, or as `adapter.check`.
    """
    if base.quantization:
        raise BadInput(
            f"{base.path} is stored in {base.quantization}, but an adapter merges into full precision only, since "
            "merging into codes rounds the update away: give the full-precision base. If the adapter was trained over "
            "int8 or nf4, merge.into quantizes and dequantizes that base here."
        )
    adapters.check_files(adapter)
    _trained_over(adapter, base, into)
    adapters.check(adapter, base)


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
        BadInput: as `check`, or PEFT cannot load the adapter.
        QrlError: the merged model is further from the trained one than the limit.
    """
    full = checkpoint.check(base)
    check(full, adapter, into)
    over = _trained_over(adapter, full, into)
    target = over if into == "auto" else _settings(into, over.compute)
    process.hush_transformers()
    process.hush_gptqmodel()
    expected, before = _adapter_on(base, adapter, over, device, prompts)
    stored_in = full.dtype if store_dtype == "auto" else "float32"
    original, shift = policy.load(base, Train(), "cpu"), 0.0
    if target.packed:
        shift = _dequantize_into(original, policy.load(base, target, device).dequantize(dtype=torch.float32))
    was_tied = original.config.tie_word_embeddings
    merged, update = fold(_with_adapter(original, adapter), stored_in)
    is_tied = merged.config.tie_word_embeddings
    save.write(merged, base, out, dtype=stored_in)
    del merged, original  # before another one is loaded
    stored = _logits_of(out, prompts)
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
        shutil.rmtree(out, ignore_errors=True)
        raise QrlError(
            f"The merged model answers differently from the trained one: their KL is {kl:.2g} nats per token, and at "
            f"most {limit_text} is allowed. {reason}"
        )
    difference = max(float((on - off).abs().max()) for on, off in zip(expected, stored, strict=True))
    into = target.storage if target.packed else "full"
    return Merged(
        path=out,
        kl=kl,
        update_kl=update_kl,
        max_logit_diff=difference,
        merge_residual=update.residual,
        kept=update.kept,
        into=into,
        base_shift=shift,
        changes=update.length > 0,
        untied=was_tied and not is_tied,
    )


def fold(adapted, stored_in: str) -> tuple[Any, Update]:
    """Return the plain model of a PEFT model, its adapters merged, and what weights stored in this dtype keep of that.

    An adapter of a tied head, or of the embedding, changes only one of the two: they are stored apart where they differ
    then, and the model is untied.

    Raises:
        TypeError: the model holds bitsandbytes' codes.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    if any(policy.packed(adapted)):
        raise TypeError("An adapter merges into full-precision weights only, not into codes: dequantize them first.")
    was_tied = adapted.get_base_model().config.tie_word_embeddings  # PEFT changes it
    _part_head(adapted)
    update = Update(stored_in)
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            weight = module.get_base_layer().weight
            before = weight.detach().float().clone()
            module.merge()
            update.add(before, module.get_base_layer().weight.detach())
        elif isinstance(module, ModulesToSaveWrapper):
            trained = module.modules_to_save[module.active_adapters[0]]
            for name, weight in trained.named_parameters():
                update.add(module.original_module.get_parameter(name).detach(), weight.detach())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that all is merged already
        plain = adapted.merge_and_unload()
    if was_tied:
        _settle_head(plain)
    return plain, update


def _part_head(adapted) -> None:
    """Give a tied head that an adapter touches, or whose embedding it touches, a matrix of its own to merge into."""
    touched = {part for name, _ in adapted.named_modules() for part in name.split(".")[-2:-1]}
    if not touched.intersection((*head.HEADS, *head.EMBEDDINGS)):
        return
    seen: set[int] = set()
    for module in adapted.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in seen:
                setattr(module, name, torch.nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad))
            seen.add(id(weight))


def _settle_head(model) -> None:
    """Tie a head that was tied to the embedding again where both are equal; else record that it is untied."""
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = output.weight.equal(embedding.weight)
    if is_tied:
        output.weight = embedding.weight
    model.config.tie_word_embeddings = is_tied
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _with_adapter(model, adapter: Path):
    """Return a model with its adapter over it.

    Raises:
        BadInput: PEFT cannot load it, or would leave out a part of it.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapted = PeftModel.from_pretrained(model, adapter)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInput(
            f"{adapter} does not fit its base ({reason}): give the base that it was trained over."
        ) from error
    missing = next((str(warning.message) for warning in caught if "missing adapter keys" in str(warning.message)), "")
    if missing:
        reason = " ".join(missing.split())[:300]
        raise BadInput(f"{adapter} is not complete ({reason}): copy or save it again.")
    return adapted.eval()


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
    model = policy.load(base, over, device)
    if over.storage == "int8":
        model = model.dequantize(dtype=torch.float32)
    policy.compute_in_fp32(model)
    adapted = _with_adapter(model, adapter)
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


def _logits_of(out: Path, prompts: Prompts) -> list:
    """Return the logits of a written model, as later steps load it: a head could be lost on its way to the disk, too.

    Raises:
        BadInput: it is no checkpoint, or not finite; it is removed.
    """
    try:
        checkpoint.check(out)
        return _logits(policy.load(out, Train(), "cpu"), prompts)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


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
