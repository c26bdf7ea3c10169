"""Promote: an evaluated cell becomes a version, and a stage's, if its gate agrees."""

from __future__ import annotations

import click
import pandas as pd

from qrl import checkpoint, names, registry, stats
from qrl.compare.compatibility import check as check_alike
from qrl.errors import BadInput, GateRefused
from qrl.recipe import Recipe
from qrl.registry import gate, versions
from qrl.tracking import cells, contents, runs, store
from qrl.tracking.cells import Evaluated

BEFORE = {"grpo": "base", "awq": "grpo"}  # the stage that a stage's weights descend from


def promote(recipe: Recipe, stages: list[str], run_ids: list[str]) -> None:
    """Judges each candidate in turn; the first refusal ends it, since later stages descend from earlier ones.

    Args:
        recipe: the section `promote`.
        stages: of base, grpo, awq, in that order.
        run_ids: the candidates' evaluation runs, one a stage.

    Raises:
        GateRefused: a gate decided against a candidate; no pointer of its stage was moved.
    """
    for stage in stages:
        if stage not in names.STAGES:
            raise BadInput(f"There is no stage '{stage}' to promote to: expected one of {', '.join(names.STAGES)}.")
    if len(stages) != len(run_ids):
        raise BadInput(f"{len(stages)} stages were given with {len(run_ids)} cells: expected one cell's run a stage.")
    name = registry.registered_name(recipe)
    store.prepare()
    candidates = [cells.read(run_id) for run_id in run_ids]
    with runs.step("promote", recipe, sections=("promote",), params={"stage": ",".join(stages), "registered": name}):
        said = []
        for stage, candidate in zip(stages, candidates, strict=True):
            try:
                said.append(_one(recipe, name, stage, candidate))
            finally:
                contents.describe("\n".join(f"- {line}" for line in said))
            click.echo(f"      {said[-1]}", err=True)


def rollback(recipe: Recipe, stage: str) -> None:
    """Returns a stage to the version before its last promotion."""
    name = registry.registered_name(recipe)
    store.prepare()
    click.echo(f"Stage {stage} is {registry.rollback(name, stage)} again.")


def _one(recipe: Recipe, name: str, stage: str, candidate: Evaluated) -> str:
    if not candidate.model:
        raise GateRefused(f"Stage {stage} is refused: {' '.join(candidate.broken)}")
    before = registry.resolve(name, BEFORE[stage]) if stage in BEFORE else None
    held = _held(name, stage)
    version = registry.register(
        name,
        candidate.model,
        digest=candidate.digest,
        variant=candidate.variant,
        scheme=candidate.scheme,
        accuracy=candidate.accuracy,
        stderr=candidate.stderr,
        n=candidate.n,
        parent_version=before.version if before else None,
    )
    decision = _decide(recipe, stage, candidate, version, before)
    record = {"cell": candidate.run_id, "why": str(decision), "facts": decision.facts}
    if not decision.passed:
        registry.refuse(name, stage, version.version, record=record)
        raise GateRefused(f"{decision} The stage stays as it was.")
    registry.promote(name, stage, version.version, record=record, expected=held)
    return f"{stage} is version {version.version} of {name}. {' '.join(decision.reasons)}"


def _held(name: str, stage: str) -> int | None:
    """The version that holds the stage now."""
    try:
        return registry.resolve(name, stage).version
    except BadInput:
        return None


def _decide(
    recipe: Recipe, stage: str, candidate: Evaluated, version: versions.Version, before: versions.Version | None
) -> gate.Decision:
    # The files as they lie in the store now, not the tag that says what they were: those are what would be served.
    evidence = gate.Evidence(candidate.broken, candidate.digest, checkpoint.digest(versions.folder(version)))
    if before is None:
        return gate.decide_base(evidence)
    difference = _difference(candidate, _reference(before))
    if stage == "grpo":
        return gate.decide_grpo(
            evidence,
            parent_digest=candidate.parent,
            base_digest=before.digest,
            gain=difference,
            min_gain=recipe.promote.min_gain,
        )
    return gate.decide_awq(
        evidence,
        parent_digest=candidate.parent,
        grpo_digest=before.digest,
        difference=difference,
        max_loss=recipe.promote.max_loss,
    )


def _reference(version: versions.Version) -> Evaluated:
    """The evaluation by which a version earned its stage."""
    record = version.gate(version.stage) or {}
    if "cell" not in record:
        raise BadInput(f"No evaluation is recorded for {version}: promote it again first.")
    return cells.read(record["cell"])


def _difference(candidate: Evaluated, reference: Evaluated) -> stats.Estimate:
    """Candidate − reference, paired by question.

    Raises:
        BadInput: they were asked different questions, or answered by different engines.
    """
    answered = [each.rows() for each in (candidate, reference)]
    check_alike(pd.concat(answered, ignore_index=True))
    rates = [rows.groupby("question")["correct"].mean() for rows in answered]  # over samples, if there are several
    outcomes = rates[0].to_frame("correct").join(rates[1].rename("reference"), how="outer")
    if outcomes.isna().any(axis=None):
        raise BadInput(
            f"The cells {candidate.variant}:{candidate.scheme} and {reference.variant}:{reference.scheme} were asked different "
            "questions, so they cannot be compared: evaluate both with the same task, data, seed and evaluate.n, and promote both, "
            "as in --stage base,grpo --cell RUN,RUN."
        )
    return stats.contrast(outcomes.to_numpy(float).T, (1, -1))
