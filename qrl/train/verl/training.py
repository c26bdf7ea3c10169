"""Train with verl in processes of its own: questions and configuration in, metrics and a checkpoint out.

`run`, step by step:

1. Write the questions and the configuration into the work folder (`write_questions`, `translate.overrides`).
2. Start Ray's head if several machines train, and verl under this environment's Python (`nodes.cluster`,
   `child.running`). A second try resumes from verl's newest checkpoint.
3. Follow verl's file of metrics while it trains: log them by our names, and show them to the watchers.
4. Have verl's own merger write the last checkpoint as safetensors, and add the base's configuration and tokenizer
   (`merge`).
"""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import yaml

from qrl import checkpoint, process, tasks
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.formats import plain
from qrl.recipe import Train
from qrl.tasks import lengths, prompt
from qrl.train import arguments, grpo, parallel, policy, save
from qrl.train.job import Job, Machine, Trained
from qrl.train.monitor.watchers import Watchers
from qrl.train.verl import child, nodes, translate
from qrl.workspace import write_atomically

if TYPE_CHECKING:
    from tqdm import tqdm

NAMES = {  # verl's name → ours, where both mean the same
    "critic/score/mean": "train/reward",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/learning_rate",
    "actor/pg_clipfrac": "train/clip_ratio",
    "response_length/mean": "train/completion_tokens",
    "response_length/min": "train/completion_tokens_min",
    "response_length/max": "train/completion_tokens_max",
    "actor/perf/max_memory_allocated_gb": "train/peak_memory_gib",
    "timing_s/gen": "rollout/generate_s",
    "rollout_corr/kl": "rollout/kl_k1",
    "rollout_corr/k3_kl": "rollout/kl_k3",
    # Averaged as the loss is, where ours are means over tokens: they keep a name of their own.
    "actor/entropy": "verl/entropy",
    "actor/kl_loss": "verl/kl_loss",
    "actor/pg_loss": "verl/pg_loss",
}
_RATES = {  # our name of a throughput → verl's seconds that it is over
    "train/completions_per_s": "timing_s/step",
    "rollout/completions_per_s": "timing_s/gen",
}
MAIN = "verl.trainer.main_ppo"
BASE = f"{translate.MODEL}.path"
LOG = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"  # read on any node
_POLL_S = 1.0
_PATIENCE_S = 300.0  # for verl's next step, or its end, after a failure of its engine


def check(job: Job, machine: Machine) -> None:
    """Check that verl can do this training, before any weight is loaded.

    Raises:
        BadInput: the GPUs do not divide a step, the base is not stored in bf16, the model marks its thinking by
            special tokens, or as for `grpo.check`, memory left aside.
    """
    base = checkpoint.check(job.base)
    parallel.check(job.settings, machine.device, machine.gpus)
    translate.check_gpus(job.settings, parallel.processes(job.settings, machine.device, machine.gpus))
    grpo.check_job(base, job, machine)
    if base.dtype != "bfloat16":
        raise BadInput(
            f"{base.path} is stored in {base.dtype}, but verl's merger writes bfloat16: convert it, or set "
            "train.trainer = trl."
        )
    translate.check_tags(hf.tokenizer(job.base), job.template)


def check_installed() -> None:
    """Raise BadInput if verl cannot be imported."""
    if not importlib.util.find_spec(translate.NAME):
        build = f"run {process.environment_command('train')}, which builds projects/verl"
        several = "for several nodes, name that environment's Python as `python` in cluster.yaml"
        raise BadInput(f"train.trainer = verl, but verl is not installed in this environment: {build}; {several}.")


def join(job: Job) -> None:
    """Do the part of a process that is not the first: hold a node of Ray's, or nothing.

    Raises:
        BadInput: verl cannot be imported.
        QrlError: as for `nodes.join`.
    """
    check_installed()
    nodes.join(job.work)


def run(job: Job) -> Trained:
    """Train a checkpoint with verl, or resume a training that was killed.

    Args:
        job: one that `check` accepts.

    Raises:
        BadInput: verl cannot be imported.
        QrlError: verl or its engine failed; the sentence has the last error and the path of the whole output.
    """
    base = checkpoint.check(job.base)
    base_digest = base.digest  # read now: an adapter will name it, whatever the folder holds by then
    check_installed()
    start = time.perf_counter()
    resumed_step = newest_step(job.work)
    log = job.work / f"metrics-{resumed_step:07}.jsonl"
    overrides = translate.overrides(job, write_questions(job)) | {LOG: str(log), BASE: str(stage_base(job))}
    (job.work / arguments.FILE).write_text(json.dumps(overrides, indent=1) + "\n")

    watchers = Watchers(job.watch, job.rollout)
    for step, row in _logged(job.work).items():  # of the interrupted training; its warnings were given
        _watch(watchers, step, row)

    with nodes.cluster(job.work) as (address, variables):  # even if no step is left: the other nodes wait for it
        if resumed_step < job.settings.steps:
            log.unlink(missing_ok=True)  # of a try that reached no checkpoint
            write_configuration(job.work, overrides | {translate.ADDRESS: address})
            words = [MAIN, "--config-path", str(job.work), "--config-name", "recipe"]
            with _progress(job, resumed_step) as bar, child.running(words, job.work, **variables) as trainer:
                for step, row in map(_entry, _following(log, trainer, job.work)):
                    metrics = named(row, job)
                    job.log(metrics, step)
                    bar.set_postfix(reward=f"{metrics.get('train/reward', math.nan):.3g}", refresh=False)
                    bar.update(step - bar.n)
                    for alarm in _watch(watchers, step, row):
                        job.log({f"watch/{alarm.watcher}": 1.0}, alarm.step)
                        job.warn(alarm)

    merge(base, base_digest, job)
    return Trained(
        path=job.out,
        adapter=job.settings.adapter,
        history=history(job),
        probes=pd.DataFrame(columns=["step", "accuracy", "low", "high", "n"]),
        completions=completions(job),
        resumed_from=resumed_step,
        seconds=time.perf_counter() - start,
        stopped=None,
    )


def write_questions(job: Job) -> int:
    """Write a job's questions as verl reads them, and return the length of the longest prompt in tokens."""
    rows = []
    for index, question in enumerate(job.questions):
        rows.append(
            {
                "data_source": tasks.label(job.task),
                "prompt": prompt.messages(question.question, job.template),
                "reward_model": {"style": "rule", "ground_truth": question.answer},
                "extra_info": {"index": index, "question": question.question},
            }
        )
    with write_atomically(job.work / translate.QUESTIONS) as file:
        pd.DataFrame(rows).to_parquet(file)
    tokens = hf.tokenizer(job.base)
    # All are counted: verl refuses a prompt that is longer than its limit.
    return lengths.longest_prompt(tokens, job.questions, job.template, counted=len(job.questions))


def stage_base(job: Job) -> Path:
    """Return a folder of the base whose generation settings name all tokens that end an answer: verl reads no others.

    It is the base itself, or links to its files beside settings of their own.
    """
    if hf.names_all_ends(job.base):
        return job.base
    staged = job.work / "base"
    shutil.rmtree(staged, ignore_errors=True)  # of an earlier try
    staged.mkdir(parents=True)
    for file in job.base.resolve().iterdir():
        (staged / file.name).symlink_to(file)
    settings = staged / hf.GENERATION
    if settings.is_symlink():
        settings.unlink()
        shutil.copyfile(job.base / hf.GENERATION, settings)
    hf.name_ends(staged)
    return staged


def write_configuration(work: Path, overrides: Mapping[str, object]) -> None:
    """Write `recipe.yaml`, which hydra merges over verl's own configuration."""
    hydra = {"searchpath": ["pkg://verl.trainer.config"], "run": {"dir": str(work)}, "output_subdir": None}
    tree = {"defaults": ["ppo_trainer", "_self_"], "hydra": hydra, **translate.nested(overrides)}
    (work / "recipe.yaml").write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def newest_step(work: Path) -> int:
    """Return the step of verl's newest whole checkpoint, from the file that verl writes last; 0 without any."""
    try:
        return int((work / translate.CHECKPOINTS / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0


def named(row: Mapping[str, float | None], job: Job) -> dict[str, float]:
    """Return verl's metrics of a step by our names, with throughput."""
    metrics = {ours: float(row[theirs]) for theirs, ours in NAMES.items() if row.get(theirs) is not None}
    completions_per_step = job.settings.prompts_per_step * job.settings.generations
    for name, seconds_name in _RATES.items():
        seconds = row.get(seconds_name)
        if seconds:
            metrics[name] = completions_per_step / seconds
    return metrics


def history(job: Job) -> pd.DataFrame:
    """Return a row per step: step, and the metrics, as other trainings have them."""
    rows = [{"step": step} | named(row, job) for step, row in sorted(_logged(job.work).items())]
    return pd.DataFrame(rows).rename(columns=lambda key: key.removeprefix("train/").replace("/", "_"))


def completions(job: Job) -> pd.DataFrame:
    """Return the first completions of every step: step, prompt, completion, reward."""
    rows = []
    for file in sorted((job.work / translate.ROLLOUTS).glob("*.jsonl"), key=lambda path: int(path.stem)):
        lines = file.read_text(encoding="utf-8").split("\n")[: job.settings.completions_logged]
        records = [json.loads(line) for line in lines if line]
        step = int(file.stem)
        rows += [(step, record["input"], record["output"], record["score"]) for record in records]
    return pd.DataFrame(rows, columns=["step", "prompt", "completion", "reward"])


def merge(base: checkpoint.Checkpoint, base_digest: str, job: Job) -> None:
    """Write verl's last checkpoint as a folder like any other training's: its weights, and the base's own files.

    Args:
        base: the checkpoint that training started from.
        base_digest: its digest at the start, for an adapter to name.
        job: of the training.
    """
    actor = job.work / translate.CHECKPOINTS / f"global_step_{newest_step(job.work)}" / "actor"
    merged = job.work / "merged"
    shutil.rmtree(merged, ignore_errors=True)  # of a merge that was killed
    words = ["verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir", str(merged)]
    with child.running(words, job.work):
        pass
    with write_atomically(job.out) as folder:
        folder.mkdir()
        if job.settings.adapter:
            _write_adapter(merged / "lora_adapter", folder, base_digest, job.settings)
        else:
            _link_weights(merged, folder)
            shutil.copyfile(base.path / "config.json", folder / "config.json")
        plain.copy_text_files(base.path, folder)
        if not job.settings.adapter:
            hf.name_ends(folder)


def _write_adapter(adapter: Path, folder: Path, base_digest: str, settings: Train) -> None:
    """Write an adapter as PEFT saves one: verl's merger leaves rank, alpha and kind of task out of its settings."""
    _link_weights(adapter, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"r": settings.adapter_rank, "lora_alpha": settings.adapter_alpha, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save.settle_adapter(folder)
    policy.record(folder, settings, base_digest)


def _link_weights(source: Path, folder: Path) -> None:
    for file in source.glob("*.safetensors*"):
        os.link(file, folder / file.name)


def _progress(job: Job, resumed_step: int) -> "tqdm":
    """Print where verl writes, since Ray and an engine start before its first step, and return the bar of its steps."""
    print(f"verl writes to {child.output(MAIN, job.work)}", file=sys.stderr, flush=True)
    from tqdm import tqdm

    return tqdm(total=job.settings.steps, initial=resumed_step, desc="GRPO", unit="step", smoothing=0)


def _following(log: Path, writer: subprocess.Popen, work: Path) -> Iterator[str]:
    """Yield the whole lines of a file that verl's process writes, as they come, until it has ended.

    Raises:
        QrlError: its engine has failed, and neither a step nor its end has followed.
    """
    offset = 0  # bytes of the file that were read
    rest = b""  # the beginning of a line that is not yet whole
    failure_time = math.inf  # of the engine, while no step has followed
    failures = child.engine_failures(child.output(MAIN, work))
    while True:
        # Asked before the file is read: what a process wrote before its end is then read for certain.
        has_ended = writer.poll() is not None
        if log.is_file():
            with log.open("rb") as file:
                file.seek(offset)
                part = file.read()
            offset += len(part)
            *lines, rest = (rest + part).split(b"\n")
            yield from (line.decode() for line in lines if line)
            if lines:
                failure_time = math.inf
        if has_ended:
            return
        if next(failures):
            failure_time = min(failure_time, time.monotonic())
        if time.monotonic() - failure_time > _PATIENCE_S:
            raise QrlError(child.failure(MAIN, "still waits for a vLLM engine that failed", work))
        time.sleep(_POLL_S)


def _entry(line: str) -> tuple[int, dict[str, float | None]]:
    entry = json.loads(line)
    return entry["step"], entry["data"]


def _logged(work: Path) -> dict[int, dict[str, float | None]]:
    """Return what verl logged of each step; where a step was trained twice, the later try counts."""
    rows: dict[int, dict[str, float | None]] = {}
    for file in sorted(work.glob("metrics-*.jsonl")):
        whole_lines = file.read_text().rpartition("\n")[0]  # a kill may have cut the last line
        rows |= dict(_entry(line) for line in whole_lines.split("\n") if line)
    return rows


def _watch(watchers: Watchers, step: int, row: Mapping[str, float | None]) -> list:
    """Return the new alarms; verl's log has what the watcher `rollout` reads, and the reward."""
    metrics = {"rollout/kl_k3": row.get("rollout_corr/k3_kl"), "reward": row.get("critic/score/mean")}
    return watchers.see({"step": step} | {name: value for name, value in metrics.items() if value is not None})
