"""What quantization costs each training: does RL change how cleanly a model quantizes, or would any training?

The loss of a variant v under a scheme q is v:full − v:q. What RL changed is the difference of two losses, grpo's minus
the base's, or minus that of as many steps of supervised fine-tuning: a contrast of four cells on the same questions.
That is a difference in points, of which a variant with a higher accuracy has more to lose. So the accuracies that the
variants keep, and their log-odds, are compared too, and a sentence says whether the scales agree.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qrl import names
from qrl.compare.evidence import Cell, Questions
from qrl.compare.record import numbers, numbers_or_null, with_ends
from qrl.compare.scales import Scales, accuracy_kept, kept_text, measure_scales, ratio_text, sentence
from qrl.stats import LEVEL, Estimate, holm_by_key
from qrl.stats.text import interval, table


@dataclass(frozen=True)
class Damage:
    """One variant under one scheme.

    Attributes:
        variant, scheme: its labels.
        loss: v:full − v:q.
        kept: v:q / v:full, the share of its accuracy; None if v:full is not shown to be above 0.
        excess: loss of grpo − this loss; None for grpo itself.
        p_holm: of "the losses are equal", Holm-corrected over all pairs of losses; None for grpo itself.
        scales: what the scheme costs grpo and this variant on all scales; None for grpo itself.
    """

    variant: str
    scheme: str
    loss: Estimate
    kept: Estimate | None = None
    excess: Estimate | None = None
    p_holm: float | None = None
    scales: Scales | None = None

    @property
    def differs(self) -> bool:
        return self.p_holm is not None and self.p_holm < 1 - LEVEL


def measure(evidence: Questions) -> tuple[Damage, ...]:
    """Return the losses of all variants that have, like grpo, a cell at full precision and one in the same scheme.

    Args:
        evidence: outcomes of every cell, from which contrasts are computed, paired by question.

    Returns:
        grpo first under each scheme; empty unless grpo and another variant share a scheme.
    """
    have = dict.fromkeys(evidence.cells)
    schemes = [scheme for variant, scheme in have if variant == names.GRPO and scheme != names.FULL]
    losses, kept, excess, scales = {}, {}, {}, {}
    for scheme in schemes:
        variants = [v for v, q in have if q == scheme and (v, names.FULL) in have]
        of_grpo = _loss(names.GRPO, scheme)
        for variant in sorted(variants, key=lambda variant: variant != names.GRPO):
            loss = _loss(variant, scheme)
            losses[variant, scheme] = evidence.contrast(loss)
            if variant != names.GRPO:
                difference = of_grpo | {cell: -weight for cell, weight in loss.items()}
                excess[variant, scheme] = evidence.contrast(difference)
                points = evidence.contrast({cell: -weight for cell, weight in difference.items()})
                compared = measure_scales(evidence, names.GRPO, scheme, points, variant)
                scales[variant, scheme] = compared
                kept |= {(name, scheme): share for name, share in compared.kept.items()}
        if len(variants) == 1:
            kept[names.GRPO, scheme] = accuracy_kept(evidence, names.GRPO, scheme)
    if not excess:
        return ()
    holm = holm_by_key({cell: value.p_two_sided for cell, value in excess.items()})
    found = []
    for cell, loss in losses.items():
        variant, scheme = cell
        found.append(Damage(variant, scheme, loss, kept[cell], excess.get(cell), holm.get(cell), scales.get(cell)))
    return tuple(found)


def _loss(variant: str, scheme: str) -> dict[Cell, float]:
    """Return the weights of a variant's loss under a scheme."""
    return {(variant, names.FULL): 1.0, (variant, scheme): -1.0}


def markdown(damages: Iterable[Damage]) -> list[str]:
    """Return the lines of the table, with the finding under it; none without damages."""
    damages = list(damages)
    if not damages:
        return []
    head = (
        "scheme",
        "weights",
        "loss in points: full − quantized",
        "loss of grpo − this loss",
        "p (Holm)",
        "accuracy kept",
        "kept by grpo / kept here",
        "log-odds: grpo − this",
    )
    title = "## Does RL change how cleanly the model quantizes?"
    note = (
        "*accuracy kept* = accuracy under the scheme / accuracy at full precision. In points, weights with a higher "
        "accuracy have more to lose. Holm's correction is of the differences in points; intervals are not corrected."
    )
    rows = [_cells(row) for row in damages]
    return [title, "", *table(head, rows), "", note, "", *(f"- {finding}" for finding in findings(damages)), ""]


def _cells(row: Damage) -> tuple[str, ...]:
    own = row.scheme, row.variant, interval(row.loss)
    if row.excess is None or row.scales is None:
        return *own, "reference", "", kept_text(row.kept), "reference", "reference"
    others = ["not defined"] * 2
    if not row.scales.nothing_left:
        others = [ratio_text(row.scales.ratio), interval(row.scales.log_odds)]
    return *own, interval(row.excess), f"{row.p_holm:.2g}", kept_text(row.kept), *others


def findings(damages: Iterable[Damage]) -> list[str]:
    """Return a sentence for every pair that differs on some scale, which names all of them, and one for the others."""
    sentences, equal = [], []
    for row in damages:
        if row.scales is None:
            continue
        if not any(row.scales.signs.values()):
            equal.append(f"{row.variant} under {row.scheme}")
            continue
        corrected = "" if row.differs else " In points, the difference is not significant after Holm's correction."
        sentences.append(f"Under {row.scheme}: {sentence(row.scales, names.GRPO, row.variant)}{corrected}")
    if equal:
        sentences.append(f"On no scale is a difference shown between {names.GRPO} and {', '.join(equal)}.")
    return sentences


def as_json(damages: Iterable[Damage]) -> list[dict[str, Any]]:
    """Return the rows of the table; what depends on a comparison with grpo is null for grpo itself."""
    entries = []
    for row in damages:
        entry = {"variant": row.variant, "scheme": row.scheme, "loss": numbers(row.loss), "p_holm": row.p_holm}
        scales = row.scales
        entry |= {
            "grpo_loss_minus_loss": numbers_or_null(row.excess),
            "accuracy_kept": numbers_or_null(row.kept),
            "accuracy_kept_ratio": numbers(scales.ratio) if scales else None,
            "log_odds_difference": numbers(scales.log_odds) if scales else None,
            "scales_agree": scales.agree if scales else None,
        }
        entries.append(entry)
    return entries


def metrics(damages: Iterable[Damage]) -> dict[str, float]:
    """Return `damage/<variant>_<scheme>`, grpo's loss minus this one, with `_low` and `_high`."""
    scores = {}
    for row in damages:
        if row.excess:
            scores |= with_ends(f"damage/{names.in_metric(row.variant, row.scheme)}", row.excess)
    return scores
