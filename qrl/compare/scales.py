"""Does quantization take more from the trained variant than from the base? The answer on three scales.

In points a variant with a higher accuracy has more to lose. As a share of its accuracy, or in log-odds, it may lose
less. Where the scales disagree, naming one of them alone would mislead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qrl import stats
from qrl.compare.evidence import Cell, Counts, Questions
from qrl.names import BASE, FULL
from qrl.stats import Estimate, Share
from qrl.stats.text import interval, percent_interval


@dataclass(frozen=True)
class Scales:
    """What a scheme costs the trained variant, compared with what it costs the base.

    Attributes:
        kept: variant → accuracy under the scheme / accuracy at full precision; None if the latter is not above 0.
        points: loss of the trained variant minus loss of the base, which is gain survival; below 0 if training made it
            worse.
        nothing_left: whether both answer nothing right under the scheme: a ratio of what they keep is 0/0.
        ratio: of `kept`, trained / base; below 1 if training made it worse.
        log_odds: change of the trained variant's log-odds minus that of the base's; below 0 if training made it worse.
    """

    kept: Mapping[str, Estimate | None]
    points: Estimate
    ratio: Estimate
    log_odds: Estimate
    nothing_left: bool

    @property
    def signs(self) -> dict[str, int]:
        """Scale → 1 if the trained variant is shown to lose less there, −1 if more, 0 if neither is shown."""
        return {
            "points": _sign(self.points, 0.0),
            "share": _sign(self.ratio, 1.0),
            "log-odds": _sign(self.log_odds, 0.0),
        }

    @property
    def agree(self) -> bool | None:
        """Whether all scales show the same sign; None if a difference is shown on some of them, or on none.

        None too if nothing is left to compare.
        """
        if self.nothing_left:
            return None
        signs = set(self.signs.values())
        if {1, -1} <= signs:
            return False
        if 0 in signs:
            return None
        return True


def _sign(value: Estimate, neutral: float) -> int:
    """Return 1 if the interval is above the value that means no difference, −1 if it is below, else 0."""
    return int(value.low > neutral) - int(value.high < neutral)


def measure_scales(
    evidence: Questions | Counts, variant: str, scheme: str, points: Estimate, reference: str = BASE
) -> Scales:
    """Return what a scheme costs a variant and the base, or another reference, on all scales.

    Args:
        evidence: from which contrasts of cells are computed.
        variant, scheme: the trained variant, and the quantized scheme.
        points: gain survival; for another reference, the same contrast with its cells.
        reference: the variant to compare with.
    """
    cells: list[Cell] = [(variant, scheme), (variant, FULL), (reference, scheme), (reference, FULL)]
    accuracies = [evidence.accuracy(cell).estimate for cell in cells]

    def contrast(weights: Sequence[float]) -> Estimate:
        return evidence.contrast(dict(zip(cells, weights, strict=True)))

    return Scales(
        kept={name: accuracy_kept(evidence, name, scheme) for name in (reference, variant)},
        points=points,
        ratio=stats.ratio_of_shares(accuracies, contrast, evidence.n),
        log_odds=stats.difference_in_log_odds(accuracies, contrast, evidence.n),
        nothing_left=accuracies[0] == accuracies[2] == 0,
    )


def accuracy_kept(evidence: Questions | Counts, variant: str, scheme: str) -> Estimate | None:
    """Return accuracy under the scheme / accuracy at full precision; None if the latter is not shown to be above 0."""
    quantized, full = (variant, scheme), (variant, FULL)
    share = Share(
        part=evidence.contrast({quantized: 1}),
        whole=evidence.contrast({full: 1}),
        difference=evidence.contrast({quantized: 1, full: -1}),
        excess_over=lambda share: evidence.contrast({quantized: 1, full: -share}),
    )
    kept = share.kept
    return None if kept is None else replace(kept, low=max(0.0, kept.low))


def sentence(scales: Scales, variant: str, reference: str = BASE) -> str:
    """Return in a sentence on which scales quantization costs the trained variant more or less than the reference."""
    if scales.nothing_left:
        return f"neither {variant} nor {reference} answers anything right, so nothing is left to compare."
    texts = {
        "points": f"{interval(scales.points)} in points",
        "share": f"{ratio_text(scales.ratio)} as a ratio of accuracy kept",
        "log-odds": f"{interval(scales.log_odds)} in log-odds",
    }
    less = [texts[name] for name, sign in scales.signs.items() if sign > 0]
    more = [texts[name] for name, sign in scales.signs.items() if sign < 0]
    unclear = [texts[name] for name, sign in scales.signs.items() if sign == 0]
    if less and more:
        not_shown = f" Not shown: {', '.join(unclear)}." if unclear else ""
        return (
            f"the scales disagree. It costs {variant} more than {reference} on one scale ({', '.join(more)}) and less "
            f"on another ({', '.join(less)}), so neither alone answers the question.{not_shown}"
        )
    if not less and not more:
        return f"on no scale is a difference between {variant} and {reference} shown ({', '.join(unclear)})."
    direction = "less" if less else "more"
    significant = ", ".join(less or more)
    if not unclear:
        return f"the scales agree. It costs {variant} {direction} than {reference}: {significant}."
    return (
        f"it costs {variant} {direction} than {reference} on some scales ({significant}); on others no difference "
        f"is shown ({', '.join(unclear)})."
    )


def kept_text(share: Estimate | None) -> str:
    return "not defined" if share is None else percent_interval(share)


def ratio_texts(scales: Scales) -> tuple[str, str]:
    """Return the ratio of accuracies kept and the difference in log-odds as cells of a table."""
    if scales.nothing_left:
        return "not defined", "not defined"
    return ratio_text(scales.ratio), interval(scales.log_odds)


def ratio_text(value: Estimate) -> str:
    return f"{value.estimate:.2f} [{value.low:.2f}, {value.high:.2f}]"
