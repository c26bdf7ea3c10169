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
from qrl.errors import BadInput, QrlError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Keys that describe the file and not the model, and keys that `rewrite` translates.
_FILE_KEYS = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_TRANSLATED_KEYS = {"rope_parameters", "rope_scaling", "layer_types"}


def rewrite(config: dict) -> dict:
    """Translate a config.json of transformers 5 for 4.51; one of 4.x stays as it is.

    Raises:
        BadInput: 4.51 cannot express a setting.
    """
    old = config | {"torch_dtype": config.get("dtype", config.get("torch_dtype"))}
    for key in ("dtype", "rope_parameters", "transformers_version"):
        old.pop(key, None)
    rope = config.get("rope_parameters")
    if rope is None:
        return old
    unfit = ""
    if any(isinstance(value, dict) for value in rope.values()) or "rope_theta" not in rope:
        unfit = f"these rope_parameters: {json.dumps(rope)}"
    elif set(config.get("layer_types") or ()) - {"full_attention"}:
        unfit = "layers of mixed attention (layer_types)"
    if unfit:
        raise BadInput(f"AutoAWQ's transformers 4.51 cannot express {unfit}; use nf4 instead.")
    moved = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if rope.get("rope_type", "default") != "default":
        moved["rope_scaling"] = {key: value for key, value in rope.items() if key not in moved}
    return old | moved


def stage(source: Path, folder: Path) -> None:
    """Write a copy of `source` for transformers 4.51: config.json rewritten, weights linked, nothing else."""
    (folder / "config.json").write_text(json.dumps(rewrite(checkpoint.config(source)), indent=2))
    for name in checkpoint.shards(source):
        (folder / name).symlink_to((source / name).resolve())
    if checkpoint.shards(source) != [checkpoint.WEIGHTS]:
        (folder / checkpoint.INDEX).symlink_to((source / checkpoint.INDEX).resolve())


def tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """Return the source's tokenizer with its chat template and special tokens, the same in transformers 4 and 5.

    Raises:
        BadInput: the folder has no tokenizer.json.
    """
    from transformers import PreTrainedTokenizerFast

    if not (source / "tokenizer.json").is_file():
        raise BadInput(f"{source} has no tokenizer.json: load its tokenizer with transformers 5 and save it.")
    settings = _json(source / "tokenizer_config.json")
    template = _json(source / "chat_template.json").get("chat_template") or settings.get("chat_template")
    for name in ("chat_template.jinja", f"{checkpoint.TEMPLATES}/default.jinja"):  # transformers prefers the last
        if (source / name).is_file():
            template = (source / name).read_text(encoding="utf-8")
    tokens = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    tokens = {name: token for name, token in tokens.items() if token is not None}
    return PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"), chat_template=template, **tokens)


def _json(file: Path) -> dict:
    return json.loads(file.read_text()) if file.is_file() else {}


def verify(model: PreTrainedModel, loading: dict, source: Path) -> None:
    """Check that a staged model in float32 is the original one, from its `output_loading_info` and its settings.

    Raises:
        QrlError: weights are missing or left over, or a setting or a rotary frequency differs.
    """
    import torch

    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    missing = set(loading["missing_keys"]) - tied
    if left := sorted(missing.union(loading["unexpected_keys"], loading["mismatched_keys"])):
        raise QrlError(f"AutoAWQ's transformers does not load {source} completely: {left[0]} is missing or left over.")
    original = checkpoint.config(source)
    for key, value in original.items():
        loaded = json.loads(json.dumps(getattr(model.config, key, value), default=str))  # as in a file
        if key not in _FILE_KEYS | _TRANSLATED_KEYS and loaded != value:
            read = f"AutoAWQ's transformers reads {key} of {source} as {loaded!r}"
            raise QrlError(f"{read}, but it is {value!r}: nothing was quantized.")
    rope = original.get("rope_parameters") or {"rope_theta": original.get("rope_theta")}
    if rope.get("rope_theta") and rope.get("rope_type", "default") == "default" and not original.get("rope_scaling"):
        loaded = model.get_decoder().rotary_emb.inv_freq.float().cpu()
        width = 2 * len(loaded)
        expected = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
        if not torch.allclose(loaded, expected, rtol=1e-4):
            read = f"AutoAWQ's transformers reads {source} with another rotary base"
            raise QrlError(f"{read} than {rope['rope_theta']}: nothing was quantized.")
