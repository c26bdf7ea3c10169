"""Train with verl in processes of its own: questions and configuration in, metrics and a checkpoint out.

verl runs under this environment's Python, in the folder of the training's work. Its log of metrics is read while it
trains, so that they reach the step's own run by qrl's names. Its checkpoints stay there until the end; a second try
resumes from the newest.
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

from qrl import checkpoint, tasks
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.formats import plain
from qrl.tasks import lengths, prompt
from qrl.train import arguments, grpo, parallel, policy, save
from qrl.train.job import Job, Machine, Trained
from qrl.train.monitor.watchers import Watchers
from qrl.train.verl import child, nodes, translate
from qrl.workspace import written_whole

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
_STEP_S, _GENERATE_S = "timing_s/step", "timing_s/gen"
MAIN = "verl.trainer.main_ppo"
LOG = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"  # read on any node
_LOOK_S = 1.0
_PATIENCE_S = 300.0  # that verl has, after a failure of its engine, for its next step or for ending by itself


def check(job: Job, machine: Machine) -> None:
    """Check that verl can do this training, before any weight is loaded.

    Raises:
        BadInput: the GPUs do not divide a step, the base is not stored in bf16, or as for
            `grpo.check`, memory left aside.
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


def check_installed() -> None:
    """Raise BadInput if verl cannot be imported."""
    if not importlib.util.find_spec(translate.NAME):
        build = "run `mlflow run . -e train … --env-manager uv`, which builds projects/verl"
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
    _ = base.digest  # which an adapter will name, whatever the folder holds by then
    check_installed()
    began = time.perf_counter()
    resumed = newest(job.work)
    log = job.work / f"metrics-{resumed:07}.jsonl"
    made = translate.overrides(job, write_questions(job)) | {LOG: str(log)}
    (job.work / arguments.FILE).write_text(json.dumps(made, indent=1) + "\n")
    watchers = Watchers(job.watch, job.rollout)
    for step, row in _logged(job.work).items():  # of the interrupted training; its warnings were given
        _watch(watchers, step, row)
    with nodes.cluster(job.work) as (address, variables):  # even if no step is left: the other nodes wait for it
        if resumed < job.settings.steps:
            log.unlink(missing_ok=True)  # of a try that reached no checkpoint
            write_configuration(job.work, made | {translate.ADDRESS: address})
            words = [MAIN, "--config-path", str(job.work), "--config-name", "recipe"]
            with _progress(job, resumed) as bar, child.running(words, job.work, **variables) as trainer:
                for step, row in map(_entry, _following(log, trainer, job.work)):
                    metrics = named(row, job)
                    job.log(metrics, step)
                    bar.set_postfix(reward=f"{metrics.get('train/reward', math.nan):.3g}", refresh=False)
                    bar.update(step - bar.n)
                    for alarm in _watch(watchers, step, row):
                        job.log({f"watch/{alarm.watcher}": 1.0}, alarm.step)
                        job.warn(alarm)
    merge(base, job)
    return Trained(
        path=job.out,
        adapter=job.settings.adapter,
        history=history(job),
        probes=pd.DataFrame(columns=["step", "accuracy", "low", "high", "n"]),
        completions=completions(job),
        resumed_from=resumed,
        seconds=time.perf_counter() - began,
        stopped=None,
    )


def write_questions(job: Job) -> int:
    """Write a job's questions as verl reads them, and return the length of the longest prompt in tokens."""
    tokens, rows = hf.tokenizer(job.base), []
    for place, item in enumerate(job.questions):
        rows.append(
            {
                "data_source": tasks.label(job.task),
                "prompt": prompt.messages(item.question, job.template),
                "reward_model": {"style": "rule", "ground_truth": item.answer},
                "extra_info": {"index": place, "question": item.question},
            }
        )
    with written_whole(job.work / translate.QUESTIONS) as file:
        pd.DataFrame(rows).to_parquet(file)
    # All are counted: verl refuses a prompt that is longer than its limit.
    return lengths.longest_prompt(tokens, job.questions, job.template, counted=len(job.questions))


def write_configuration(work: Path, made: Mapping[str, object]) -> None:
    """Write `recipe.yaml`, which hydra lays over verl's own configuration."""
    here = {"searchpath": ["pkg://verl.trainer.config"], "run": {"dir": str(work)}, "output_subdir": None}
    tree = {"defaults": ["ppo_trainer", "_self_"], "hydra": here, **translate.nested(made)}
    (work / "recipe.yaml").write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def newest(work: Path) -> int:
    """Return the step of verl's newest whole checkpoint, which it notes last; 0 without any."""
    try:
        return int((work / translate.CHECKPOINTS / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return 0


def named(row: Mapping[str, float | None], job: Job) -> dict[str, float]:
    """Return verl's metrics of a step by our names, with throughput."""
    made = {ours: float(row[theirs]) for theirs, ours in NAMES.items() if row.get(theirs) is not None}
    total = job.settings.prompts_per_step * job.settings.generations
    for name, theirs in (("train/completions_per_s", _STEP_S), ("rollout/completions_per_s", _GENERATE_S)):
        if row.get(theirs):
            made[name] = total / row[theirs]
    return made


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
        rows += [(int(file.stem), each["input"], each["output"], each["score"]) for each in records]
    return pd.DataFrame(rows, columns=["step", "prompt", "completion", "reward"])


def merge(base: checkpoint.Checkpoint, job: Job) -> None:
    """Write verl's last checkpoint as a folder like any other training's: its weights, and the base's own files."""
    actor = job.work / translate.CHECKPOINTS / f"global_step_{newest(job.work)}" / "actor"
    merged = job.work / "merged"
    shutil.rmtree(merged, ignore_errors=True)  # of a merge that was killed
    words = ["verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", str(actor), "--target_dir", str(merged)]
    with child.running(words, job.work):
        pass
    settings, adapter = job.settings, merged / "lora_adapter"
    with written_whole(job.out) as folder:
        folder.mkdir()
        for file in (adapter if settings.adapter else merged).glob("*.safetensors*"):
            os.link(file, folder / file.name)
        if settings.adapter:
            config = json.loads((adapter / "adapter_config.json").read_text())
            config |= {"r": settings.adapter_rank, "lora_alpha": settings.adapter_alpha}
            config["task_type"] = "CAUSAL_LM"
            (folder / "adapter_config.json").write_text(json.dumps(config))
            save.settle_adapter(folder)
            policy.record(folder, settings, base.digest)
        else:
            shutil.copyfile(base.path / "config.json", folder / "config.json")
        plain.copy_text_files(base.path, folder)


def _progress(job: Job, resumed: int) -> "tqdm":
    """Print where verl writes, since Ray and an engine start before its first step, and return the bar of its steps."""
    print(f"verl writes to {child.output(MAIN, job.work)}", file=sys.stderr, flush=True)
    from tqdm import tqdm

    return tqdm(total=job.settings.steps, initial=resumed, desc="GRPO", unit="step", smoothing=0)


def _following(log: Path, writer: subprocess.Popen, work: Path) -> Iterator[str]:
    """Yield the whole lines of a file that verl's process writes, as they come, until it has ended.

    Raises:
        QrlError: its engine has failed, and neither a step nor its end has followed.
    """
    read, rest, failed = 0, b"", math.inf
    failures = child.engine_failures(child.output(MAIN, work))
    while True:
        ended = writer.poll() is not None
        if log.is_file():
            with log.open("rb") as file:
                file.seek(read)
                part = file.read()
            read += len(part)
            *lines, rest = (rest + part).split(b"\n")
            yield from (line.decode() for line in lines if line)
            failed = math.inf if lines else failed
        if ended:
            return
        if next(failures):
            failed = min(failed, time.monotonic())
        if time.monotonic() - failed > _PATIENCE_S:
            raise QrlError(child.failure(MAIN, "still waits for a vLLM engine that failed", work))
        time.sleep(_LOOK_S)


def _entry(line: str) -> tuple[int, dict[str, float | None]]:
    entry = json.loads(line)
    return entry["step"], entry["data"]


def _logged(work: Path) -> dict[int, dict[str, float | None]]:
    """Return what verl logged of each step; where a step was trained twice, the later try counts."""
    rows: dict[int, dict[str, float | None]] = {}
    for file in sorted(work.glob("metrics-*.jsonl")):
        whole = file.read_text().rpartition("\n")[0]  # a line may have been cut by a kill
        rows |= dict(map(_entry, filter(None, whole.split("\n"))))
    return rows


def _watch(watchers: Watchers, step: int, row: Mapping[str, float | None]) -> list:
    """Return the new alarms; verl's log has what the watcher `rollout` reads, and the reward."""
    seen = {"rollout/kl_k3": row.get("rollout_corr/k3_kl"), "reward": row.get("critic/score/mean")}
    return watchers.see({"step": step} | {name: value for name, value in seen.items() if value is not None})
