"""Notes on what a comparison rests on: how much of each update the stored weights keep, and variants that answer alike.

Where storage rounded an update away, or two variants gave the same texts, differences near 0 say nothing about
quantization, and more questions would not change that. A note that begins with `WARNING` says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from qrl.compare.evidence import Cell
from qrl.compare.outcomes import Answered
from qrl.files.tables import ROW, TEXTS
from qrl.formats.kept import Kept
from qrl.names import BASE

WARNING = "Warning: "  # begins a note that calls the result in question
TITLE = "## What the answers rest on"
_TEXT = "completion"  # column with the text of an answer
_POSITION = "position"  # column with the position of an answer's row in the table


@dataclass(frozen=True)
class Stored:
    """What the stored weights of one training keep of its update."""

    variant: str
    seed: str  # empty if there is one training run
    kept: Kept
    setting: str  # that stores these weights in fp32: `train.store_dtype=fp32`


@dataclass(frozen=True)
class Alike:
    """Two variants with the same text in answer to every question, under some schemes."""

    first: str
    second: str
    schemes: tuple[str, ...]
    n: int  # questions


def notes_on_updates(updates: Iterable[Stored]) -> list[str]:
    """Return a note on each training's stored update; a warning where less than half of it is kept."""
    warnings = []
    notes = []
    for update in updates:
        training = f"{update.variant}, seed {update.seed}" if update.seed else update.variant
        notes.append(update.kept.sentence(f"The stored weights of {training}"))
        warning = update.kept.warning(update.setting)
        if warning:
            warnings.append(f"{WARNING}{training}: {warning}")
    return [*warnings, *notes]


def notes_on_alike(pairs: Iterable[Alike], scheme_labels: Mapping[str, str] | None = None) -> list[str]:
    """Return a warning for each pair of variants that answer alike.

    Args:
        pairs: from `find_alike`.
        scheme_labels: scheme → how tables show it; None to show schemes as they are.
    """
    scheme_labels = scheme_labels or {}
    warnings = []
    for pair in pairs:
        schemes = _enumerated([scheme_labels.get(scheme, scheme) for scheme in pair.schemes])
        warnings.append(
            f"{WARNING}{pair.first} and {pair.second} gave the same text in answer to each of the {pair.n} questions "
            f"under {schemes}: there they are one model, and more questions show no difference. "
            "Store the trained weights in fp32 (train.store_dtype or merge.store_dtype = fp32), or train longer or at "
            "a higher rate."
        )
    return warnings


def find_alike(answered: Answered | None) -> list[Alike]:
    """Return the pairs of variants that gave the same text in answer to every question, with the schemes.

    Texts are read only where outcomes and lengths are equal. None where they are unknown, or a question has several
    answers of a cell: those are sampled.
    """
    if answered is None or not (_TEXT in answered.frame or TEXTS in answered.frame.attrs):
        return []
    sampled_cells = {answered.cells[index] for index in answered.sampled}
    comparable_cells = set(answered.cells) - sampled_cells
    variants = list(dict.fromkeys(variant for variant, _ in answered.cells))
    variants.sort(key=lambda variant: variant != BASE)

    schemes_by_pair: dict[tuple[str, str], list[str]] = {}
    for scheme in dict.fromkeys(scheme for _, scheme in answered.cells):
        for first, second in combinations(variants, 2):
            cells = ((first, scheme), (second, scheme))
            if comparable_cells.issuperset(cells) and _have_same_texts(answered, *cells):
                schemes_by_pair.setdefault((first, second), []).append(scheme)
    n = len(np.unique(answered.question))
    return [Alike(first, second, tuple(schemes), n) for (first, second), schemes in schemes_by_pair.items()]


def markdown(notes: Sequence[str]) -> str:
    """Return the notes as a section of Markdown, empty if there are none."""
    if not notes:
        return ""
    strong = f"**{WARNING.strip()}** "
    lines = [f"- {note.replace(WARNING, strong, 1)}" for note in notes]
    return "\n".join([TITLE, "", *lines, ""])


def _have_same_texts(answered: Answered, first: Cell, second: Cell) -> bool:
    """Return whether two cells have the same texts, question by question; the base is one model under every seed."""
    # Several rows on the left may share one on the right: the base's, if it was evaluated under one seed only.
    left = _rows(answered, second)
    right = _rows(answered, first)
    if second[0] == BASE and first[0] != BASE:
        left, right = right, left
    columns = ["question", "seed"]
    if BASE in (first[0], second[0]) and len(set(right["seed"])) == 1:
        columns = ["question"]
    pairs = left.merge(right, on=columns, how="left", suffixes=("", "_right"), validate="many_to_one")
    outcomes = pairs["correct"].to_numpy()
    right_outcomes = pairs["correct_right"].to_numpy()
    if not len(pairs) or not (outcomes == right_outcomes).all():
        return False

    # Lengths are compared first, since texts may have to be read from their files.
    left_positions = pairs[_POSITION].to_numpy()
    right_positions = pairs[f"{_POSITION}_right"].to_numpy()
    if "n_tokens" in answered.frame:
        lengths = pd.Series(pd.to_numeric(answered.frame["n_tokens"], errors="coerce")).fillna(-1).to_numpy()
        if (lengths[left_positions] != lengths[right_positions]).any():
            return False
    left_texts = _texts(answered, left_positions)
    right_texts = _texts(answered, right_positions)
    return bool(left_texts.notna().all() and (left_texts.to_numpy() == right_texts.to_numpy()).all())


def _rows(answered: Answered, cell: Cell) -> pd.DataFrame:
    """Return a cell's rows: question, seed, correct, and their position in the table."""
    of_cell = answered.cell == answered.cells.index(cell)
    rows = answered.table.loc[of_cell, ["question", "seed", "correct"]].astype({"question": str, "seed": str})
    return rows.assign(**{_POSITION: of_cell.nonzero()[0]})


def _texts(answered: Answered, positions: np.ndarray) -> pd.Series:
    """Return the answers' texts by their rows' positions; they are read from their files if the table lacks them."""
    frame = answered.frame.iloc[positions].reset_index(drop=True)
    if _TEXT in frame:
        return frame[_TEXT].astype(object)
    texts = answered.frame.attrs[TEXTS].take(frame[ROW], [_TEXT])
    return texts[_TEXT].astype(object) if _TEXT in texts else pd.Series([None] * len(frame), dtype=object)


def _enumerated(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
