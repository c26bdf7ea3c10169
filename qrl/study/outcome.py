"""What a sweep leaves behind, for its report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SweepOutcome:
    """The runs of all methods under all seeds."""

    cells: dict[str, dict[int, str]] = field(default_factory=dict)  # variant:scheme → seed → run of its evaluation
    trained: dict[str, dict[int, str]] = field(default_factory=dict)  # variant → seed → run of its training
    schemes: dict[str, str] = field(default_factory=dict)  # variant → the scheme of its own codes
    failed: list[str] = field(default_factory=list)  # sentences
