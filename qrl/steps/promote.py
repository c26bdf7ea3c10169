"""Promote: an evaluated cell becomes a version, and gets a stage if its gate lets it in."""

import contextlib

import click
import pandas as pd

from qrl import checkpoint, names, registry, stats
from qrl.compare.validate import check_compatible
from qrl.errors import BadInput, GateRefused
from qrl.recipe import Recipe
from qrl.registry import gate, versions
from qrl.registry.stages import check_stage, holder
from qrl.steps import outcome
from qrl.tracking import cells, contents, runs, store
from qrl.tracking.cells import Evaluated


def promote(recipe: Recipe, stages: list[str], run_ids: list[str]) -> None:
    """Judge each candidate in turn; the first refusal ends it, since later stages are made from earlier ones.

    Args:
        recipe: the section `promote`.
        stages: of base, grpo, awq, in that order.
        run_ids: the candidates' evaluation runs, one per stage.

    Raises:
        GateRefused: a gate refused a candidate; no pointer of its stage was moved.
    """
    for stage in stages:
        check_stage(stage, "to promote to")
    if len(stages) != len(run_ids):
        raise BadInput(f"--stage names {len(stages)} and --cell {len(run_ids)}: give one cell's run per stage.")
    name = registry.registered_name(recipe)
    store.prepare()
    candidates = [cells.read(run_id) for run_id in run_ids]
    with runs.step("promote", recipe, sections=("promote",), params={"stage": ",".join(stages), "registered": name}):
        outcomes = []
        try:
            for stage, candidate in zip(stages, candidates, strict=True):
                outcomes.append(_promote_one(recipe, name, stage, candidate))
                click.echo(f"      {outcomes[-1]}", err=True)
        finally:
            contents.describe("\n".join(f"- {outcome}" for outcome in outcomes))
            study, table = runs.parent_id(), ""
            with contextlib.suppress(BadInput):  # a study that has none yet
                table = contents.artifact(study, names.TABLE_MD).read_text(encoding="utf-8") if study else ""
            registry.publish(name, table)
        outcome.promoted(name, stages[-1])


def rollback(recipe: Recipe, stage: str) -> None:
    """Return a stage to the version before its last promotion."""
    name = registry.registered_name(recipe)
    store.prepare()
    click.echo(f"Stage {stage} is {registry.rollback(name, stage)} again.")
    outcome.promoted(name, stage)


def _promote_one(recipe: Recipe, name: str, stage: str, candidate: Evaluated) -> str:
    if not candidate.model:
        raise GateRefused(f"Stage {stage} is refused: {' '.join(candidate.broken)}")
    before = registry.resolve(name, gate.BEFORE[stage]) if stage in gate.BEFORE else None
    held_by = holder(name, stage)
    facts = {key: getattr(candidate, key) for key in ("digest", "variant", "scheme", "accuracy", "stderr", "n")}
    parent = before.version if before else None
    version = registry.register(name, candidate.model, **facts, parent_version=parent)
    decision = _decide(recipe, stage, candidate, version, before)
    record = {"run": candidate.run_id, "reasons": decision.reasons, "bounds": decision.facts}
    if not decision.passed:
        registry.refuse(name, stage, version.version, record=record)
        raise GateRefused(f"{decision} The stage remains as it was.")
    registry.promote(name, stage, version.version, record=record, expected=held_by)
    return f"{stage} is version {version.version} of {name}. {' '.join(decision.reasons)}"


def _decide(
    recipe: Recipe, stage: str, candidate: Evaluated, version: versions.Version, before: versions.Version | None
) -> gate.Decision:
    # The digest of the files in the store now, not the version's tag: those are what would be served.
    digest = checkpoint.digest(versions.folder(version))
    if before is None:
        return gate.decide(stage, candidate, digest)
    earned = before.gate(gate.BEFORE[stage])
    if earned is None or not earned.run:
        raise BadInput(f"No evaluation is recorded for {before}: promote it again first.")
    difference = _difference(candidate, cells.read(earned.run))
    limit = recipe.promote.min_gain if stage == "grpo" else recipe.promote.max_loss
    return gate.decide(stage, candidate, digest, before_digest=before.digest, difference=difference, limit=limit)


def _difference(candidate: Evaluated, reference: Evaluated) -> stats.Estimate:
    """Return candidate − reference, paired by question.

    Raises:
        BadInput: the cells have different questions, or answers of different engines.
    """
    frames = [cells.rows([cell.run_id]) for cell in (candidate, reference)]
    check_compatible(pd.concat(frames, ignore_index=True))
    rates = [rows.groupby("question")["correct"].mean() for rows in frames]  # over samples, if there are several
    outcomes = rates[0].to_frame("correct").join(rates[1].rename("reference"), how="outer")
    if outcomes.isna().any(axis=None):
        raise BadInput(
            f"The cells {candidate.variant}:{candidate.scheme} and {reference.variant}:{reference.scheme} have "
            "different questions, so they cannot be compared: evaluate both with the same task, data, seed and "
            "evaluate.n, and promote both, as in --stage base,grpo --cell RUN,RUN."
        )
    return stats.contrast(outcomes.to_numpy(float).T, (1, -1))
