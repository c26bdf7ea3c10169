"""A copy of a checkpoint that transformers 4.51, AutoAWQ's last, loads as the same model, and a check that it does.

transformers 5 moved the rotary base into `rope_parameters`; 4.51 silently ignores that key and uses 10000, so that
every token gets the wrong position. It also fails on the tokenizer classes of 5. So the configuration is rewritten, the
weights are linked, and the loaded model's settings and rotary frequencies are compared with the original's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.checkpoint import head
from qrl.errors import BadInput, QrlError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Keys that describe the file and not the model, and keys that `rewrite` translates.
_FILE_KEYS = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_TRANSLATED_KEYS = {"rope_parameters", "rope_scaling", "layer_types"}


def rewrite(config: dict) -> dict:
    """Translate a config.json of transformers 5 for 4.51; one of 4.x stays as it is.

    Raises:
        BadInput: 4.51 cannot express a setting.
    """
    rewritten = config | {"torch_dtype": config.get("dtype", config.get("torch_dtype"))}
    for key in ("dtype", "rope_parameters", "transformers_version"):
        rewritten.pop(key, None)
    rope = config.get("rope_parameters")
    if rope is None:
        return rewritten

    inexpressible = ""
    if any(isinstance(value, dict) for value in rope.values()) or "rope_theta" not in rope:
        inexpressible = f"these rope_parameters: {json.dumps(rope)}"
    elif set(config.get("layer_types") or ()) - {"full_attention"}:
        inexpressible = "layers of mixed attention (layer_types)"
    if inexpressible:
        raise BadInput(f"AutoAWQ's transformers 4.51 cannot express {inexpressible}; use nf4 instead.")

    # 4.51 has these two at the top level, and the rest of a scaling under `rope_scaling`.
    top_level = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    rewritten |= top_level
    if rope.get("rope_type", "default") != "default":
        rewritten["rope_scaling"] = {key: value for key, value in rope.items() if key not in top_level}
    return rewritten


def stage(source: Path, folder: Path) -> None:
    """Write a copy of `source` for transformers 4.51: config.json rewritten, weights linked, nothing else."""
    (folder / "config.json").write_text(json.dumps(rewrite(checkpoint.config(source)), indent=2))
    for name in checkpoint.shards(source):
        (folder / name).symlink_to((source / name).resolve())
    if checkpoint.shards(source) != [checkpoint.WEIGHTS]:
        (folder / checkpoint.INDEX).symlink_to((source / checkpoint.INDEX).resolve())


def verify(model: PreTrainedModel, loading: dict, source: Path) -> None:
    """Check that a staged model in float32 is the original one: its weights, the head included, and its settings.

    With equal weights, settings and rotary frequencies, logits are equal up to rounding.

    Raises:
        QrlError: weights are missing, left over or of other values, or a setting or a rotary frequency differs.
    """
    import torch

    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    missing = set(loading["missing_keys"]) - tied
    misfits = sorted(missing.union(loading["unexpected_keys"], loading["mismatched_keys"]))
    if misfits:
        raise QrlError(
            f"AutoAWQ's transformers does not load {source} completely: {misfits[0]} is missing or left over."
        )

    original = checkpoint.config(source)
    _check_weights(model, source, original)
    for key, value in original.items():
        loaded = json.loads(json.dumps(getattr(model.config, key, value), default=str))  # as in a file
        if key not in _FILE_KEYS | _TRANSLATED_KEYS and loaded != value:
            raise QrlError(
                f"AutoAWQ's transformers reads {key} of {source} as {loaded!r}, but it is {value!r}: nothing was "
                "quantized."
            )

    # The frequencies follow from the base alone only where no scaling changes them.
    rope = original.get("rope_parameters") or {"rope_theta": original.get("rope_theta")}
    base = rope.get("rope_theta")
    is_scaled = rope.get("rope_type", "default") != "default" or original.get("rope_scaling")
    if base and not is_scaled:
        frequencies = model.get_decoder().rotary_emb.inv_freq.float().cpu()
        width = 2 * len(frequencies)
        expected = 1.0 / base ** (torch.arange(0, width, 2).float() / width)
        if not torch.allclose(frequencies, expected, rtol=1e-4):
            raise QrlError(
                f"AutoAWQ's transformers reads {source} with another rotary base than {base}: nothing was quantized."
            )


def _check_weights(model: PreTrainedModel, source: Path, config: dict) -> None:
    """Raise QrlError if a loaded weight, or the head that logits are computed with, is not the stored one."""
    entry_of = checkpoint.entries(source)
    tensor_of = model.state_dict()
    head_name = head.used(config, entry_of)
    head_module = model.get_output_embeddings()
    if head_name and head_module is not None:
        tensor_of[head_name] = head_module.weight
    unused_head = head.head(entry_of) if head.is_tied(config) else None  # equal up to rounding
    names = [name for name in entry_of if name in tensor_of and name != unused_head]
    for name, stored in checkpoint.tensors(source, names):
        if not tensor_of[name].cpu().equal(stored.to(tensor_of[name].dtype)):
            raise QrlError(
                f"AutoAWQ's transformers loads {name} of {source} with other values than are stored: nothing was "
                "quantized."
            )
