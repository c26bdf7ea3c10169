"""Notes on what a comparison rests on: how much of each update the stored weights keep, and variants that answer alike.

Where storage rounded an update away, or two variants gave the same texts, differences near 0 say nothing about
quantization, and more questions would not change that. A note that begins with `WARNING` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import pandas as pd

from qrl.compare.evidence import Cell
from qrl.compare.outcomes import Answered
from qrl.files.tables import ROW, TEXTS
from qrl.formats.kept import Kept
from qrl.names import BASE

WARNING = "Warning: "  # begins a note that calls the result in question
TITLE = "## What the answers rest on"
_TEXT, _PLACE = "completion", "place"  # the text of an answer; where its row stands


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


def of_updates(trained: Iterable[Stored]) -> list[str]:
    """Return a note on each training's stored update; a warning where less than half of it is kept."""
    notes = []
    for each in trained:
        run = f", seed {each.seed}" if each.seed else ""
        notes.append(each.kept.sentence(f"The stored weights of {each.variant}{run}"))
        if warning := each.kept.warning(each.setting):
            notes.append(f"{WARNING}{each.variant}{run}: {warning}")
    return _warnings_first(notes)


def of_answers(alike: Iterable[Alike], shown: dict[str, str] | None = None) -> list[str]:
    """Return a warning for each pair of variants that answer alike; `shown` are schemes as tables show them."""
    shown, warnings = shown or {}, []
    for pair in alike:
        schemes = _and([shown.get(scheme, scheme) for scheme in pair.schemes])
        same = f"{pair.first} and {pair.second} gave the same text in answer to each of the {pair.n} questions"
        follows = f"under {schemes}: there they are one model, and more questions show no difference"
        advice = "Store the trained weights in fp32 (train.store_dtype or merge.store_dtype = fp32)"
        warnings.append(f"{WARNING}{same} {follows}. {advice}, or train longer or at a higher rate.")
    return warnings


def alike(answered: Answered | None) -> list[Alike]:
    """Return the pairs of variants that gave the same text in answer to every question, with the schemes.

    Texts are read only where outcomes and lengths are equal. None where they are unknown, or a question has several
    answers of a cell: those are sampled.
    """
    if answered is None or not (_TEXT in answered.frame or TEXTS in answered.frame.attrs):
        return []
    found: dict[tuple[str, str], list[str]] = {}
    sampled = {answered.cells[place] for place in answered.sampled}
    variants = list(dict.fromkeys(variant for variant, _ in answered.cells))
    variants.sort(key=lambda variant: variant != BASE)
    schemes = dict.fromkeys(scheme for _, scheme in answered.cells)
    for scheme in schemes:
        for pair in combinations(variants, 2):
            cells = [(variant, scheme) for variant in pair]
            known = all(cell in answered.cells and cell not in sampled for cell in cells)
            if known and _same_texts(answered, *cells):
                found.setdefault(pair, []).append(scheme)
    n = len(set(answered.question.tolist()))
    return [Alike(*pair, tuple(under), n) for pair, under in found.items()]


def markdown(notes: Sequence[str]) -> str:
    """Return the notes as a section of Markdown, empty if there are none."""
    strong = f"**{WARNING.strip()}** "
    lines = [f"- {note.replace(WARNING, strong, 1)}" for note in notes]
    return "\n".join([TITLE, "", *lines, ""]) if notes else ""


def _same_texts(answered: Answered, first: Cell, second: Cell) -> bool:
    """Return whether two cells have the same texts, question by question; the base is one model under every seed."""
    rows, others = _rows(answered, first), _rows(answered, second)
    by = ["question", "seed"]
    if BASE in (first[0], second[0]):
        rows, others = (rows, others) if first[0] == BASE else (others, rows)
        by = ["question"] if len(set(rows["seed"])) == 1 else by
    pairs = others.merge(rows, on=by, how="left", suffixes=("", "_other"), validate="many_to_one")
    outcomes, other_outcomes = pairs["correct"].to_numpy(), pairs["correct_other"].to_numpy()
    if not len(pairs) or not (outcomes == other_outcomes).all():
        return False
    places, others_places = pairs[_PLACE].to_numpy(), pairs[f"{_PLACE}_other"].to_numpy()
    if "n_tokens" in answered.frame:
        lengths = pd.Series(pd.to_numeric(answered.frame["n_tokens"], errors="coerce")).fillna(-1).to_numpy()
        if (lengths[places] != lengths[others_places]).any():
            return False
    own, other = (_texts(answered, at) for at in (places, others_places))
    return bool(own.notna().all() and (own.to_numpy() == other.to_numpy()).all())


def _rows(answered: Answered, cell: Cell) -> pd.DataFrame:
    """Return a cell's rows: question, seed, correct, and their place in the table."""
    own = answered.cell == answered.cells.index(cell)
    rows = answered.table.loc[own, ["question", "seed", "correct"]].astype({"question": str, "seed": str})
    return rows.assign(**{_PLACE: own.nonzero()[0]})


def _texts(answered: Answered, places) -> pd.Series:
    """Return the answers' texts by their rows' places; they are read from their files if the table lacks them."""
    frame = answered.frame.iloc[places].reset_index(drop=True)
    if _TEXT in frame:
        return frame[_TEXT].astype(object)
    taken = answered.frame.attrs[TEXTS].take(frame[ROW], [_TEXT])
    return taken[_TEXT].astype(object) if _TEXT in taken else pd.Series([None] * len(frame), dtype=object)


def _warnings_first(notes: list[str]) -> list[str]:
    return sorted(notes, key=lambda note: not note.startswith(WARNING))


def _and(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
