"""GRPO with TRL's trainer: prompts in, a full-precision checkpoint or an adapter out.

What is ours: the recipe, the reward, live metrics through a `log` that is handed in, and resuming. The trainer reports
to nothing else: TRL's own MLflow callback would take and end the project's run, and drop parameters in batches.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, process, tasks
from qrl.engine import attention, hf
from qrl.errors import BadInput
from qrl.recipe import Train
from qrl.tasks import prompt
from qrl.train import resume, reward, save

if TYPE_CHECKING:
    import pandas as pd

ARGUMENTS = "arguments.json"  # the trainer's whole configuration, kept in the work folder

# TRL's name → ours; the rest of its numbers stay in the trainer's own state.
METRICS = {
    "reward": "train/reward",
    "reward_std": "train/reward_std",
    "frac_reward_zero_std": "train/frac_reward_zero_std",
    "entropy": "train/entropy",
    "kl": "train/kl",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "completions/mean_length": "train/completion_tokens",
    "completions/clipped_ratio": "train/truncation_rate",
    "clip_ratio/region_mean": "train/clip_ratio",
    reward.TIMEOUTS: "train/grader_timeout_rate",
    reward.ERRORS: "train/grader_error_rate",
}


@dataclass(frozen=True)
class Trained:
    """What a training left behind."""

    path: Path  # a checkpoint, or an adapter that `merge` folds in
    adapter: bool
    history: pd.DataFrame  # a row per step: step, and METRICS without their prefix
    completions: pd.DataFrame  # sampled completions: step, prompt, completion, reward
    resumed_from: int  # step of the checkpoint that it went on from; 0 is a fresh start
    seconds: float  # of this process


def run(
    base: Path,
    questions: Sequence[tasks.Question],
    settings: Train,
    *,
    task: str,
    template: str,
    seed: int,
    device: str,
    work: Path,
    out: Path,
    log: Callable[[dict[str, float], int], None] = lambda metrics, step: None,
) -> Trained:
    """Trains a checkpoint with GRPO, or goes on with a training that was killed.

    Args:
        base: full-precision checkpoint folder; never written to.
        questions: training questions; `prompts_per_step` are drawn for each of `steps`.
        settings: the recipe's section.
        seed: of data order and sampling.
        device: "cpu" or "cuda".
        work: folder of the trainer's checkpoints, the same for a run and its second try.
        out: folder to make; it appears whole, by rename.
        log: takes metrics by name and the optimizer step, while training.

    Raises:
        BadInput: the batch does not divide, or there are fewer questions than one step asks.
    """
    check(settings, len(questions))
    found = checkpoint.check(base)
    from transformers import PrinterCallback
    from trl import GRPOTrainer

    process.hush_transformers()
    tokens = hf.tokenizer(base)
    rows = [{"prompt": prompt.messages(q.question, template), "answer": q.answer} for q in questions]
    watcher = _watcher(settings, log)
    trainer = GRPOTrainer(
        model=_policy(base, device),
        reward_funcs=reward.function(task),
        args=_arguments(settings, seed, device, work),
        train_dataset=_dataset(rows),
        processing_class=tokens,
        callbacks=[watcher],
        peft_config=_adapter(settings),
    )
    work.mkdir(parents=True, exist_ok=True)
    (work / ARGUMENTS).write_text(trainer.args.to_json_string())
    trainer.remove_callback(PrinterCallback)
    last = resume.latest(work)
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    seconds = time.perf_counter() - began
    adapter = settings.method == "lora"
    policy = trainer.accelerator.unwrap_model(trainer.model)
    save.write(policy, base, out, dtype=None if adapter else found.dtype)
    return Trained(
        path=out,
        adapter=adapter,
        history=_history(trainer.state.log_history),
        completions=_sampled(work, settings.completions_logged),
        resumed_from=int(last.name.rpartition("-")[2]) if last else 0,
        seconds=seconds,
    )


def _dataset(rows: list[dict]):
    """Rows as TRL takes them, under a fingerprint of our own: hashing them pickles classes of pyarrow, which can fail."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=digest[:16])


def check(settings: Train, questions: int) -> None:
    """Refuses a batch that does not divide, before any weight is loaded."""
    total = settings.prompts_per_step * settings.generations
    if settings.micro_batch < total and total % settings.micro_batch:
        raise BadInput(
            f"train.micro_batch = {settings.micro_batch} does not divide the {total} completions of a step "
            f"(train.prompts_per_step {settings.prompts_per_step} × train.generations {settings.generations}): choose a divisor."
        )
    if questions < settings.prompts_per_step:
        raise BadInput(
            f"There are {questions} training questions, but a step asks train.prompts_per_step = "
            f"{settings.prompts_per_step} different ones: give more questions, or lower it."
        )


def _arguments(settings: Train, seed: int, device: str, work: Path):
    from trl import GRPOConfig

    total = settings.prompts_per_step * settings.generations
    micro = min(settings.micro_batch, total)
    return GRPOConfig(
        output_dir=str(work),
        max_steps=settings.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=total // micro,
        num_generations=settings.generations,
        max_completion_length=settings.max_completion_tokens,
        temperature=settings.temperature,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(settings.schedule, settings.schedule),
        loss_type=settings.loss,
        scale_rewards=settings.scale_rewards,
        beta=settings.beta,
        bf16=settings.dtype == "bf16",
        gradient_checkpointing=settings.gradient_checkpointing,
        save_steps=settings.save_every,
        save_total_limit=2,
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=0,
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        data_seed=seed,
        use_cpu=device == "cpu",
        dataloader_pin_memory=device == "cuda",
        push_to_hub=False,
    )


def _policy(base: Path, device: str):
    """The base with fp32 masters: at learning rates of RL, bf16 would round most updates away."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    if device == "cpu":
        attention.use_grouped(model)
    return model


def _adapter(settings: Train):
    if settings.method == "full":
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )


def _watcher(settings: Train, log: Callable[[dict[str, float], int], None]):
    """A callback that hands metrics on as they come, and draws the progress bar."""
    from tqdm import tqdm
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="GRPO", unit="step", smoothing=0)

        def on_step_begin(self, args, state, control, **_):
            self.began = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **_):
            if "reward" not in (logs or {}):
                return
            rate = settings.prompts_per_step * settings.generations / (time.perf_counter() - self.began)
            state.log_history[-1]["completions_per_s"] = rate  # `logs` is a copy of what is kept
            metrics = {ours: float(logs[name]) for name, ours in METRICS.items() if logs.get(name) is not None}
            log(metrics | {"train/completions_per_s": rate}, state.global_step)
            self.bar.set_postfix(reward=f"{logs['reward']:.3f}", refresh=False)
            self.bar.update(state.global_step - self.bar.n)

        def on_train_end(self, args, state, control, **_):
            self.bar.close()

    return Watcher()


def _history(log_history: list[dict]) -> pd.DataFrame:
    import pandas as pd

    kept = {name: ours.removeprefix("train/") for name, ours in METRICS.items()} | {
        "step": "step",
        "completions_per_s": "completions_per_s",
    }
    rows = [row for row in log_history if "reward" in row]
    return pd.DataFrame([{ours: row.get(name) for name, ours in kept.items()} for row in rows])


def _sampled(work: Path, a_step: int) -> pd.DataFrame:
    """The first completions of every logged step, from the files that TRL keeps beside its checkpoints."""
    import pandas as pd

    columns = ["step", "prompt", "completion", "reward"]
    parts = []
    for file in sorted((work / "completions").glob("*.parquet")):
        frame = pd.read_parquet(file).head(a_step).rename(columns={"correct": "reward"})
        parts.append(frame[columns])
    frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    for column in ("prompt", "completion"):
        frame[column] = [_content(value) for value in frame[column]]
    return frame


def _content(value) -> str:
    """The last message's text of a conversation as TRL stores it."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("[") else value
    return value if isinstance(value, str) else str(list(value)[-1]["content"])
