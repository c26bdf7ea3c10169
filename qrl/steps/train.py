"""Train with GRPO, and merge an adapter: a full-precision model out of each."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from qrl import checkpoint, figures, names, process, source, tiny
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.recipe import Recipe
from qrl.steps import inputs, outcome, record
from qrl.tasks import contamination, prompt
from qrl.tiny import corpus
from qrl.tracking import addresses, contents, keys, reuse, runs, store
from qrl.train import distill, grpo
from qrl.train import merge as merging
from qrl.train.monitor.watchers import Alarm
from qrl.train.rollout import trainer
from qrl.workspace import WORK, workspace

PROMPTS_TO_CHECK = 8  # training questions that a merge is tried on
CONTAMINATION = "contamination"  # table of example pairs


def train(recipe: Recipe) -> None:
    """GRPO from the recipe's model, or distillation into it; logs the trained model, its health live, its curves and completions.

    Under `torchrun` or `accelerate launch` every process trains, and the first alone logs and writes.
    """
    base = source.locate(recipe.model)
    found = checkpoint.check(base)
    device = devices.choose(recipe.device)
    questions = inputs.questions(recipe, "train", recipe.train.questions)
    heldout = inputs.all_heldout(recipe)
    probed = inputs.probe(recipe, questions, heldout) if recipe.watch.probe_every else []
    teacher = checkpoint.check(addresses.folder(recipe.train.teacher)) if recipe.train.teacher else None
    trainer.check(recipe.rollout, device, recipe.train)
    if teacher:
        distill.check(found, teacher, recipe.train, len(questions), recipe.watch)
    else:
        grpo.check(found, recipe.train, len(questions), device, recipe.watch, recipe.rollout)
        trainer.check_installed(recipe.rollout)
    prompt.template_hash(recipe.prompt)  # an unknown template is refused before anything starts
    world = process.world_size()
    key = keys.trained(recipe, found.digest, device, teacher=teacher.digest if teacher else None, processes=world)
    given = {"task": recipe.task, "template": recipe.prompt, "seed": recipe.seed, "device": device}
    given |= {"rollout": recipe.rollout, "watch": recipe.watch, "probed": probed}
    if process.rank():
        work = (WORK / f"train-{key[:16]}").resolve()
        grpo.run(base, questions, recipe.train, **given, work=work / "trainer", out=work / "model")
        return
    store.prepare()
    tags = {names.TAG_CACHE_KEY: key, names.TAG_PARENT_DIGEST: found.digest, **_tags(recipe)}
    params = {
        "device": device,
        "processes": world,
        "base_stored_in": recipe.train.storage,
        "computed_in": recipe.train.compute,
    }
    with (
        workspace(f"train-{key[:16]}", keep_on_error=True) as work,
        runs.step(
            "train", recipe, sections=("train", "rollout", "watch"), params=params, tags=tags, system_metrics=True
        ),
    ):
        _log_questions(recipe, questions, "train")
        if probed:
            _log_questions(recipe, probed, "probe")
        _check_contamination(recipe, base, questions, heldout)
        shutil.rmtree(work / "model", ignore_errors=True)
        places = {"work": work / "trainer", "out": work / "model", "log": contents.live_log()}
        if teacher:
            how = {"template": recipe.prompt, "seed": recipe.seed, "device": device}
            trained = distill.run(base, teacher.path, questions, recipe.train, **how, **places)
        else:
            trained = grpo.run(base, questions, recipe.train, **given, **places, warn=_warn)
        if trained.resumed_from:
            click.echo(f"Went on from the checkpoint of step {trained.resumed_from}.", err=True)
        _log_training(trained, work)
        _record(recipe, trained.path, found.digest, [names.HISTORY, names.FIGURES], adapter=trained.adapter)


def check_rollouts(recipe: Recipe) -> None:
    """Refuses what the recipe's rollout engine cannot do on this machine."""
    trainer.check(recipe.rollout, devices.choose(recipe.device), recipe.train)


def _warn(alarm: Alarm) -> None:
    """A watcher's sentence, in the run's tags and on the terminal."""
    contents.tag(names.watch_tag(alarm.watcher), f"Step {alarm.step}: {alarm.sentence}")
    click.echo(f"\nqrl: warning at step {alarm.step}: {alarm.sentence}", err=True)


def merge(recipe: Recipe, adapter: str) -> None:
    """Folds an adapter into the recipe's model and logs the merged model with what the merge lost."""
    base, folder = source.locate(recipe.model), addresses.folder(adapter)
    found = checkpoint.check(base)
    merging.check_adapter(folder)
    questions = inputs.questions(recipe, "train", PROMPTS_TO_CHECK)
    store.prepare()
    device = devices.choose(recipe.device)
    key = keys.merged(recipe, found.digest, adapter, device)
    tags = {names.TAG_CACHE_KEY: key, names.TAG_PARENT_DIGEST: found.digest, **_tags(recipe)}
    with (
        workspace(f"merge-{key[:16]}") as work,
        runs.step("merge", recipe, sections=("merge",), params={"adapter": adapter}, tags=tags),
    ):
        tokens = hf.tokenizer(base)
        prompts = [prompt.render(tokens, question.question, recipe.prompt) for question in questions]
        limit, into = recipe.merge.max_logit_diff, recipe.merge.into
        merged = merging.run(base, folder, work / "model", prompts, max_logit_diff=limit, into=into, device=device)
        contents.log_params(
            {
                "merged_into": "the base in full precision"
                if merged.into == "full"
                else f"the base in {merged.into}, unpacked"
            }
        )
        contents.log_scores(
            {
                "merge/max_logit_diff": merged.max_logit_diff,
                "merge/residual": merged.merge_residual,
                "merge/base_shift": merged.base_shift,
            }
        )
        _record(recipe, merged.path, found.digest, [])


def _tags(recipe: Recipe) -> dict[str, str]:
    return {names.TAG_VARIANT: recipe.train.variant, names.TAG_SCHEME: names.FULL, names.TAG_TASK: recipe.task}


def _log_questions(recipe: Recipe, questions: list, context: str) -> None:
    contents.log_dataset(
        f"{recipe.task}-{context}",
        digest=inputs.digest(questions),
        context=context,
        n=len(questions),
        source=inputs.source_of(recipe),
    )


def _check_contamination(recipe: Recipe, base: Path, questions: list, heldout: list) -> None:
    """Logs what held-out questions share with the training ones, and with the base's own where they are known; may refuse.

    Here, before training, bad data costs no GPU time. All held-out questions are compared, not only `evaluate.n` of them, so
    what a reused training was checked against does not depend on how many are asked; those that a generator makes are kept
    apart by construction. Cells come to `evaluate` by address, without the questions that they were trained on.
    """
    import pandas as pd

    against = {"contamination/": ("the training questions", questions)}
    if base == tiny.PATH:
        against["contamination/base_"] = ("the questions that qrl-tiny was made from", corpus.sample())
    found = {prefix: contamination.overlap(asked, heldout) for prefix, (_, asked) in against.items()}
    for prefix, overlap in found.items():
        contents.log_scores(overlap.metrics(prefix))
    if pairs := [pair for overlap in found.values() for pair in overlap.pairs]:
        contents.log_table(pd.DataFrame(pairs), CONTAMINATION)
    for prefix, overlap in found.items():
        contamination.check(overlap, recipe.task, recipe.train.max_ngram_share, of=against[prefix][0])


def _log_training(trained: grpo.Trained, work: Path) -> None:
    artifacts = work / "artifacts"
    (artifacts / names.FIGURES).mkdir(parents=True, exist_ok=True)
    measure = "reward" if "reward" in trained.history else "loss"  # a distillation has no reward
    figures.training(trained.history, artifacts / names.FIGURES / "training.png", measure, trained.probes)
    trained.history.to_parquet(artifacts / names.HISTORY)
    shutil.copy(work / "trainer" / grpo.ARGUMENTS, artifacts / grpo.ARGUMENTS)
    contents.log_folder(artifacts)
    contents.log_table(trained.completions, "completions")
    contents.log_scores({"train/seconds": trained.seconds, "train/resumed_from": trained.resumed_from})
    if alarm := trained.stopped:
        contents.tag(names.TAG_STOPPED, f"{alarm.watcher}, step {alarm.step}")
        contents.log_scores({"train/stopped_at": alarm.step})
        click.echo(f"Stopped at step {alarm.step}, as watch.stop asks; the weights so far are kept.", err=True)


def _record(recipe: Recipe, path: Path, parent: str, artifacts: list[str], *, adapter: bool = False) -> None:
    """Keeps the outcome where later steps find it: a model, or an adapter that `merge` still has to fold in; and what a report reads."""
    if adapter:
        contents.log_folder(path, "adapter")
        reuse.record_outputs(artifacts=["adapter", *artifacts], values={"parent": parent})
        outcome.adapter(f"runs:/{runs.active_id()}/adapter")
        return
    uri, digest = record.own(recipe, path, recipe.train.variant, names.FULL, parent=parent)
    reuse.record_outputs(models={"model": uri}, artifacts=artifacts, values={"digest": digest, "parent": parent})
    outcome.model(uri, recipe.train.variant, names.FULL)
