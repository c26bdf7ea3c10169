"""Promote: an evaluated cell becomes a version, and gets a stage if its gate lets it in.

The model, task, data and seed are those of the cell's evaluation run. Options that contradict it are refused.
"""

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
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
from qrl.registry.signing import SigningKeys
from qrl.registry.stages import check_stage
from qrl.steps import outcome
from qrl.tasks import question_sets
from qrl.tracking import addresses, cells, contents, lineage, models, runs, store
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
    signing_keys = signing.load_keys(recipe.promote)
    store.prepare()
    for stage in stages:
        check_stage(stage, recipe.promote.declared)

    candidates = [cells.read(run_id) for run_id in run_ids]
    bases = [_base(recipe, candidate, typed) for candidate in candidates]
    recipes = [_recipe_of(recipe, cell, base, typed) for cell, base in zip(candidates, bases, strict=True)]
    name = _common_name(recipes)
    recipe = recipes[0]
    warning = ""
    if bases[0].address:  # else the store does not say which weights the base has
        warning = registry.check_base(recipe, bases[0].digest)
    if warning:
        click.secho(f"qrl: warning: {warning}", fg="yellow", err=True)
    stages_by_name = _stages_by_name(recipe, stages, name)
    if not runs.is_launched():
        _echo_settings(recipe)

    with runs.step("promote", recipe, sections=("promote",), params={"stage": ",".join(stages), "registered": name}):
        messages: list[str] = []
        try:
            for stage, candidate, base in zip(stages, candidates, bases, strict=True):
                message = _promote_one(recipe, name, stages_by_name[stage], candidate, base, signing_keys)
                messages.append(message)
                click.echo(f"      {message}", err=True)
        finally:
            # After a refusal too: the description shows how far the promotion came.
            contents.describe("\n".join(f"- {message}" for message in messages))
            registry.publish(name, registry.stages_of(name).values(), _table_of_study())
        outcome.print_promoted(name, stages[-1])


def rollback(recipe: Recipe, stage: str) -> None:
    """Return a stage to the version before its last promotion."""
    name = registry.registered_name(recipe)
    public_key = signing.load_keys(recipe.promote).public_key
    store.prepare()
    click.echo(f"Stage {stage} is {registry.rollback(name, stage, public_key)} again.")
    outcome.print_promoted(name, stage)


def _base(recipe: Recipe, cell: Evaluated, typed: Collection[str]) -> Ancestor:
    """Return the base model of a cell: the one that was typed, else its run's, else where its model's lineage begins.

    Raises:
        BadInput: the model that was typed is not in the lineage of the cell's model.
    """
    line = lineage.line(cell.model) if cell.model else []
    if "model" in typed and line:
        base = _find_in_line(line, recipe.model, addresses.folder(recipe.model))
        if base is None:
            actual = line[-1].address or "another"
            raise _contradiction(f"--model {recipe.model}", cell, f"its model was made from {actual}")
        return base

    first = line[-1] if line else Ancestor(cell.digest, "")
    recorded_model = cell.settings.get("model", "")
    folder = source.SHIPPED.get(recorded_model) or Path(recorded_model)
    if recorded_model.startswith("models:/"):
        folder = addresses.folder(recorded_model)
    return _find_in_line(line, recorded_model, folder) or first


def _find_in_line(line: list[Ancestor], address: str, folder: Path) -> Ancestor | None:
    """Return the model in a lineage that has an address, or the weights in its folder; None if there is none."""
    digest = checkpoint.digest(folder) if (folder / "config.json").is_file() else None
    for ancestor in line:
        if ancestor.address == address or ancestor.digest == digest:
            return Ancestor(ancestor.digest, address)
    return None


def _recipe_of(recipe: Recipe, cell: Evaluated, base: Ancestor, typed: Collection[str]) -> Recipe:
    """Return the recipe with the model, task, data, prompt and seed of a cell's run.

    Raises:
        BadInput: one was typed and differs, or nothing says by which name to register the cell.
    """
    recorded = {key: text for key, text in cell.settings.items() if text != "null"}
    for key in {"task", "prompt", "seed"} & set(typed):
        if key == "task" and cell.task and tasks.label(recipe.task) == cell.task:
            continue  # the same task file under another path
        typed_value = recipe.flat()[key]
        recorded_value = recorded.get(key, typed_value)
        if typed_value != recorded_value:
            raise _contradiction(f"--{key} {typed_value}", cell, f"it was evaluated with {key} {recorded_value}")

    fields: dict[str, Any] = {
        key: recorded[key] for key in ("task", "prompt", "data", "registered_name") if key in recorded
    }
    fields["seed"] = int(recorded.get("seed", recipe.seed))
    fields["model"] = base.address or recipe.model
    selection = recorded.get("evaluate.selection", "random")
    fields["evaluate"] = recipe.evaluate.model_copy(update={"selection": selection})
    cell_recipe = recipe.model_copy(update={key: value for key, value in fields.items() if key not in typed})

    if "data" in typed and cell.questions:
        typed_questions = question_sets.digest(question_sets.load_evaluated(cell_recipe, cell.n))
        if cell.questions != typed_questions:
            raise _contradiction(f"--data {cell_recipe.data}", cell, "it was evaluated on other questions")
    if not (base.address or cell_recipe.registered_name or "model" in typed):
        raise BadInput(f"The store does not say which base the model of run {cell.run_id} has: add --registered_name.")
    return cell_recipe


def _contradiction(option: str, cell: Evaluated, fact: str) -> BadInput:
    return BadInput(f"{option} contradicts run {cell.run_id} ({cell.variant}:{cell.scheme}), since {fact}: remove it.")


def _common_name(recipes: list[Recipe]) -> str:
    """Return the registered model that all candidates belong to; raise BadInput if there are several."""
    registered_names = [registry.registered_name(recipe) for recipe in recipes]
    first = registered_names[0]
    other_names = sorted(set(registered_names) - {first})
    if other_names:
        listed = " and ".join([first, *other_names])
        raise BadInput(f"The cells belong to several models, {listed}: promote each of them by itself.")
    return first


def _stages_by_name(recipe: Recipe, stages: list[str], name: str) -> dict[str, Stage]:
    """Return the stages that the recipe declares and those of the registered model.

    Of two with one name, the recipe's counts if the recipe has `promote.stages` of its own, else the model's.

    Raises:
        BadInput: neither has one of `stages`.
    """
    of_model = registry.check_stages(name, recipe.promote.stages)
    for stage in stages:
        check_stage(stage, recipe.promote.declared, name)
    of_recipe = {stage.stage: stage for stage in recipe.promote.declared}
    if recipe.promote.stages:
        return of_model | of_recipe
    return of_recipe | of_model


def _echo_settings(recipe: Recipe) -> None:
    settings = {"model": recipe.model, "task": recipe.task, "data": recipe.data, "seed": recipe.seed}
    shown = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
    click.echo(f"      As the cell's run says: {shown}.", err=True)


def _table_of_study() -> str:
    """Return the table of cells of the study that this step belongs to; empty if there is none yet."""
    study = runs.parent_id()
    if not study:
        return ""
    with contextlib.suppress(BadInput):  # the study has not compared its cells yet
        return contents.artifact(study, names.TABLE_MD).read_text(encoding="utf-8")
    return ""


def _promote_one(
    recipe: Recipe, name: str, stage: Stage, candidate: Evaluated, base: Ancestor, signing_keys: SigningKeys
) -> str:
    """Register a candidate, decide on its stage and move the stage; return a sentence that says so.

    Raises:
        BadInput: its chats were rendered otherwise than its model is stored to render them.
        GateRefused: the gate refused it; the refusal is recorded.
    """
    if not candidate.model:
        raise GateRefused(f"Stage {stage.stage} is refused: {' '.join(candidate.broken)}")
    candidate = _recomputed(candidate, stage)
    _check_chat(candidate)

    # Without an earlier stage the model may not exist yet. A server with rights denies what it lacks, so its history
    # is read only once `register` has made it.
    history = None
    made_from = None
    if stage.made_from:
        history = pointers.current(name)
        made_from = registry.resolve(name, stage.made_from, history)
    version = registry.register(
        name,
        candidate.model,
        digest=candidate.digest,
        variant=candidate.variant,
        scheme=candidate.scheme,
        accuracy=candidate.accuracy,
        stderr=candidate.stderr,
        n=candidate.n,
        chat=candidate.chat,
        parent_version=made_from.version if made_from else None,
        history=history,
    )
    history = history or pointers.current(name)

    decision = _decide(recipe, history, stage, candidate, version, made_from or base)
    decision = _check_signature(decision, version, signing_keys)
    record = {
        "run": candidate.run_id,
        "reasons": decision.reasons,
        "bounds": decision.facts | {"accuracy": candidate.accuracy, "rows_sha256": candidate.rows},
    }
    study = runs.parent_id()
    if study:
        record["study"] = study
    if not decision.passed:
        registry.refuse(name, stage.stage, version.version, record=record)
        raise GateRefused(f"{decision} The stage remains as it was.")

    replaced = _clause_on_replaced(name, history, stage.stage, version, candidate)
    registry.promote(name, stage, version.version, record=record, expected=_judged_versions(history, stage, made_from))
    return f"{stage.stage} is version {version.version} of {name}{replaced}. {' '.join(decision.reasons)}"


def _check_chat(candidate: Evaluated) -> None:
    """Raise BadInput if the candidate rendered chats otherwise than its stored model does."""
    stored_chat = models.params(candidate.model).get(models.CHAT, "{}")
    if candidate.chat != stored_chat:
        evaluated = f"Run {candidate.run_id} rendered chats with chat.template_kwargs {candidate.chat}"
        raise BadInput(
            f"{evaluated}, but {candidate.model} is stored to render them with {stored_chat}: evaluate it with the "
            "latter, or train and quantize with the former."
        )


def _judged_versions(history: History, stage: Stage, made_from: versions.Version | None) -> dict[str, int | None]:
    """Return the stages that the decision looked at, and the version that held each: `registry.promote` checks them."""
    compared = [name for name in (stage.stage, stage.gain_over, stage.loss_to) if name]
    held = {name: history.state.at.get(name) for name in compared}
    if stage.made_from and made_from:
        held[stage.made_from] = made_from.version
    return held


def _clause_on_replaced(
    name: str, history: History, stage: str, version: versions.Version, candidate: Evaluated
) -> str:
    """Return a clause on the version that held a stage until now; empty if there is none."""
    replaced_number = history.state.at.get(stage)
    if replaced_number in (None, version.version):
        return ""
    remark = ""
    with contextlib.suppress(QrlError):  # an evaluation that is gone or was changed says nothing
        replaced = registry.resolve(name, replaced_number, history)
        replaced_questions = _evaluation(replaced, stage).questions
        if replaced_questions and candidate.questions and replaced_questions != candidate.questions:
            remark = ", evaluated on other questions"
    return f", instead of version {replaced_number}{remark}, to which --rollback returns"


def _recomputed(cell: Evaluated, stage: Stage) -> Evaluated:
    """Return a cell with accuracy, n and health computed again from its rows, which were sealed when it ended.

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
    accuracy, broken = scores.recomputed(cells.rows([cell.run_id]), cell.limits)
    return replace(cell, accuracy=accuracy.estimate, stderr=accuracy.stderr, n=accuracy.n, broken=tuple(broken))


def _decide(
    recipe: Recipe,
    history: History,
    stage: Stage,
    candidate: Evaluated,
    version: versions.Version,
    made_from: versions.Version | Ancestor,
) -> gate.Decision:
    """Collect what the stage's gate compares, and let it decide.

    `made_from` is what the candidate must be made from: the version at `stage.made_from`, or for the first stage the
    base model itself.
    """
    # The digest of the files in the store now, not the version's tag: those are what would be served.
    version_digest = checkpoint.digest(versions.folder(version))
    evidence = gate.Evidence(version_digest, origin_digest=made_from.digest, min_n=recipe.promote.min_n)
    if isinstance(made_from, Ancestor):
        return gate.decide(stage, candidate, evidence)

    max_growth = recipe.promote.max_length_growth
    compared_stages = {stage.gain_over, stage.loss_to}
    if max_growth is not None:
        compared_stages.add(stage.made_from)
    evaluations = {
        name: _evaluation(registry.resolve(history.name, name, history), name)
        for name in sorted(filter(None, compared_stages))
    }
    stage_tasks = {name: cell.task for name, cell in evaluations.items() if cell.task and candidate.task}
    evidence = replace(evidence, parent_digest=_required_parent(candidate, made_from), tasks=stage_tasks)
    if any(task != candidate.task for task in stage_tasks.values()):
        return gate.decide(stage, candidate, evidence)  # nothing can be subtracted; the gate names the tasks

    if stage.gain_over:
        least = recipe.promote.min_gain if stage.min_gain is None else stage.min_gain
        gain = _gain_over(stage.gain_over, candidate, evaluations[stage.gain_over], least)
        evidence = replace(evidence, gain=gain)
    if stage.loss_to:
        limit = recipe.promote.max_loss if stage.max_loss is None else stage.max_loss
        loss = _loss_to(stage.loss_to, candidate, evaluations[stage.loss_to], limit)
        evidence = replace(evidence, loss=loss)
    if stage.made_from and max_growth is not None:
        change = _paired(candidate, evaluations[stage.made_from]).length_change
        evidence = replace(evidence, length_growth=gate.LengthGrowth(change, max_growth))
    min_gain_kept = recipe.promote.min_gain_kept if stage.min_gain_kept is None else stage.min_gain_kept
    is_cell_of_stage = f"{candidate.variant}:{candidate.scheme}" == stage.cell  # any other cell is refused anyway
    if min_gain_kept is not None and stage.can_keep_a_gain and is_cell_of_stage:
        evidence = replace(evidence, gain_kept=_gain_kept(candidate, min_gain_kept))
    return gate.decide(stage, candidate, evidence)


def _gain_over(stage: str, candidate: Evaluated, reference: Evaluated, least: float) -> gate.Gain:
    """Return the candidate's gain over the cell at a stage, and the least that it must be above."""
    return gate.Gain(stage, _paired(candidate, reference).accuracy_difference, least)


def _loss_to(stage: str, candidate: Evaluated, reference: Evaluated, limit: float) -> gate.Loss:
    """Return the candidate's difference to the cell at a stage, and the loss that is allowed."""
    label = f"{stage} at full precision" if reference.scheme == names.FULL else stage
    return gate.Loss(stage, label, _paired(candidate, reference).accuracy_difference, limit)


def _gain_kept(candidate: Evaluated, least: float) -> gate.GainKept:
    """Return the share of the gain that a quantized candidate keeps, and the cells that are missing to compute it.

    The share needs four cells that answered the same questions: the base and the trained variant, at full precision and
    under the candidate's scheme. Evaluations of the weights that the candidate was made from count, those of its own
    `evaluate` step first: a study that reuses cells has them in several.
    """
    line_digests = [ancestor.digest for ancestor in lineage.line(candidate.model)]
    base_digest = line_digests[-1] if line_digests else ""

    def is_trained(cell: Evaluated) -> bool:
        return cell.digest in line_digests

    def is_base(cell: Evaluated) -> bool:
        return base_digest in (cell.digest, cell.parent)

    evaluations = {
        f"{names.BASE}:{names.FULL}": _find_evaluation(candidate, names.BASE, names.FULL, is_base),
        f"{candidate.variant}:{names.FULL}": _find_evaluation(candidate, candidate.variant, names.FULL, is_trained),
        f"{names.BASE}:{candidate.scheme}": _find_evaluation(candidate, names.BASE, candidate.scheme, is_base),
    }
    missing = tuple(name for name, cell in evaluations.items() if cell is None)
    if missing:
        return gate.GainKept(None, least, missing)
    frame = cells.rows([candidate.run_id, *(cell.run_id for cell in evaluations.values() if cell)])
    evidence = compare.from_questions(frame).evidence
    return gate.GainKept(share_of_gain(evidence, candidate.variant, candidate.scheme).kept, least)


def _find_evaluation(
    candidate: Evaluated, variant: str, scheme: str, has_right_weights: Callable[[Evaluated], bool]
) -> Evaluated | None:
    """Return another cell's evaluation on the candidate's questions, of the same `evaluate` step if it has one."""
    required = (candidate.task, candidate.questions)
    evaluations = [
        cell
        for cell in cells.find_sealed(variant, scheme)
        if (cell.task, cell.questions) == required and has_right_weights(cell)
    ]
    for cell in evaluations:
        if cell.step == candidate.step:
            return cell
    return evaluations[0] if evaluations else None


def _check_signature(decision: gate.Decision, version: versions.Version, keys: SigningKeys) -> gate.Decision:
    """Return a decision with one more check: a version that passed is signed now, or was before."""
    if not (decision.passed and keys.public_key):
        return decision
    label = str(version)
    folder = versions.folder(version)
    try:
        if keys.signer:
            signing.sign(label, version.uri, folder, keys.signer, keys.public_key)
        signing.verify(label, version.uri, folder, keys.public_key)
    except GateRefused as error:
        return replace(decision, passed=False, reasons=(str(error), *decision.reasons))
    reasons = (*decision.reasons, "Its signature verifies.")
    return replace(decision, reasons=reasons, facts=decision.facts | {"signer": keys.public_key})


def _evaluation(version: versions.Version, stage: str) -> Evaluated:
    """Return the evaluation with which a version earned a stage.

    Raises:
        BadInput: none is recorded.
        GateRefused: its rows have no record any more, or another than when it was promoted.
    """
    decision = version.gate(stage)
    if decision is None or not decision.run:
        raise BadInput(f"No evaluation is recorded for {version}: promote it again first.")
    cell = cells.read(decision.run)
    if not cell.rows or decision.bounds.get("rows_sha256", cell.rows) != cell.rows:
        raise GateRefused(
            f"Stage {stage} rests on the rows of run {decision.run}, whose record is not the one that its gate saw: "
            f"evaluate {version} again, and promote it first."
        )
    return cell


def _required_parent(candidate: Evaluated, made_from: versions.Version) -> str:
    """Return the digest of the model that a candidate was made from, as its gate compares it with an earlier stage.

    It is the candidate's parent. Quantized weights of another training than the earlier stage's have one model between
    the two, their own in full precision: its parent counts.
    """
    if candidate.digest == made_from.digest and candidate.scheme != made_from.scheme:
        return made_from.digest  # the same weights with another key-value cache
    if candidate.parent == made_from.digest or candidate.scheme == names.FULL or candidate.variant == made_from.variant:
        return candidate.parent
    line = lineage.line(candidate.model)
    if len(line) < 3:
        return candidate.parent
    _, _in_full_precision, trained_from, *_ = line
    return trained_from.digest


class _Paired(NamedTuple):
    """Two cells' answers to the same questions, paired by question."""

    accuracy_difference: stats.Estimate  # candidate − reference
    length_change: stats.Estimate | None  # growth of tokens per answer, relative; None if lengths are unknown


def _paired(candidate: Evaluated, reference: Evaluated) -> _Paired:
    """Compare a candidate with a reference, question by question.

    Raises:
        BadInput: the cells have different questions, or answers of different engines.
    """
    frames = [cells.rows([cell.run_id]) for cell in (candidate, reference)]
    check_compatible(pd.concat(frames, ignore_index=True))
    candidate_means, reference_means = [_means_by_question(frame) for frame in frames]

    correct = candidate_means[["correct"]].join(reference_means["correct"].rename("reference"), how="outer")
    if correct.isna().any(axis=None):
        raise BadInput(
            f"The cells {candidate.variant}:{candidate.scheme} and {reference.variant}:{reference.scheme} have "
            "different questions, so they cannot be compared: evaluate both with the same task, data, seed and "
            "evaluate.n, and promote both, as in --stage base,grpo --cell RUN,RUN."
        )
    difference = stats.contrast(correct.to_numpy(float).T, (1, -1))

    tokens = candidate_means[["n_tokens"]].join(reference_means["n_tokens"].rename("reference"))
    return _Paired(difference, _length_change(tokens.to_numpy(float).T))


def _means_by_question(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a cell's mean `correct` and `n_tokens` per question: over samples, if there are several."""
    return rows.reindex(columns=["question", "correct", "n_tokens"]).groupby("question").mean()


def _length_change(tokens: np.ndarray) -> stats.Estimate | None:
    """Return the relative change of tokens per answer, (2, questions): candidate, reference; None if unknown."""
    candidate_tokens, reference_tokens = tokens
    is_known = (tokens.min(axis=1) >= 0).all()  # a length that was not recorded is NaN or negative
    if is_known and reference_tokens.any():
        return stats.relative_change(candidate_tokens, reference_tokens)
    return None
