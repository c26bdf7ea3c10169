"""What stored weights keep of an update, in numbers and in words; `train.kept` measures it and defines the share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qrl import names

HALF = 0.5  # share kept, below which a warning is due
METRICS = ("update_kept", "moved_share", "moved_share_stored")


@dataclass(frozen=True)
class Kept:
    """Shares, of a training's update and of the weights that it moved."""

    share: float  # of the update that the stored weights keep, a little above 1 or below 0 at times; NaN without one
    moved: float  # weights that training moved, of all
    moved_stored: float  # weights that differ as stored, of all
    stored_in: str  # dtype of the checkpoint: "bfloat16"

    def metrics(self) -> dict[str, float]:
        """Return the shares by the names that a run logs them under."""
        metrics = zip(METRICS, (self.share, self.moved, self.moved_stored), strict=True)
        return {name: value for name, value in metrics if not math.isnan(value)}

    def sentence(self, what: str = "The stored weights") -> str:
        """Return the shares in words; `what` names the weights."""
        if math.isnan(self.share):
            return "Training changed no weight."
        return (
            f"{what} ({names.short(self.stored_in)}) keep {percent(self.share)} of the update: training moved "
            f"{percent(self.moved)} of them, and {percent(self.moved_stored)} still differ once stored."
        )

    def warning(self, remedy: str) -> str:
        """Return what follows where less than half is kept, else nothing; `remedy` is the setting that stores fp32."""
        if not self.share < HALF:
            return ""
        return (
            f"Storing in {names.short(self.stored_in)} rounds {percent(1 - self.share)} of the update away. Accuracies "
            "are those of the stored weights, so they stay right; but if the trained variant answers like the base, "
            f"this is why, and more questions do not help. To keep the whole update, store in fp32 ({remedy}, and "
            "evaluate.dtype=fp32 where a GPU answers), or train longer or at a higher rate."
        )


def percent(share: float) -> str:
    """Return a share with two significant digits, and three from 99 % up, where the rest is what matters."""
    value = 100 * share
    return f"{value:.3g} %" if value >= 99 else f"{value:.2g} %"
