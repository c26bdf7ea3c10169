"""Train a small model from scratch, in lines of progress; a killed training resumes from its last saved state."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl.tiny.corpus import Corpus
from qrl.workspace import write_atomically

if TYPE_CHECKING:
    import torch

LINE_S = 10  # seconds between lines of progress


@dataclass(frozen=True)
class Budget:
    """How long and how fast to train; the defaults are qrl-tiny's."""

    steps: int = 1000  # optimizer steps
    batch: int = 512  # texts in one step; each text is used once
    learning_rate: float = 2e-3  # AdamW's peak, reached after 5 % of the steps; `peak_rate` fits it to a width
    weight_decay: float = 0.1  # AdamW's, for matrices


def peak_rate(hidden: int) -> float:
    """Return a peak learning rate for a width: 2e-3 up to 350 channels, and inversely with the width above.

    Source: Adam's best rate for hidden matrices falls as 1 / width (Yang et al., arXiv 2203.03466). The factor fits two
    models of 1,152 channels after 800 steps: 6e-4 gave 0.69 right, 2e-3 gave 0.17.
    """
    return min(2e-3, 0.7 / hidden)


@dataclass
class Progress:
    """How far a training has come."""

    step: int = 0
    tokens: int = 0  # trained on, prompts included
    seconds: float = 0.0
    loss: float | None = None  # of the last reported step, in nats a token


def train(
    model, tokens, corpus: Corpus, budget: Budget, folder: Path, positions: int, *,
    workers: int, save_every: int, micro_batch: int = 0,
) -> Progress:  # fmt: skip
    """Train for one pass over the corpus: AdamW, linear warm-up, cosine to zero, bf16 autocast; loss on every token.

    The state is saved every `save_every` steps and at the end. A resumed training sees the same texts in the same
    steps; on a CPU with the same number of threads, its weights are equal to the bit.

    Args:
        model: causal LM with fp32 weights on the device to train on, trained in place.
        tokens: its tokenizer, which is saved in `folder`/tokenizer.
        folder: holds the state, `state.pt`, which a killed training left behind.
        positions: longest text, in tokens.
        workers: processes that make the texts; 0 makes them here.
        save_every: steps from state to state.
        micro_batch: texts computed at once, which bounds the memory; 0: a step's texts together.
    """
    import torch

    state = folder / "state.pt"
    optimizer, schedule = _optimizer(model, budget)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    progress = _resumed(state, parts, model.device)
    first = progress.step * budget.batch
    last = budget.steps * budget.batch
    ids = corpus.token_ids(folder / "tokenizer", first, last, positions, workers)
    report = _Report(progress, budget.steps)

    model.train()
    while progress.step < budget.steps:
        batch = [torch.tensor(text) for text in itertools.islice(ids, budget.batch)]
        optimizer.zero_grad()
        loss = _backward(model, batch, micro_batch or len(batch), tokens.pad_token_id)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

        progress.step += 1
        progress.tokens += sum(map(len, batch))
        is_last = progress.step == budget.steps
        report.step(loss, is_last)
        if progress.step % save_every == 0 or is_last:
            with write_atomically(state) as path:
                saved = {name: part.state_dict() for name, part in parts.items()}
                torch.save(saved | {"progress": vars(progress)}, path)
    return progress


def _optimizer(model, budget: Budget) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW, with weight decay for matrices alone, and the schedule of its learning rate."""
    import torch

    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": budget.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    is_on_gpu = model.device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=budget.learning_rate, betas=(0.9, 0.95), fused=is_on_gpu)
    # OneCycleLR divides by zero if the warm-up ends with the first or the last step.
    warmup = min(max(0.05, 2 / budget.steps), 0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, budget.learning_rate, budget.steps, pct_start=warmup, cycle_momentum=False
    )
    return optimizer, schedule


def _resumed(state: Path, parts: dict[str, Any], device: torch.device) -> Progress:
    """Load a saved state into a training's parts, if there is one; return how far it had come."""
    import torch

    if not state.is_file():
        return Progress()
    saved = torch.load(state, map_location=device, weights_only=True)
    progress = Progress(**saved["progress"])
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    print(f"Resumed after step {progress.step:,}", flush=True)
    return progress


class _Report:
    """Lines of progress, one every `LINE_S`; it also keeps the time and the loss of the progress."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._steps = steps
        self._first_step = progress.step
        self._seconds_before = progress.seconds  # of the trainings that this one resumes
        self._start = time.monotonic()
        self._line_at: float | None = None  # when the last line was printed
        self._line_tokens = progress.tokens  # how many tokens were trained on by then

    def step(self, loss: torch.Tensor, is_last: bool) -> None:
        """Take the time after a step, and print a line if one is due."""
        progress = self._progress
        now = time.monotonic()
        if self._line_at is None or now - self._line_at > LINE_S or is_last:
            progress.loss = loss.item()  # waits for the device, hence not at every step
            now = time.monotonic()
            seconds = now - (self._start if self._line_at is None else self._line_at)
            tokens_per_s = (progress.tokens - self._line_tokens) / seconds
            seconds_per_step = (now - self._start) / max(progress.step - self._first_step, 1)
            remaining = seconds_per_step * (self._steps - progress.step)
            print(
                f"step {progress.step:,} of {self._steps:,}: loss {progress.loss:.4f}, {tokens_per_s:,.0f} tokens/s, "
                f"about {remaining:.0f} s left",
                flush=True,
            )
            self._line_at = now
            self._line_tokens = progress.tokens
        progress.seconds = self._seconds_before + now - self._start


def _backward(model, texts: list[torch.Tensor], size: int, pad: int):
    """Add a step's gradients, in parts of some texts, and return its loss: the mean over all tokens, in nats.

    Args:
        texts: token ids of each, on a CPU. The texts of a part have similar lengths, so that little of it is padding;
            the longest come first, so that later parts fit into the memory of the first.
        size: texts in one part.
        pad: the padding token, which no text holds.
    """
    import torch

    loss = torch.zeros((), device=model.device)
    predictions = sum(map(len, texts)) - len(texts)  # a text's first token is predicted from nothing
    if size < len(texts):
        texts = sorted(texts, key=len, reverse=True)
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    padded = [torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=pad) for part in parts]
    padded = [rows.to(model.device) for rows in padded]  # all before the first is computed, which a copy would wait for
    for part, rows in zip(parts, padded, strict=True):
        with torch.autocast(model.device.type, torch.bfloat16):
            logits = model(rows).logits
        predicted = logits[:, :-1].flatten(0, 1).float()
        expected = rows[:, 1:].flatten()
        part_mean = torch.nn.functional.cross_entropy(predicted, expected, ignore_index=pad)
        # Each part has the weight of its tokens, so that the gradients are those of the whole step.
        part_loss = part_mean * ((sum(map(len, part)) - len(part)) / predictions)
        part_loss.backward()
        loss += part_loss.detach()
    return loss
