"""Train a small model from scratch, in lines of progress; a killed training goes on from its last saved state."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qrl.tiny.corpus import Corpus
from qrl.workspace import written_whole

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

    device, state, steps = model.device, folder / "state.pt", budget.steps
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": budget.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=budget.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    warmup = min(max(0.05, 2 / steps), 0.9)  # OneCycleLR divides by zero if it ends with the first or the last step
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, budget.learning_rate, steps, pct_start=warmup, cycle_momentum=False
    )
    progress = Progress()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if state.is_file():
        saved = torch.load(state, map_location=device, weights_only=True)
        progress = Progress(**saved["progress"])
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        del saved  # a second copy of the weights
        print(f"Resumed after step {progress.step:,}", flush=True)
    first, last = progress.step * budget.batch, steps * budget.batch
    ids = corpus.token_ids(folder / "tokenizer", first, last, positions, workers)
    model.train()
    started, spent, reported, since = time.monotonic(), progress.seconds, float("-inf"), progress.tokens
    while progress.step < steps:
        batch = [torch.tensor(text) for text in itertools.islice(ids, budget.batch)]
        optimizer.zero_grad()
        loss = _backward(model, batch, micro_batch or len(batch), tokens.pad_token_id)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.step, progress.tokens = progress.step + 1, progress.tokens + sum(map(len, batch))
        now = time.monotonic()
        if now - reported > LINE_S or progress.step == steps:
            progress.loss = loss.item()  # waits for the device, hence not at every step
            now = time.monotonic()
            speed = (progress.tokens - since) / (now - started if reported < 0 else now - reported)
            left = (now - started) / max(progress.step - first // budget.batch, 1) * (steps - progress.step)
            print(
                f"step {progress.step:,} of {steps:,}: loss {progress.loss:.4f}, {speed:,.0f} tokens/s, "
                f"about {left:.0f} s left",
                flush=True,
            )
            reported, since = now, progress.tokens
        progress.seconds = spent + now - started
        if progress.step % save_every == 0 or progress.step == steps:
            with written_whole(state) as path:
                saved = {name: part.state_dict() for name, part in parts.items()}
                torch.save(saved | {"progress": vars(progress)}, path)
    return progress


def _backward(model, texts: list[torch.Tensor], size: int, pad: int):
    """Add a step's gradients, in parts of some texts, and return its loss: the mean over all tokens, in nats.

    Args:
        texts: token ids of each, on a CPU. Those of a part are of like lengths, so that little of it is padding; the
            longest come first, whose memory the others can use.
        size: texts in one part.
        pad: the padding token, which no text holds.
    """
    import torch

    loss, predictions = torch.zeros((), device=model.device), sum(map(len, texts)) - len(texts)
    if size < len(texts):
        texts = sorted(texts, key=len, reverse=True)
    parts = [texts[place : place + size] for place in range(0, len(texts), size)]
    padded = [torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=pad) for part in parts]
    padded = [rows.to(model.device) for rows in padded]  # all before the first is computed, which a copy would wait for
    for part, rows in zip(parts, padded, strict=True):
        with torch.autocast(model.device.type, torch.bfloat16):
            logits = model(rows).logits
        predicted, expected = logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten()
        own = torch.nn.functional.cross_entropy(predicted, expected, ignore_index=pad)
        own = own * ((sum(map(len, part)) - len(part)) / predictions)
        own.backward()
        loss += own.detach()
    return loss
