"""Answers that an earlier run of a cell left in the store, to be judged again.

Answers depend on fewer settings than the result does: limits of health decide whether a cell counts, not what the model
writes. So the answers of a void cell are kept too, and other limits judge them without generating them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import names, process
from qrl.errors import BadInput, QrlError
from qrl.evaluate import health
from qrl.evaluate.cells import Answers
from qrl.recipe import Evaluate
from qrl.tracking import contents, reuse

if TYPE_CHECKING:
    from mlflow.entities import Run

# `steps.evaluate` adds these when it logs answers; they are removed when answers are read back.
_COLUMNS_OF_RUN = ("seed", "question_seed", names.ENGINE, names.SETTINGS, names.PROMPT_HASH)
_RECEIPT_OF_CELL = ("weights", "prompt_hash", "questions")


@dataclass(frozen=True)
class FullPrecision:
    """What is known of a variant at full precision: the rates of its answers, and the limits that they break."""

    rates: Mapping[str, float] = field(default_factory=dict)  # empty if it was not evaluated
    problems: tuple[str, ...] = ()


UNKNOWN = FullPrecision()


@dataclass(frozen=True)
class StoredAnswers:
    """The answers of a finished or void cell, intact."""

    run: Run
    rows: Path

    @property
    def run_id(self) -> str:
        return self.run.info.run_id

    def judged_by(self, key: str) -> bool:
        """Return whether the run holds the result of this very cache key, limits of health included."""
        return self.run.info.status == "FINISHED" and self.run.data.tags.get(names.TAG_CACHE_KEY) == key

    def read(self) -> Answers:
        """Return the answers as they were graded."""
        import pandas as pd

        frame = health.without_note(pd.read_parquet(self.rows)).drop(columns=list(_COLUMNS_OF_RUN))
        receipt = json.loads(contents.artifact(self.run_id, names.RECEIPT).read_text(encoding="utf-8"))
        for name in _RECEIPT_OF_CELL:
            receipt.pop(name)
        return Answers(frame, self.run.data.metrics[names.TOKENS_PER_S], frame[names.DTYPE].iloc[0], receipt)

    def at_full_precision(self, settings: Evaluate) -> FullPrecision:
        """Return the rates of these answers, and which of a recipe's limits they break."""
        frame = self.read().frame
        rates = health.rates(frame)
        problems = health.problems(rates, settings, len(frame))
        return FullPrecision(rates, tuple(problems))


def answers(key: str) -> StoredAnswers | None:
    """Return the newest answers with this key in the active experiment that have the rows that were sealed."""
    for run in reuse.find_answers(key):
        try:
            rows = contents.artifact(run.info.run_id, names.QUESTIONS)
            if reuse.sealed(run).get("rows") == process.file_digest(rows):
                return StoredAnswers(run, rows)
        except (BadInput, QrlError):  # its artifacts are gone, or its record was edited
            continue
    return None
