"""A comparison for scripts and notebooks: it prints itself, and gives its tables and numbers by short methods.

The functions behind them are in `table` and `record`. They are about a `Comparison`, so its file cannot import them.
"""

from typing import Any

from qrl.compare import record, table
from qrl.compare.comparison import Comparison


class PrintableComparison(Comparison):
    """What `qrl.compare` returns."""

    def markdown(self) -> str:
        """Return the tables for people; see `table.markdown`."""
        return table.markdown(self)

    __str__ = markdown
    _repr_markdown_ = markdown

    def sentence(self) -> str:
        """Return the verdicts in a sentence each; see `table.sentence`."""
        return table.sentence(self)

    def table_json(self) -> dict[str, Any]:
        """Return the contract `table.json`; see `record.table_json`."""
        return record.table_json(self)

    def metrics(self) -> dict[str, float]:
        """Return MLflow metrics; see `record.metrics`."""
        return record.metrics(self)
