"""What quantization costs each training: does RL change how cleanly a model quantizes, or would any training?

The loss of a variant v under a scheme q is v:full − v:q. What RL changed is the difference of two losses, grpo's minus
the base's, or minus that of as many steps of supervised fine-tuning: a contrast of four cells on the same questions.
That is a difference in points, and a variant with a higher accuracy has more points to lose. So the accuracies that the
variants keep, and their log-odds, are compared too, and a sentence says whether the scales agree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qrl import names
from qrl.compare.estimates import numbers, numbers_or_null, with_ends
from qrl.compare.evidence import Cell, Questions
from qrl.compare.scales import Scales, accuracy_kept, kept_text, measure_scales, ratio_texts, sentence
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
    losses: dict[Cell, Estimate] = {}
    kept: dict[Cell, Estimate | None] = {}
    excess: dict[Cell, Estimate] = {}
    scales: dict[Cell, Scales] = {}
    for scheme in _schemes_of_grpo(evidence):
        grpo = (names.GRPO, scheme)
        losses[grpo] = evidence.contrast(_loss(*grpo))
        kept[grpo] = accuracy_kept(evidence, *grpo)
        for variant in _other_variants(evidence, scheme):
            cell = (variant, scheme)
            loss = _loss(variant, scheme)
            losses[cell] = evidence.contrast(loss)
            excess[cell] = evidence.contrast(_loss(*grpo) | _negative(loss))
            # `measure_scales` takes it as a change of the gain, which is below 0 if grpo loses more.
            points = evidence.contrast(_negative(_loss(*grpo)) | loss)
            scales[cell] = measure_scales(evidence, names.GRPO, scheme, points, variant)
            kept[cell] = scales[cell].kept[variant]
    if not excess:
        return ()

    p_holm = holm_by_key({cell: value.p_two_sided for cell, value in excess.items()})
    damages = []
    for cell, loss in losses.items():
        variant, scheme = cell
        damage = Damage(
            variant=variant,
            scheme=scheme,
            loss=loss,
            kept=kept[cell],
            excess=excess.get(cell),
            p_holm=p_holm.get(cell),
            scales=scales.get(cell),
        )
        damages.append(damage)
    return tuple(damages)


def _schemes_of_grpo(evidence: Questions) -> list[str]:
    return [scheme for variant, scheme in evidence.cells if variant == names.GRPO and scheme != names.FULL]


def _other_variants(evidence: Questions, scheme: str) -> list[str]:
    """Return the variants besides grpo with a cell under the scheme and one at full precision."""
    variants = []
    for variant, cell_scheme in evidence.cells:
        if cell_scheme == scheme and variant != names.GRPO and (variant, names.FULL) in evidence.cells:
            variants.append(variant)
    return variants


def _loss(variant: str, scheme: str) -> dict[Cell, float]:
    """Return the weights of a variant's loss under a scheme."""
    return {(variant, names.FULL): 1.0, (variant, scheme): -1.0}


def _negative(weights: dict[Cell, float]) -> dict[Cell, float]:
    return {cell: -weight for cell, weight in weights.items()}


def markdown(damages: Sequence[Damage]) -> list[str]:
    """Return the lines of the table, with the findings under it; none without damages."""
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
    body = [_cells(damage) for damage in damages]
    sentences = [f"- {finding}" for finding in findings(damages)]
    return [title, "", *table(head, body), "", note, "", *sentences, ""]


def _cells(damage: Damage) -> list[str]:
    """Return the cells of a table row."""
    row = [damage.scheme, damage.variant, interval(damage.loss)]
    if damage.excess is None or damage.scales is None:
        return [*row, "reference", "", kept_text(damage.kept), "reference", "reference"]
    row += [interval(damage.excess), f"{damage.p_holm:.2g}"]
    return [*row, kept_text(damage.kept), *ratio_texts(damage.scales)]


def findings(damages: Iterable[Damage]) -> list[str]:
    """Return a sentence for every pair that differs on some scale, which names all of them, and one for the others."""
    sentences = []
    equal = []
    for damage in damages:
        if damage.scales is None:
            continue
        if not any(damage.scales.signs.values()):
            equal.append(f"{damage.variant} under {damage.scheme}")
            continue
        finding = f"Under {damage.scheme}: {sentence(damage.scales, names.GRPO, damage.variant)}"
        if not damage.differs:
            finding += " In points, the difference is not significant after Holm's correction."
        sentences.append(finding)
    if equal:
        sentences.append(f"On no scale is a difference shown between {names.GRPO} and {', '.join(equal)}.")
    return sentences


def as_json(damages: Iterable[Damage]) -> list[dict[str, Any]]:
    """Return the rows of the table; what depends on a comparison with grpo is null for grpo itself."""
    entries = []
    for damage in damages:
        scales = damage.scales
        entry = {
            "variant": damage.variant,
            "scheme": damage.scheme,
            "loss": numbers(damage.loss),
            "p_holm": damage.p_holm,
            "grpo_loss_minus_loss": numbers_or_null(damage.excess),
            "accuracy_kept": numbers_or_null(damage.kept),
            "accuracy_kept_ratio": numbers(scales.ratio) if scales else None,
            "log_odds_difference": numbers(scales.log_odds) if scales else None,
            "scales_agree": scales.agree if scales else None,
        }
        entries.append(entry)
    return entries


def metrics(damages: Iterable[Damage]) -> dict[str, float]:
    """Return `damage/<variant>_<scheme>`, grpo's loss minus this one, with `_low` and `_high`."""
    scores = {}
    for damage in damages:
        if damage.excess:
            scores |= with_ends(f"damage/{names.in_metric(damage.variant, damage.scheme)}", damage.excess)
    return scores
