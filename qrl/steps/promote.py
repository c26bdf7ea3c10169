"""Promote: an evaluated cell becomes a version, and gets a stage if its gate lets it in.

What a cell is, its run says: the base model, the task, the data and the seed. Options that contradict it are refused.
"""

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pandas as pd

from qrl import checkpoint, compare, names, registry, source, stats, tasks
from qrl.compare.comparison import share_of_gain
from qrl.compare.validate import check_compatible
from qrl.errors import BadInput, GateRefused, QrlError
from qrl.evaluate import scores
from qrl.recipe import Recipe
from qrl.recipe.stages import Stage
from qrl.registry import gate, pointers, signing, versions
from qrl.registry.history import History
from qrl.registry.stages import check_stage
from qrl.steps import inputs, outcome
from qrl.tracking import cells, contents, lineage, models, runs, store
from qrl.tracking.cells import Evaluated
from qrl.tracking.lineage import Ancestor


def promote(recipe: Recipe, stages: list[str], run_ids: list[str], typed: Collection[str] = ()) -> None:
    """Judge each candidate in turn; the first refusal ends it, since later stages are made from earlier ones.

    Args:
        recipe: the section `promote`, and the fields that the user typed.
        stages: as the recipe declares them, or the registered model has them; in order.
        run_ids: the candidates' evaluation runs, one per stage.
        typed: keys of the fields that the user typed; all others are those of the candidates' runs.

    Raises:
        BadInput: a typed field contradicts a candidate's run, or the candidates belong to several models.
        GateRefused: a gate refused a candidate; no pointer of its stage was moved.
    """
    if len(stages) != len(run_ids):
        raise BadInput(f"--stage names {len(stages)} and --cell {len(run_ids)}: give one cell's run per stage.")
    keys = signing.keys(recipe.promote)
    store.prepare()
    for stage in stages:
        check_stage(stage, recipe.promote.declared)
    candidates = [cells.read(run_id) for run_id in run_ids]
    bases = [_base(recipe, candidate, typed) for candidate in candidates]
    own = [_own(recipe, *pair, typed) for pair in zip(candidates, bases, strict=True)]
    recipe, name = own[0], registry.registered_name(own[0])
    if differing := {registry.registered_name(each) for each in own} - {name}:
        several = " and ".join([name, *sorted(differing)])
        raise BadInput(f"The cells belong to several models, {several}: promote each of them by itself.")
    known = registry.check_declared(name, recipe.promote.stages)
    for stage in stages:
        check_stage(stage, recipe.promote.declared, name)
    declared = {stage.stage: stage for stage in recipe.promote.declared}
    every = known | declared if recipe.promote.stages else declared | known  # what a recipe says, or the model's own
    judged = [every[stage] for stage in stages]
    if not runs.is_launched():
        facts = {"model": recipe.model, "task": recipe.task, "data": recipe.data, "seed": recipe.seed}
        said = ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
        click.echo(f"      As the cell's run says: {said}.", err=True)
    with runs.step("promote", recipe, sections=("promote",), params={"stage": ",".join(stages), "registered": name}):
        outcomes = []
        try:
            for stage, candidate, base in zip(judged, candidates, bases, strict=True):
                outcomes.append(_promote_one(recipe, name, stage, candidate, base, keys))
                click.echo(f"      {outcomes[-1]}", err=True)
        finally:
            contents.describe("\n".join(f"- {outcome}" for outcome in outcomes))
            study, table = runs.parent_id(), ""
            with contextlib.suppress(BadInput):  # a study that has none yet
                table = contents.artifact(study, names.TABLE_MD).read_text(encoding="utf-8") if study else ""
            registry.publish(name, registry.known(name).values(), table)
        outcome.promoted(name, stages[-1])


def _own(recipe: Recipe, cell: Evaluated, base: Ancestor, typed: Collection[str]) -> Recipe:
    """Return the recipe with the model, task, data, prompt and seed of a cell's run.

    Raises:
        BadInput: one was typed and differs, or nothing says by which name to register the cell.
    """
    recorded = {key: text for key, text in cell.settings.items() if text != "null"}
    for key in {"task", "prompt", "seed"} & set(typed):
        if key == "task" and cell.task and tasks.label(recipe.task) == cell.task:
            continue  # a task file that was moved is the same
        if (wanted := recipe.flat()[key]) != (actual := recorded.get(key, wanted)):
            raise _contradicted(f"--{key} {wanted}", cell, f"it was evaluated with {key} {actual}")
    fields = {key: recorded[key] for key in ("task", "prompt", "data", "registered_name") if key in recorded}
    fields |= {"seed": int(recorded.get("seed", recipe.seed)), "model": base.address or recipe.model}
    asked = {"selection": recorded.get("evaluate.selection", "random")}
    fields["evaluate"] = recipe.evaluate.model_copy(update=asked)
    own = recipe.model_copy(update={key: value for key, value in fields.items() if key not in typed})
    if "data" in typed and cell.questions not in ("", inputs.digest(inputs.evaluated(own, cell.n))):
        raise _contradicted(f"--data {own.data}", cell, "it was evaluated on other questions")
    if not (base.address or own.registered_name or "model" in typed):
        raise BadInput(f"The store does not say which base the model of run {cell.run_id} has: add --registered_name.")
    return own


def _base(recipe: Recipe, cell: Evaluated, typed: Collection[str]) -> Ancestor:
    """Return the base model of a cell: the one that was typed, else its run's, else where the model's line begins.

    Raises:
        BadInput: the model that was typed is not in the line of the cell's model.
    """
    line = lineage.line(cell.model) if cell.model else []
    if "model" in typed and line:
        if base := _member(line, recipe.model, source.locate(recipe.model)):
            return base
        raise _contradicted(f"--model {recipe.model}", cell, f"its model was made from {line[-1].address or 'another'}")
    claimed = cell.settings.get("model", "")
    begin = line[-1] if line else Ancestor(cell.digest, "")
    return _member(line, claimed, source.SHIPPED.get(claimed) or Path(claimed)) or begin


def _member(line: list[Ancestor], address: str, folder: Path) -> Ancestor | None:
    """Return the model in a line that has an address, or the weights in its folder."""
    digest = checkpoint.digest(folder) if (folder / "config.json").is_file() else None
    same = (ancestor.digest for ancestor in line if address == ancestor.address or digest == ancestor.digest)
    return next((Ancestor(digest, address) for digest in same), None)


def _contradicted(option: str, cell: Evaluated, fact: str) -> BadInput:
    return BadInput(f"{option} contradicts run {cell.run_id} ({cell.variant}:{cell.scheme}), since {fact}: remove it.")


def rollback(recipe: Recipe, stage: str) -> None:
    """Return a stage to the version before its last promotion."""
    name = registry.registered_name(recipe)
    _, public = signing.keys(recipe.promote)
    store.prepare()
    click.echo(f"Stage {stage} is {registry.rollback(name, stage, public)} again.")
    outcome.promoted(name, stage)


def _promote_one(
    recipe: Recipe, name: str, stage: Stage, candidate: Evaluated, base: Ancestor, keys: tuple[Any, str]
) -> str:
    if not candidate.model:
        raise GateRefused(f"Stage {stage.stage} is refused: {' '.join(candidate.broken)}")
    candidate = _measured(candidate, stage)
    if candidate.chat != (stored := models.params(candidate.model).get(models.CHAT, "{}")):
        evaluated = f"Run {candidate.run_id} rendered chats with chat.template_kwargs {candidate.chat}"
        raise BadInput(
            f"{evaluated}, but {candidate.model} is stored to render them with {stored}: evaluate it with the latter, "
            "or train and quantize with the former."
        )
    past = pointers.current(name) if stage.made_from else None
    before = registry.resolve(name, stage.made_from, past) if stage.made_from else None
    facts = {key: getattr(candidate, key) for key in ("digest", "variant", "scheme", "accuracy", "stderr", "n", "chat")}
    parent = before.version if before else None
    version = registry.register(name, candidate.model, **facts, parent_version=parent, past=past)
    past = past or pointers.current(name)  # of a model that is there: a server with rights denies what it lacks
    looked_at = {each: past.state.at.get(each) for each in (stage.stage, stage.gain_over, stage.loss_to) if each}
    looked_at |= {stage.made_from: parent} if stage.made_from else {}
    decision = _signed(_decide(recipe, past, stage, candidate, version, before or base), version, *keys)
    bounds = decision.facts | {"accuracy": candidate.accuracy, "rows_sha256": candidate.rows}
    record = {"run": candidate.run_id, "reasons": decision.reasons, "bounds": bounds}
    if study := runs.parent_id():
        record["study"] = study
    if not decision.passed:
        registry.refuse(name, stage.stage, version.version, record=record)
        raise GateRefused(f"{decision} The stage remains as it was.")
    former = _former(name, past, stage.stage, version, candidate)
    registry.promote(name, stage, version.version, record=record, expected=looked_at)
    return f"{stage.stage} is version {version.version} of {name}{former}. {' '.join(decision.reasons)}"


def _former(name: str, past: History, stage: str, version: versions.Version, candidate: Evaluated) -> str:
    """Return a clause on the version that held a stage before; empty if there is none."""
    held = past.state.at.get(stage)
    if held in (None, version.version):
        return ""
    others = ""
    with contextlib.suppress(QrlError):  # an evaluation that is gone or was changed says nothing
        before = _evaluation(registry.resolve(name, held, past), stage).questions
        if before and candidate.questions and before != candidate.questions:
            others = ", evaluated on other questions"
    return f", instead of version {held}{others}, to which --rollback returns"


def _measured(cell: Evaluated, stage: Stage) -> Evaluated:
    """Return a cell with accuracy, n and health computed again from its rows, which its end sealed.

    Raises:
        GateRefused: it has no record of its rows, so a metric, a status or a row may have been edited.
    """
    if cell.broken:  # it did not finish
        return cell
    if not cell.rows:
        raise GateRefused(
            f"Stage {stage.stage} is refused: run {cell.run_id} has no record of its rows, as an evaluated cell has: "
            "evaluate it again."
        )
    accuracy, broken = scores.again(cells.rows([cell.run_id]), cell.limits)
    measured = {"accuracy": accuracy.estimate, "stderr": accuracy.stderr, "n": accuracy.n}
    return replace(cell, **measured, broken=tuple(broken))


def _decide(
    recipe: Recipe,
    past: History,
    stage: Stage,
    candidate: Evaluated,
    version: versions.Version,
    before: versions.Version | Ancestor,
) -> gate.Decision:
    # The digest of the files in the store now, not the version's tag: those are what would be served.
    digest = checkpoint.digest(versions.folder(version))
    least = recipe.promote.min_n
    if isinstance(before, Ancestor):
        return gate.decide(stage, candidate, digest, before_digest=before.digest, min_n=least)
    max_growth = recipe.promote.max_length_growth
    compared_with = {stage.gain_over, stage.loss_to, stage.made_from if max_growth is not None else None} - {None}
    others = {name: _evaluation(registry.resolve(past.name, name, past), name) for name in sorted(compared_with)}
    tasks_by_stage = {name: cell.task for name, cell in others.items() if cell.task and candidate.task}
    checks: dict[str, Any] = {"tasks": tasks_by_stage}
    if all(task == candidate.task for task in tasks_by_stage.values()):
        checks["differences"] = _differences(recipe, stage, candidate, others)
        if max_growth is not None:
            checks |= {"max_growth": max_growth, "growth": _changes(candidate, others[stage.made_from])[1]}
        least_kept = recipe.promote.min_gain_kept if stage.min_gain_kept is None else stage.min_gain_kept
        is_own_cell = f"{candidate.variant}:{candidate.scheme}" == stage.cell  # another one is refused anyway
        if least_kept is not None and stage.can_keep_a_gain and is_own_cell:
            checks["gain_kept"] = _gain_kept(candidate, least_kept)
    made = {"parent": _made_from(candidate, before), "before_digest": before.digest, "min_n": least}
    return gate.decide(stage, candidate, digest, **made, **checks)


def _differences(
    recipe: Recipe, stage: Stage, candidate: Evaluated, others: dict[str, Evaluated]
) -> list[gate.Comparison]:
    """Return the candidate's differences to the stages that its own asks it to be compared with."""
    found = []
    if stage.gain_over:
        gain, _ = _changes(candidate, others[stage.gain_over])
        least = recipe.promote.min_gain if stage.min_gain is None else stage.min_gain
        found.append(gate.Comparison(stage.gain_over, stage.gain_over, gain, least, gain=True))
    if stage.loss_to:
        other = others[stage.loss_to]
        shown = f"{stage.loss_to} at full precision" if other.scheme == names.FULL else stage.loss_to
        loss, _ = _changes(candidate, other)
        most = recipe.promote.max_loss if stage.max_loss is None else stage.max_loss
        found.append(gate.Comparison(stage.loss_to, shown, loss, most, gain=False))
    return found


def _gain_kept(candidate: Evaluated, least: float) -> gate.GainKept:
    """Return the share of the gain that a quantized candidate keeps, and the cells that are missing to compute it.

    The share needs four cells that answered the same questions: the base and the trained variant, at full precision and
    under the candidate's scheme. Evaluations of the weights that the candidate was made from count, those of its own
    `evaluate` step first: a study that reuses cells has them in several.
    """
    line = [ancestor.digest for ancestor in lineage.line(candidate.model)]
    base = line[-1] if line else ""

    def is_trained(cell: Evaluated) -> bool:
        return cell.digest in line

    def is_base(cell: Evaluated) -> bool:
        return base in (cell.digest, cell.parent)

    found = {
        f"{names.BASE}:{names.FULL}": _beside(candidate, names.BASE, names.FULL, is_base),
        f"{candidate.variant}:{names.FULL}": _beside(candidate, candidate.variant, names.FULL, is_trained),
        f"{names.BASE}:{candidate.scheme}": _beside(candidate, names.BASE, candidate.scheme, is_base),
    }
    missing = tuple(name for name, cell in found.items() if cell is None)
    if missing:
        return gate.GainKept(None, least, missing)
    frame = cells.rows([candidate.run_id, *(cell.run_id for cell in found.values() if cell)])
    evidence = compare.from_questions(frame).evidence
    return gate.GainKept(share_of_gain(evidence, candidate.variant, candidate.scheme).kept, least)


def _beside(
    candidate: Evaluated, variant: str, scheme: str, has_right_weights: Callable[[Evaluated], bool]
) -> Evaluated | None:
    """Return another cell's evaluation on the candidate's questions; of its own `evaluate` step if that has one."""
    fitting = [
        cell
        for cell in cells.sealed(variant, scheme)
        if (cell.task, cell.questions) == (candidate.task, candidate.questions) and has_right_weights(cell)
    ]
    return next((cell for cell in fitting if cell.step == candidate.step), fitting[0] if fitting else None)


def _signed(decision: gate.Decision, version: versions.Version, signer: Any, public: str) -> gate.Decision:
    """Return a decision with a check more: a version that passed is signed now, or was before."""
    if not (decision.passed and public):
        return decision
    try:
        if signer:
            signing.sign(version, versions.folder(version), signer, public)
        signing.verify(version, versions.folder(version), public)
    except GateRefused as error:
        return replace(decision, passed=False, reasons=(str(error), *decision.reasons))
    reasons = (*decision.reasons, "Its signature verifies.")
    return replace(decision, reasons=reasons, facts=decision.facts | {"signer": public})


def _evaluation(version: versions.Version, stage: str) -> Evaluated:
    """Return the evaluation with which a version earned a stage.

    Raises:
        BadInput: none is recorded.
        GateRefused: its rows have no record any more, or another than when it was promoted.
    """
    earned = version.gate(stage)
    if earned is None or not earned.run:
        raise BadInput(f"No evaluation is recorded for {version}: promote it again first.")
    cell = cells.read(earned.run)
    if not cell.rows or earned.bounds.get("rows_sha256", cell.rows) != cell.rows:
        raise GateRefused(
            f"Stage {stage} rests on the rows of run {earned.run}, whose record is not the one that its gate saw: "
            f"evaluate {version} again, and promote it first."
        )
    return cell


def _made_from(candidate: Evaluated, before: versions.Version) -> str:
    """Return the digest of the model that a candidate must have been made from to belong behind an earlier stage.

    It is the candidate's parent. Quantized weights of another training than the earlier stage's have one model between
    the two, their own in full precision: its parent counts.
    """
    if candidate.digest == before.digest and candidate.scheme != before.scheme:
        return before.digest  # the same weights with another key-value cache
    if candidate.parent == before.digest or candidate.scheme == names.FULL or candidate.variant == before.variant:
        return candidate.parent
    own = lineage.line(candidate.model)[1:3]  # the model in full precision, and what that was trained from
    return own[-1].digest if len(own) == 2 else candidate.parent


def _changes(candidate: Evaluated, reference: Evaluated) -> tuple[stats.Estimate, stats.Estimate | None]:
    """Return accuracy of candidate − reference, and the growth of tokens per answer if known, paired by question.

    Raises:
        BadInput: the cells have different questions, or answers of different engines.
    """
    frames = [cells.rows([cell.run_id]) for cell in (candidate, reference)]
    check_compatible(pd.concat(frames, ignore_index=True))
    measured = [rows.reindex(columns=["question", "correct", "n_tokens"]) for rows in frames]
    means = [rows.groupby("question").mean() for rows in measured]  # over samples, if there are several
    outcomes = means[0][["correct"]].join(means[1]["correct"].rename("reference"), how="outer")
    if outcomes.isna().any(axis=None):
        raise BadInput(
            f"The cells {candidate.variant}:{candidate.scheme} and {reference.variant}:{reference.scheme} have "
            "different questions, so they cannot be compared: evaluate both with the same task, data, seed and "
            "evaluate.n, and promote both, as in --stage base,grpo --cell RUN,RUN."
        )
    lengths = means[0][["n_tokens"]].join(means[1]["n_tokens"].rename("reference")).to_numpy(float).T
    growth = stats.relative_change(*lengths) if (lengths.min(axis=1) >= 0).all() and lengths[1].any() else None
    return stats.contrast(outcomes.to_numpy(float).T, (1, -1)), growth
