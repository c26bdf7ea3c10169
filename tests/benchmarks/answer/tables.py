"""The files of an export: which answers were right, facts of whole cells, and the measures of weights.

    python tests/benchmarks/answer/tables.py EXPORT,EXPORT OUT     # joins; of a cell in several, the last is kept

`correct.parquet` has a row for each size, seed and question, and a column for each variant:scheme. Answers to one
question stand side by side, and take a tenth of the space that a row for each would. `cells.parquet` has what is known
of each cell's answers as a whole.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import pandas as pd

from qrl.errors import BadInput

ROW = ["size", "seed", "question"]
CELL = ["size", "seed", "variant", "scheme"]
TABLES = {  # file → what a later export replaces of an earlier one's
    "cells": CELL,  # questions, mean n_tokens, shares truncated and (since 2026-11-26) parsed
    "weights": ["size", "seed"],
    "why": ["size"],
    "runs": ["run"],  # MLflow's, since the evening of 2026-11-26
    "measures": CELL,  # of a real model: `real/collect.py`
}


def write(folder: Path, outcomes: pd.DataFrame | None = None, **measured: pd.DataFrame) -> None:
    """Write an export, or parts of one.

    Args:
        folder: made if it is missing.
        outcomes: a row per answer: those of ROW, variant, scheme, and correct.
        measured: further files, named in TABLES.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if outcomes is not None:
        labels = outcomes["variant"].astype(str) + ":" + outcomes["scheme"].astype(str)
        wide = outcomes.assign(cell=labels).pivot_table("correct", ROW, "cell", observed=True, aggfunc="first")
        _store(wide.astype("Int8").reset_index(), folder / "correct.parquet")
    for name, table in measured.items():
        _store(table, folder / f"{name}.parquet")


def _store(table: pd.DataFrame, path: Path) -> None:
    table.to_parquet(path, compression="zstd", compression_level=19, index=False)


def answers(exports: Sequence[Path]) -> pd.DataFrame:
    """Return a row per answer of several exports: size, seed, question, correct, variant, scheme."""
    parts = []
    for path in (folder / "correct.parquet" for folder in exports):
        if path.is_file():
            wide = _read(path, ROW).set_index(ROW).rename_axis(columns="cell")
            parts.append(wide.stack().dropna().rename("correct").reset_index())
    if not parts:
        return pd.DataFrame()
    for rows in parts:
        rows[["variant", "scheme"]] = rows.pop("cell").str.split(":", n=1, expand=True)
    return _joined(parts, CELL).astype({"correct": "int8"})


def measures(exports: Sequence[Path], name: str) -> pd.DataFrame | None:
    """Return one of TABLES, of several exports."""
    paths = [folder / f"{name}.parquet" for folder in exports]
    found = [_read(path, TABLES[name]) for path in paths if path.is_file()]
    return _joined(found, TABLES[name]) if found else None


def _read(path: Path, keys: Sequence[str]) -> pd.DataFrame:
    """Return a table; raise BadInput if it is damaged, or lacks a column."""
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as a table ({error}): export it again.") from None
    if absent := [key for key in keys if key not in table]:
        raise BadInput(f"{path} has no column {', '.join(absent)}: export it again.")
    return table


def _joined(parts: Sequence[pd.DataFrame], keys: list[str]) -> pd.DataFrame:
    """Return the rows of all parts; those of a later part replace all earlier ones with the same keys."""
    parts = [part.astype({key: str for key in keys if key != "seed"}) for part in parts]
    kept = []
    for place, part in enumerate(parts):
        later = [other[keys].drop_duplicates() for other in parts[place + 1 :]]
        places = pd.MultiIndex.from_frame(part[keys])
        kept.append(part[~places.isin(pd.MultiIndex.from_frame(pd.concat(later)))] if later else part)
    return pd.concat(kept, ignore_index=True)


def join(exports: Sequence[Path], out: Path) -> None:
    """Write several exports as one; of a cell in several, the last is kept."""
    found = {name: table for name in TABLES if (table := measures(exports, name)) is not None}
    outcomes = answers(exports)
    write(out, None if outcomes.empty else outcomes, **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("exports", help="folders, by comma")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    join([Path(part) for part in given.exports.split(",")], given.out)


if __name__ == "__main__":
    main()
