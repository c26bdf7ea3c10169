"""What a sweep over methods and seeds leaves behind for its table."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SweepOutcome:
    """The runs that a sweep's arms made under all seeds, and what failed."""

    cells: dict[str, dict[int, str]] = field(default_factory=dict)  # variant:scheme → seed → run of its evaluation
    trained: dict[str, dict[int, str]] = field(default_factory=dict)  # variant → seed → run of its training
    schemes: dict[str, str] = field(default_factory=dict)  # variant → the scheme of its own codes
    failed: list[str] = field(default_factory=list)  # sentences
