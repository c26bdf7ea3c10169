"""Does quantization take more from the trained variant than from the base? The answer on three scales.

In points a variant with a higher accuracy has more to lose. As a share of its accuracy, or in log-odds, it may lose
less. Where the scales disagree, naming one of them alone would mislead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qrl import stats
from qrl.names import BASE, FULL
from qrl.stats import Estimate, Share
from qrl.stats.text import interval, percent_interval, table

if TYPE_CHECKING:
    from qrl.compare.comparison import Comparison
    from qrl.compare.evidence import Cell, Counts, Questions


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
        shown = set(self.signs.values())
        if {1, -1} <= shown:
            return False
        return None if 0 in shown else True


def _sign(value: Estimate, neutral: float) -> int:
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

    def contrast(weights) -> Estimate:
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
        less=lambda share: evidence.contrast({quantized: 1, full: -share}),
    )
    kept = share.kept
    return None if kept is None else replace(kept, low=max(0.0, kept.low))


def sections(comparison: Comparison) -> list[str]:
    """Return Markdown lines: a table per trained variant, and a sentence per scheme; none without quantized schemes."""
    lines = []
    for variant in comparison.variants[1:]:
        body = []
        sentences = []
        for row in comparison.rows:
            scales = row.scales
            if row.variant != variant or scales is None:
                continue
            scheme = comparison.shown(row.scheme)
            kept = [kept_text(scales.kept[name]) for name in (BASE, variant)]
            relative = ["not defined"] * 2
            if not scales.nothing_left:
                relative = [ratio_text(scales.ratio), interval(scales.log_odds)]
            body.append((scheme, *kept, *relative))
            sentences.append(f"- {scheme}: {sentence(scales, variant)}")
        if not body:
            continue
        head = ("scheme", f"accuracy kept: {BASE}", f"accuracy kept: {variant}", "ratio", "difference in log-odds")
        title = f"## Does quantization cost {variant} more than {BASE}?"
        note = (
            f"*accuracy kept* = accuracy under the scheme / accuracy at full precision (n = {comparison.n}). *ratio* = "
            f"{variant} / {BASE}; above 1, {variant} keeps more. In points the difference is gain survival, above."
        )
        lines += [title, "", *table(head, body), "", *sentences, "", note, ""]
    return lines


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
        open_scales = f" Not shown: {', '.join(unclear)}." if unclear else ""
        return (
            f"the scales disagree. It costs {variant} more than {reference} on one scale ({', '.join(more)}) and less "
            f"on another ({', '.join(less)}), so neither alone answers the question.{open_scales}"
        )
    if not less and not more:
        return f"on no scale is a difference between {variant} and {reference} shown ({', '.join(unclear)})."
    direction, shown = ("less", less) if less else ("more", more)
    if not unclear:
        return f"the scales agree. It costs {variant} {direction} than {reference}: {', '.join(shown)}."
    return (
        f"it costs {variant} {direction} than {reference} on some scales ({', '.join(shown)}); on others no difference "
        f"is shown ({', '.join(unclear)})."
    )


def kept_text(share: Estimate | None) -> str:
    return "not defined" if share is None else percent_interval(share)


def ratio_text(value: Estimate) -> str:
    return f"{value.estimate:.2f} [{value.low:.2f}, {value.high:.2f}]"
