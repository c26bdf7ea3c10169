"""Calibration texts: packed into rows of one length, and named by a digest."""

import hashlib
from collections.abc import Sequence
from itertools import chain, count, islice

from qrl.errors import BadInput


def digest(texts: Sequence[str]) -> str:
    """Return the sha256 of the texts in order, each ended by a zero byte."""
    return hashlib.sha256("".join(f"{text}\0" for text in texts).encode()).hexdigest()


def rows(texts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return calibration texts as rows of one length, so that no row is padded and none is dropped.

    AutoAWQ on its own drops long texts and cuts the others into blocks; a small set can end up without any block. Here
    every text begins a row, so that its tokens have the positions that they have in evaluation, and the texts that
    follow fill the row up to the length of the longest.

    Args:
        texts: N lists of token ids.
        max_tokens: longest text allowed.

    Returns:
        N rows of L token ids, where L is the length of the longest text.

    Raises:
        BadInput: there are no texts, or one is empty or too long.
    """
    lengths = [len(ids) for ids in texts]
    if not lengths or not min(lengths):
        raise BadInput("This scheme needs calibration texts that are not empty: expected chat-rendered training texts.")
    longest = max(lengths)
    if longest > max_tokens:
        raise BadInput(
            f"Calibration text {lengths.index(longest)} has {longest} tokens, but at most {max_tokens} are allowed: "
            "raise quantize.calibration_max_tokens."
        )
    filled_rows = []
    for start in range(len(texts)):
        texts_from_start = (texts[index % len(texts)] for index in count(start))  # endless: the first follows the last
        filled_rows.append(list(islice(chain.from_iterable(texts_from_start), longest)))
    return filled_rows
