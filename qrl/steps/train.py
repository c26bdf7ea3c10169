"""Train with GRPO, by distillation or on worked solutions, and merge an adapter: each logs a full-precision model."""

import dataclasses
import random
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import click
import pandas as pd

from qrl import checkpoint, figures, names, process, tasks, tiny
from qrl.checkpoint import head
from qrl.engine import device as devices
from qrl.engine import hf, memory
from qrl.errors import BadInput, Objections
from qrl.formats import groups
from qrl.formats.kept import Kept
from qrl.recipe import Recipe, rules
from qrl.steps import endings, outcome, record
from qrl.tasks import contamination, prompt, question_sets, rows
from qrl.tiny import corpus
from qrl.tracking import addresses, contents, keys, reuse, runs, store
from qrl.train import Job, Machine, Trained, arguments, distill, footprint, parallel, rollout, trainers
from qrl.train import machine as machines
from qrl.train import merge as merging
from qrl.train.job import Alarm
from qrl.workspace import WORK, check_space, workspace

PROMPTS_TO_CHECK = 8  # that a merged model answers beside the adapter-on model
ARITHMETIC_KL = 1e-9  # nats per token: two float32 computations of one model differ by as much
LOST = 0.5  # share of the update, as KL to the trained model, above which a merge warns
_LOST_ADVICE = (
    "set merge.store_dtype = fp32, train longer or at a higher rate, so that the update outgrows the rounding of the "
    "base's dtype, or leave merge.into at auto."
)
RANDOM_TOKENS = 64  # in a prompt, where no question is at hand


def train(recipe: Recipe) -> None:
    """Train the recipe's model as its `train` section says; log the model, live metrics, curves and completions.

    Of several processes every one trains, and only the first logs and writes: those of `train.parallel`, which it
    starts, or those of `torchrun` or `accelerate launch`.
    """
    rules.check(recipe, rules.OF_TRAINING)
    machine = Machine(devices.choose(recipe.device))
    if recipe.train.trainer == "verl":  # Ray starts the others
        _train_one(recipe, machine, others=0)
        return
    with parallel.group(recipe.train, machine.device) as others:
        _train_one(recipe, machine, others)


def _train_one(recipe: Recipe, machine: Machine, others: int) -> None:
    """Train as this process; the first one starts the `others`, and logs and writes."""
    trainer = trainers.TRAINERS[trainers.name(recipe.train)]
    training = _prepared(recipe, machine)
    job = training.job
    trainer.check(job, machine)
    if process.rank():
        trainer.join(job)
        return

    check_space(WORK, footprint.written(recipe.train, training.base), "Training, checkpoints to resume from included,")
    store.prepare()
    tags = _tags(recipe, training.key, training.base.digest)
    with (
        workspace(training.folder.name, keep_on_error=True),
        runs.step(
            "train",
            recipe,
            sections=("train", "rollout", "watch"),
            params=_params(recipe, machine, training),
            tags=tags,
            system_metrics=True,
        ),
    ):
        _log_questions(recipe, training)
        _check_contamination(recipe, training.base.path, job.questions, training.heldout)
        endings.tell([training.base.path])
        shutil.rmtree(job.out, ignore_errors=True)
        if training.processes == 1:
            _say_unused(recipe, devices.gpus(machine.device))
        for name, sentence in _startup_warnings(training).items():
            _warn(Alarm(name, 0, sentence))
        live_metrics = training.folder / names.LIVE_METRICS
        click.echo(f"      live metrics: {live_metrics}, later an artifact of the run", err=True)
        job = dataclasses.replace(job, log=contents.live_log(live_metrics), warn=_warn)
        with parallel.others(others, recipe.dump()):
            trained = _train_within_memory(trainer, job)
        if trained.resumed_from:
            click.echo(f"Resumed from the checkpoint of step {trained.resumed_from}.", err=True)
        _log_training(trained, training.folder)
        artifacts = [names.HISTORY, names.FIGURES]
        _record(recipe, trained.path, training.base.digest, artifacts, adapter=trained.adapter)


@dataclasses.dataclass(frozen=True)
class _Training:
    """A recipe's training, with its files located and its questions read."""

    job: Job
    base: checkpoint.Checkpoint
    teacher: checkpoint.Checkpoint | None
    heldout: Sequence[tasks.Question]
    processes: int
    key: str  # of the cache
    folder: Path  # of all that it writes before it is logged


def _prepared(recipe: Recipe, machine: Machine) -> _Training:
    """Locate the models of a training and read its questions; raise BadInput where one is missing or damaged."""
    base = checkpoint.check(addresses.folder(recipe.model))
    question_sets.check_chat(recipe, base.path)
    teacher = checkpoint.check(addresses.folder(recipe.train.teacher)) if recipe.train.teacher else None
    questions = question_sets.load_training(recipe)
    heldout = question_sets.load_all_heldout(recipe)
    probed = question_sets.load_probe(recipe, questions, heldout) if recipe.watch.probe_every else ()

    processes = parallel.processes(recipe.train, machine.device)
    group_size = groups.of(base.path, recipe.quantize.group_size)
    key = keys.trained(
        recipe,
        base.digest,
        machine.device,
        teacher=teacher.digest if teacher else None,
        processes=processes,
        group_size=group_size,
    )
    folder = (WORK / f"train-{key[:16]}").resolve()
    job = Job(
        base=base.path,
        teacher=teacher.path if teacher else None,
        questions=questions,
        probe_questions=probed,
        settings=recipe.train,
        rollout=recipe.rollout,
        watch=recipe.watch,
        task=recipe.task,
        template=prompt.of_recipe(recipe),
        seed=recipe.seed,
        device=machine.device,
        group_size=group_size,
        work=folder / "trainer",
        out=folder / "model",
    )
    return _Training(job, base, teacher, heldout, processes, key, folder)


def _params(recipe: Recipe, machine: Machine, training: _Training) -> dict[str, object]:
    """Return what the run logs beside the recipe: what decided the training without being one of its fields."""
    params = {
        "device": machine.device,
        "processes": training.processes,
        "base_stored_in": recipe.train.storage,
        "computed_in": recipe.train.compute,
    }
    if recipe.train.has_groups:
        params["qat_group_size"] = training.job.group_size
    return params


def _log_questions(recipe: Recipe, training: _Training) -> None:
    for context, questions in {"train": training.job.questions, "probe": training.job.probe_questions}.items():
        if questions:
            contents.log_dataset(
                f"{tasks.label(recipe.task)}-{context}",
                context=context,
                digest=question_sets.digest(questions),
                n=len(questions),
                source=question_sets.describe_source(recipe),
            )


def _startup_warnings(training: _Training) -> dict[str, str]:
    """Return what is known of a training before its first step, as sentences by the name of their warning."""
    job = training.job
    if training.teacher:
        return distill.startup_warnings(training.base, training.teacher, job.settings)
    return rollout.startup_warnings(job.rollout, job.settings)


def _say_unused(recipe: Recipe, gpus: int) -> None:
    """Say that one GPU of several trains, unless a server is perhaps on the others."""
    if gpus > 1 and "server" not in (recipe.rollout.mode, recipe.train.teacher_placement):
        use = "fsdp2" if recipe.train.trainer == "verl" else "ddp"
        click.echo(f"      Of {gpus} GPUs only the first trains: train.parallel = {use} would use all.", err=True)


def _train_within_memory(trainer: trainers.Trainer, job: Job) -> Trained:
    """Train; if memory runs out, resume with half the micro-batch, which changes no step but how its sum is taken."""
    # Other processes would not know of it, and what an engine holds is not freed.
    trains_alone = process.world_size() == 1 and job.rollout.engine == hf.NAME
    if not trains_alone:
        return trainer.run(job)

    def run(micro_batch: int) -> Trained:
        settings = job.settings.model_copy(update={"micro_batch": micro_batch})
        return trainer.run(dataclasses.replace(job, settings=settings))

    def say(sentence: str) -> None:
        contents.tag(f"{names.TAG_WATCH}memory", sentence)
        click.echo(f"\nqrl: warning: {sentence}", err=True)

    completions = job.settings.prompts_per_step * job.settings.generations
    micro_batch = min(job.settings.micro_batch, completions)
    return memory.halved(run, micro_batch, "train.micro_batch", divisor_of=completions, say=say)


def check(recipe: Recipe) -> None:
    """Check that this machine can sample and train as the recipe says, before an environment is built for it."""
    objections = Objections()
    objections.keep(rules.check, recipe, rules.OF_TRAINING)
    machine = Machine(devices.choose(recipe.device))
    objections.keep(machines.check, recipe.train, recipe.rollout, machine)
    objections.insist()


def _warn(alarm: Alarm) -> None:
    """Write a watcher's sentence into the run's tags and to the terminal."""
    contents.tag(f"{names.TAG_WATCH}{alarm.watcher}", f"Step {alarm.step}: {alarm.sentence}")
    click.echo(f"\nqrl: warning at step {alarm.step}: {alarm.sentence}", err=True)


def merge(recipe: Recipe, adapter: str) -> None:
    """Fold an adapter into the recipe's model, and log the merged model with what the merge lost."""
    base, folder = checkpoint.check(addresses.folder(recipe.model)), addresses.folder(adapter)
    merging.check(base, folder, recipe.merge.into)
    check_space(WORK, footprint.stored(base, recipe.merge.store_dtype), "The merged model")
    prompts, compared_on = _prompts_to_check(recipe, base.path)
    store.prepare()
    device = devices.choose(recipe.device)
    key = keys.merged(recipe, base.digest, adapter, device)
    tags, limit = _tags(recipe, key, base.digest), recipe.merge.max_kl
    with (
        workspace(f"merge-{key[:16]}") as work,
        runs.step("merge", recipe, sections=("merge",), params={"adapter": adapter}, tags=tags),
    ):
        out, into = work / "model", recipe.merge.into
        how = {"max_kl": limit, "into": into, "store_dtype": recipe.merge.store_dtype, "device": device}
        merged = merging.run(base.path, folder, out, prompts, **how)
        stored = "in full precision" if merged.into == "full" else f"in {merged.into}, dequantized"
        contents.log_params({"merged_into": f"the base {stored}", "compared_on": compared_on})
        moved = f"of {merged.update_kl:.2g} from it to its base"
        click.echo(f"      KL to the trained model {merged.kl:.2g}, {moved}, nats per token on {compared_on}", err=True)
        if merged.changes and merged.kl > max(LOST * merged.update_kl, ARITHMETIC_KL):
            lost = f"KL {merged.kl:.2g} to the trained model, of {merged.update_kl:.2g} from it to its base"
            sentence = f"Merging lost most of what training changed ({lost}, nats per token): {_LOST_ADVICE}"
            click.secho(f"qrl: warning: {sentence}", fg="yellow", err=True)
            contents.tag(f"{names.TAG_WATCH}merge", sentence)
        if merged.untied:
            click.echo(
                "      The adapter changes the head or the embedding alone: they are stored apart, untied.", err=True
            )
        _tell_kept(merged.kept, "merge")
        moved = {"merge/kl": merged.kl, "merge/update_kl": merged.update_kl}
        moved |= {"merge/max_logit_diff": merged.max_logit_diff, "merge/residual": merged.merge_residual}
        contents.log_scores(moved | {"merge/base_shift": merged.base_shift})
        _record(recipe, merged.path, base.digest, [])


def _prompts_to_check(recipe: Recipe, base: Path) -> tuple[list[list[int]], str]:
    """Return prompts that merged and adapter-on model answer, and what they are; the hub is never requested.

    They are questions of the task where it is generated, in the recipe's data, or in the hub's cache, else random
    token ids.
    """
    tokens = hf.tokenizer(base)
    try:
        with nullcontext() if recipe.data or recipe.task == "arithmetic" else rows.from_cache():
            questions = question_sets.load(recipe, "train", PROMPTS_TO_CHECK)
    except BadInput:
        if recipe.data or recipe.task not in tasks.TASKS:
            raise
        draw = random.Random(recipe.seed).randrange
        embedded = head.row_count(checkpoint.config(base), checkpoint.entries(base))
        size = min(len(tokens), embedded or len(tokens))  # a part of either may be unused
        lists = [[draw(size) for _ in range(RANDOM_TOKENS)] for _ in range(PROMPTS_TO_CHECK)]
        return (
            lists,
            f"{len(lists)} lists of random token ids, since no question of {recipe.task} is at hand: give data=FOLDER",
        )
    rendered = [prompt.render(tokens, question.question, prompt.of_recipe(recipe)) for question in questions]
    return rendered, f"{len(rendered)} questions of {recipe.task}"


def _tags(recipe: Recipe, key: str, parent: str) -> dict[str, str]:
    own = {names.TAG_VARIANT: recipe.train.variant, names.TAG_SCHEME: names.FULL}
    own[names.TAG_TASK] = tasks.label(recipe.task)
    return {names.TAG_CACHE_KEY: key, names.TAG_PARENT_DIGEST: parent} | own


def _check_contamination(
    recipe: Recipe, base: Path, questions: Sequence[tasks.Question], heldout: Sequence[tasks.Question]
) -> None:
    """Log the overlap of held-out questions with the training ones, and the base's own where known; may refuse.

    Bad data must cost no GPU time, and `evaluate` does not know the training questions. All held-out questions are
    compared, so that a reused training is checked whatever `evaluate.n` is.
    """
    overlaps = {"the training questions": ("contamination/", contamination.overlap(questions, heldout))}
    if base == tiny.PATH:
        own = contamination.overlap(corpus.sample_questions(), heldout)
        overlaps["the questions that qrl-tiny was made from"] = ("contamination/base_", own)
    for prefix, overlap in overlaps.values():
        contents.log_scores(overlap.metrics(prefix))
    if pairs := [pair for _, overlap in overlaps.values() for pair in overlap.pairs]:
        contents.log_table(pd.DataFrame(pairs), "contamination")
    for of, (_, overlap) in overlaps.items():
        contamination.check_overlap(overlap, recipe.task, recipe.train.max_ngram_share, of=of)


def _log_training(trained: Trained, work: Path) -> None:
    artifacts = work / "artifacts"
    (artifacts / names.FIGURES).mkdir(parents=True, exist_ok=True)
    measure = "reward" if "reward" in trained.history else "loss"  # only GRPO has rewards
    figures.training(trained.history, artifacts / names.FIGURES / "training.png", measure, trained.probes)
    trained.history.to_parquet(artifacts / names.HISTORY)
    shutil.copy(work / "trainer" / arguments.FILE, artifacts / arguments.FILE)
    if (work / names.LIVE_METRICS).is_file():
        shutil.copy(work / names.LIVE_METRICS, artifacts / names.LIVE_METRICS)
    contents.log_folder(artifacts)
    contents.log_table(trained.completions, "completions")
    scores = {"seconds": trained.seconds, "resumed_from": trained.resumed_from}
    contents.log_scores({f"train/{name}": value for name, value in scores.items()})
    _tell_kept(trained.kept, "train")
    if alarm := trained.stopped:
        contents.tag(names.TAG_STOPPED, f"{alarm.watcher}, step {alarm.step}")
        contents.log_scores({"train/stopped_at": alarm.step})
        click.echo(f"Stopped at step {alarm.step} by watch.stop; the weights of that step are kept.", err=True)


def _tell_kept(kept: Kept | None, step: str) -> None:
    """Log and print what the stored weights keep of the update, with a warning where it is less than half."""
    if kept is None:
        return
    contents.log_params({names.STORED_IN: kept.stored_in})
    contents.log_scores({f"{step}/{name}": value for name, value in kept.metrics().items()})
    click.echo(f"      {kept.sentence()}", err=True)
    if warning := kept.warning(f"{step}.store_dtype=fp32"):
        click.secho(f"qrl: warning: {warning}", fg="yellow", err=True)
        contents.tag(f"{names.TAG_WATCH}storage", warning)


def _record(recipe: Recipe, path: Path, parent: str, artifacts: list[str], *, adapter: bool = False) -> None:
    """Record the outcome for later steps: a model, or an adapter that `merge` has yet to fold in."""
    if adapter:
        contents.log_folder(path, "adapter")
        reuse.record_outputs(artifacts=["adapter", *artifacts], values={"parent": parent})
        outcome.print_adapter(f"runs:/{runs.active_id()}/adapter")
        return
    uri, digest = record.log_own(recipe, path, recipe.train.variant, names.FULL, parent=parent)
    reuse.record_outputs(models={"model": uri}, artifacts=artifacts, values={"digest": digest, "parent": parent})
    outcome.print_model(recipe, uri)
