"""Calibration texts: from a file, as token ids, as rows of one length, and their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from qrl.errors import BadInput


def digest(texts: Sequence[str]) -> str:
    """sha256 over the texts in order, each ended by a zero byte."""
    return hashlib.sha256("".join(f"{text}\0" for text in texts).encode()).hexdigest()


def read(file: Path, n: int) -> list[str]:
    """The first n texts of a .jsonl file of rows with `text`: whole conversations, rendered, end token included.

    Raises:
        BadInput: no such file, rows that hold no text, or fewer than n of them.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split(
            "\n"
        )  # JSON's strings may hold what splitlines takes for ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"Calibration texts cannot be read from {file} ({error}): expected task, rollouts, or a .jsonl file."
        ) from None
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError, RecursionError):
            texts.append(None)
        if not isinstance(texts[-1], str) or not texts[-1].strip():
            raise BadInput(f'Line {number} of {file} holds no calibration text: expected rows like {{"text": "…"}}.')
    check_count(len(texts), n, str(file))
    return texts[:n]


def check_count(found: int, n: int, where: str) -> None:
    """Refuses fewer texts than were asked for: two variants would be told to share what they do not have.

    Raises:
        BadInput: fewer than n.
    """
    if found < n:
        raise BadInput(
            f"{where} has {found} calibration texts, but {n} were asked for: lower quantize.calibration_samples, or give more."
        )


def rows(texts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Calibration texts as rows of one length, so that no row is padded and none is dropped.

    Left alone, AutoAWQ drops texts that are too long, glues the others together, cuts that into blocks of `max_calib_seq_len`
    wherever a text begins, and throws the rest away; a small set can give no block at all. Here every text begins a row, so
    that its tokens stand where they stand when the model is asked, and the row is filled up to the length of the longest
    text with the texts that follow it. (On qrl-tiny both give the same error: this is for small sets, not for accuracy.)

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
        raise BadInput("This scheme needs calibration texts that are not empty: expected chat-rendered training texts.")
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
