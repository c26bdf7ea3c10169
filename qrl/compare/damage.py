"""What quantization costs each training: does RL change how cleanly a model quantizes, or would any training?

The loss of a variant v under a scheme q is v:full − v:q. What RL changed is the difference of two losses, grpo's minus
the base's, or minus that of as many steps of supervised fine-tuning: a contrast of four cells on the same questions.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qrl import names
from qrl.compare.evidence import Cell
from qrl.compare.record import numbers, with_ends
from qrl.stats import LEVEL, Estimate, holm_by_key
from qrl.stats.text import interval, table

Contrast = Callable[[Mapping[Cell, float]], Estimate]


@dataclass(frozen=True)
class Damage:
    """One variant under one scheme.

    Attributes:
        variant, scheme: its labels.
        loss: v:full − v:q.
        excess: loss of grpo − this loss; None for grpo itself.
        p_holm: of "the losses are equal", Holm-corrected over all pairs of losses; None for grpo itself.
    """

    variant: str
    scheme: str
    loss: Estimate
    excess: Estimate | None = None
    p_holm: float | None = None

    @property
    def differs(self) -> bool:
        return self.p_holm is not None and self.p_holm < 1 - LEVEL


def measure(cells: Iterable[Cell], contrast: Contrast) -> tuple[Damage, ...]:
    """Return the losses of all variants that have, like grpo, a cell at full precision and one in the same scheme.

    Args:
        cells: what was evaluated.
        contrast: weights by cell → their weighted sum of accuracies, paired by question.

    Returns:
        grpo first under each scheme; empty unless grpo and another variant share a scheme.
    """
    have = dict.fromkeys(cells)
    schemes = [scheme for variant, scheme in have if variant == names.GRPO and scheme != names.FULL]
    losses, excess = {}, {}
    for scheme in schemes:
        variants = [v for v, q in have if q == scheme and (v, names.FULL) in have]
        for variant in sorted(variants, key=lambda variant: variant != names.GRPO):
            loss = {(variant, names.FULL): 1.0, (variant, scheme): -1.0}
            losses[variant, scheme] = contrast(loss)
            if variant != names.GRPO:
                of_grpo = {(names.GRPO, names.FULL): 1.0, (names.GRPO, scheme): -1.0}
                excess[variant, scheme] = contrast(of_grpo | {cell: -weight for cell, weight in loss.items()})
    if not excess:
        return ()
    holm = holm_by_key({cell: value.p_two_sided for cell, value in excess.items()})
    return tuple(Damage(v, q, loss, excess.get((v, q)), holm.get((v, q))) for (v, q), loss in losses.items())


def markdown(damages: Iterable[Damage]) -> list[str]:
    """Return the lines of the table, with the finding under it; none without damages."""
    damages = list(damages)
    if not damages:
        return []
    rows = [
        (
            row.scheme,
            row.variant,
            interval(row.loss),
            interval(row.excess) if row.excess else "reference",
            "" if row.p_holm is None else f"{row.p_holm:.2g}",
        )
        for row in damages
    ]
    head = ("scheme", "weights", "loss: full − quantized", "loss of grpo − this loss", "p (Holm)")
    title = "## Does RL change how cleanly the model quantizes?"
    return [title, "", *table(head, rows), "", *(f"- {finding}" for finding in findings(damages)), ""]


def findings(damages: Iterable[Damage]) -> list[str]:
    """Return a sentence for every difference that stands after Holm's correction, and one for all others."""
    compared = [(row, row.excess) for row in damages if row.excess]
    sentences = []
    for row, excess in (each for each in compared if each[0].differs):
        verb = "loses more than" if excess.estimate > 0 else "loses less than"
        says = f"Under {row.scheme} {names.GRPO} {verb} {row.variant}"
        sentences.append(f"{says}: {interval(excess)}.")
    if rest := [f"{row.variant} under {row.scheme}" for row, _ in compared if not row.differs]:
        sentences.append(f"The difference between the losses of {names.GRPO} and {', '.join(rest)} is not significant.")
    return sentences


def as_json(damages: Iterable[Damage]) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    return [
        {"variant": row.variant, "scheme": row.scheme, "loss": numbers(row.loss), "p_holm": row.p_holm}
        | {"grpo_loss_minus_loss": numbers(row.excess) if row.excess else None}
        for row in damages
    ]


def metrics(damages: Iterable[Damage]) -> dict[str, float]:
    """Return `damage/<variant>_<scheme>`, grpo's loss minus this one, with `_low` and `_high`."""
    scores = {}
    for row in damages:
        if row.excess:
            scores |= with_ends(f"damage/{names.in_metric(row.variant, row.scheme)}", row.excess)
    return scores
