"""The table of cells: accuracies, gains, gain survival and a verdict, each with its interval.

A *cell* is one variant under one scheme; every other variant is compared with `base`. All numbers are contrasts of
cells (`qrl.stats`), paired by question if outcomes are known and independent if only counts are. Several training runs
are compared by their mean, and the spread between them is part of every error. `comparison.gain_survival` is the
definition.
"""

import sys

from qrl import Room
from qrl.compare.build import compare, from_counts, from_questions
from qrl.compare.comparison import Comparison, Row, gain_survival
from qrl.compare.evidence import Cell
from qrl.compare.logs import read_logs
from qrl.compare.read import read_columns, read_counts, read_questions

__all__ = [
    "Cell",
    "Comparison",
    "Row",
    "compare",
    "from_counts",
    "from_questions",
    "gain_survival",
    "read_columns",
    "read_counts",
    "read_logs",
    "read_questions",
]

sys.modules[__name__].__class__ = Room
