"""Check that the tokenizer's ids are rows of the embedding, without loading either.

An id beyond the last row is an error deep in a kernel when the token first appears. A vocabulary that is smaller than
the embedding is fine: many models pad it to a multiple of 64. So is a special token beyond it that nothing writes, such
as the image token of Gemma 3's text model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qrl.checkpoint import head
from qrl.checkpoint.header import Entry
from qrl.errors import BadInput

_ROLES = ("eos_token", "bos_token", "pad_token", "unk_token")  # of tokenizer_config.json, and with _id of config.json
_Json = Callable[[Path], dict]


@dataclass(frozen=True)
class _Vocabulary:
    ordinary: Mapping[str, int]  # tokens that any text may become
    special: Mapping[str, int]  # tokens that only their own names become

    def with_named(self, names: Sequence[str]) -> dict[str, int]:
        """Return the special tokens with those that a tokenizer names and lacks: transformers adds them at the end."""
        special_ids = dict(self.special)
        next_id = max((*self.ordinary.values(), *self.special.values()), default=-1) + 1
        for token in names:
            if token not in self.ordinary and token not in special_ids:
                special_ids[token] = next_id
                next_id += 1
        return special_ids


def tokens(folder: Path, read_json: _Json) -> dict[str, int]:
    """Return the tokens of a folder's tokenizer and their ids; none where its files are binary.

    Raises:
        BadInput: a file is no JSON object.
    """
    tokenizer_settings = _tokenizer_settings(folder, read_json)
    vocabulary = _vocabulary(folder, tokenizer_settings, read_json)
    if not vocabulary.ordinary and not vocabulary.special:
        return {}
    return {**vocabulary.ordinary, **vocabulary.with_named(list(_roles(tokenizer_settings).values()))}


def check(folder: Path, settings: Mapping[str, Any], entry_of: Mapping[str, Entry], read_json: _Json) -> None:
    """Check that every token that can be written or padded with has a row in the embedding.

    Args:
        folder: of the checkpoint.
        settings: its config.json.
        entry_of: its tensors, by name.
        read_json: reads a JSON object from a file of limited size.

    Raises:
        BadInput: an id has no row; the sentence names the token, its id and the number of rows.
    """
    rows = head.row_count(settings, entry_of)
    if rows is None:
        return
    _check_named_ids(folder, settings, rows, read_json)
    _check_tokens(folder, rows, read_json)


def _check_named_ids(folder: Path, settings: Mapping[str, Any], rows: int, read_json: _Json) -> None:
    """Check the ids that the configuration names; negative ones and null mean that there is none."""
    named_ids = [("config.json", "pad_token_id", settings.get("pad_token_id"))]
    ends_file = folder / "generation_config.json"
    generation_settings = read_json(ends_file) if ends_file.is_file() else settings
    for key in ("pad_token_id", "eos_token_id"):
        value = generation_settings.get(key)
        for token_id in value if isinstance(value, list) else [value]:
            named_ids.append((ends_file.name if ends_file.is_file() else "config.json", key, token_id))
    for name, key, token_id in named_ids:
        if token_id is not None and type(token_id) is not int:
            raise BadInput(
                f"{folder / name} names the token {token_id!r} ({key}), but a whole number was expected: copy the file "
                "from the model again, or give the token's id.",
                field=key,
            )
        if type(token_id) is int and token_id >= rows:
            raise BadInput(
                f"{folder / name} names the token {token_id} ({key}), but the embedding has {rows} rows, for ids 0 to "
                f"{rows - 1}: copy the file from the model again, or name a token of this model.",
                field=key,
            )


def _check_tokens(folder: Path, rows: int, read_json: _Json) -> None:
    tokenizer_settings = _tokenizer_settings(folder, read_json)
    vocabulary = _vocabulary(folder, tokenizer_settings, read_json)
    if not vocabulary.ordinary and not vocabulary.special:
        return  # of a kind that is not read here
    token_of_role = _roles(tokenizer_settings)
    special_ids = vocabulary.with_named(list(token_of_role.values()))

    reason_of = {token: "" for token, token_id in vocabulary.ordinary.items() if token_id >= rows}
    beyond = [token for token, token_id in special_ids.items() if token_id >= rows]
    templates = _templates(folder, tokenizer_settings) if beyond else ""
    for token in beyond:
        roles = [role for role, name in token_of_role.items() if name == token]
        if roles:
            reason_of[token] = f", the tokenizer's {' and '.join(roles)},"
        elif token in templates:
            reason_of[token] = ", which the chat template writes,"
    if not reason_of:
        return
    id_of = {**vocabulary.ordinary, **special_ids}
    token = min(reason_of, key=lambda name: id_of[name])
    others = f" and {len(reason_of) - 1:,} further ones" if len(reason_of) > 1 else ""
    raise BadInput(
        f"The tokenizer of {folder} has tokens beyond the embedding: '{token}'{reason_of[token]} has the id "
        f"{id_of[token]}{others}, but the embedding has {rows} rows, for ids 0 to {rows - 1}. Copy the tokenizer from "
        f"the model again, name a token of this model instead, or enlarge the embedding: "
        f"model.resize_token_embeddings({max(id_of[name] for name in reason_of) + 1}), then save model and tokenizer."
    )


def _tokenizer_settings(folder: Path, read_json: _Json) -> dict:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _roles(tokenizer_settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that a tokenizer names for a purpose, such as `pad_token`."""
    token_of_role = {role: _content(tokenizer_settings.get(role)) for role in _ROLES}
    return {role: token for role, token in token_of_role.items() if token}


def _vocabulary(folder: Path, tokenizer_settings: Mapping[str, Any], read_json: _Json) -> _Vocabulary:
    """Return the tokens of a folder's JSON files, without those of a binary vocabulary such as tokenizer.model."""
    ordinary: dict[str, int] = {}
    special: dict[str, int] = {}
    if (folder / "tokenizer.json").is_file():
        tokenizer = read_json(folder / "tokenizer.json")
        model = tokenizer.get("model")
        tokens = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(tokens, list):  # Unigram's, with scores
            tokens = {str(item[0]): index for index, item in enumerate(tokens) if isinstance(item, list) and item}
        ordinary |= _ids(tokens)
        added_tokens = tokenizer.get("added_tokens")
        for token in added_tokens if isinstance(added_tokens, list) else []:
            _add(token, token.get("id") if isinstance(token, dict) else None, ordinary, special)
        return _Vocabulary(ordinary, special)

    if (folder / "vocab.json").is_file():
        ordinary |= _ids(read_json(folder / "vocab.json"))
    if (folder / "added_tokens.json").is_file():
        special |= _ids(read_json(folder / "added_tokens.json"))
    added_of_id = tokenizer_settings.get("added_tokens_decoder")
    for token_id, token in added_of_id.items() if isinstance(added_of_id, dict) else ():
        _add(token, int(token_id) if token_id.isdecimal() else None, ordinary, special)
    return _Vocabulary(ordinary, special)


def _add(token: Any, token_id: Any, ordinary: dict[str, int], special: dict[str, int]) -> None:
    """Add a token as tokenizer.json describes it to those of its kind; one that is described otherwise is left out."""
    content = _content(token)
    if not content or type(token_id) is not int:
        return
    kind, other_kind = (special, ordinary) if token.get("special") else (ordinary, special)
    other_kind.pop(content, None)
    kind[content] = token_id


def _ids(tokens: Any) -> dict[str, int]:
    """Return those of a mapping's items that are tokens and ids."""
    if not isinstance(tokens, dict):
        return {}
    return {token: token_id for token, token_id in tokens.items() if type(token_id) is int}


def _content(token: Any) -> str | None:
    """Return the text of a token, which is a text or an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _templates(folder: Path, tokenizer_settings: Mapping[str, Any]) -> str:
    """Return the text of all chat templates of a folder."""
    files = [folder / "chat_template.jinja", folder / "chat_template.json"]
    files += sorted((folder / "additional_chat_templates").glob("*.jinja"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    return "\n".join((*texts, str(tokenizer_settings.get("chat_template") or "")))
