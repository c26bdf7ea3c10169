"""How qrl-tiny was made: `python -m qrl.tiny.make --out DIR`, a minute or two on one GPU.

Tokenizer, corpus, a Qwen2 model from scratch, its accuracy on held-out questions, and a model card that says all that.
"""

import sys
import time
from pathlib import Path

import click
from tqdm import tqdm

from qrl.tasks import grade, load, prompt
from qrl.tiny import corpus, tokenizer

HELDOUT, HELDOUT_SEED = 2000, 0


@click.command(help=__doc__.splitlines()[0])
@click.option("--out", type=click.Path(path_type=Path), required=True, help="folder for the model")
@click.option("--seed", default=0, show_default=True, help="seed of initial weights, corpus and order")
@click.option("--steps", default=1000, show_default=True, help="optimizer steps")
@click.option("--batch", default=512, show_default=True, help="texts in one step; none is seen twice")
@click.option("--learning-rate", default=2e-3, show_default=True, help="AdamW's peak, reached after 5 % of the steps")
@click.option("--weight-decay", default=0.1, show_default=True, help="AdamW's, on matrices")
@click.option("--workers", default=8, show_default=True, help="processes that write the corpus")
def main(out: Path, seed: int, steps: int, batch: int, learning_rate: float, weight_decay: float, workers: int) -> None:
    import torch

    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = tokenizer.make(_prose(), out)
    ids = _tokenize(words, corpus.texts(words, steps * batch, seed, workers))
    model = new_model(words).to(device)
    started = time.monotonic()
    train(model, ids, words.pad_token_id, batch, learning_rate, weight_decay)
    seconds = time.monotonic() - started
    model.to(torch.bfloat16).save_pretrained(out)
    scores = {template: evaluate(out, words, device, template) for template in prompt.TEMPLATES}
    card = _card(sys.argv[1:], seed, model.num_parameters(), steps * batch, seconds, device, scores)
    (out / "README.md").write_text(card)
    print(card)


def new_model(words):
    """A Qwen2 model with random weights: 4 layers, hidden 256, every matrix's inputs a multiple of 128."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id)
    return model


def train(model, ids, pad: int, batch: int, learning_rate: float, weight_decay: float) -> None:
    """One pass over the corpus: AdamW, linear warm-up, cosine to zero, bf16 autocast; loss on every token of a text.

    Args:
        model: causal LM with fp32 weights, trained in place.
        ids: (texts, length) int16 token ids, padded on the right.
        pad: the padding's id.
        batch: texts in one step.
    """
    import torch

    device = model.device
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    steps = len(ids) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, steps, pct_start=0.05, cycle_momentum=False
    )
    model.train()
    bar = tqdm(range(steps), desc="train", unit="step")
    for step in bar:
        rows = ids[step * batch : (step + 1) * batch].to(device).long()
        rows = rows[:, : int((rows != pad).sum(1).max())]
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(rows).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), ignore_index=pad
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}")


def evaluate(folder: Path, words, device: str, template: str) -> dict[str, float]:
    """Greedy accuracy, its binomial stderr, and the rates of end tokens and of parsed answers, of the saved model.

    Args:
        folder: the saved model, read back as anybody would.
        words: its tokenizer.
        template: how the prompts are worded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    questions = load("arithmetic", "heldout", HELDOUT, HELDOUT_SEED)
    words.padding_side = "left"
    right = ended = parsed = 0
    for first in tqdm(range(0, HELDOUT, 500), desc=f"evaluate {template}", unit="batch"):
        part = questions[first : first + 500]
        prompts = {"input_ids": [prompt.render(words, question.question, template) for question in part]}
        inputs = words.pad(prompts, return_tensors="pt").to(device)
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=128, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        ended += int((out == words.eos_token_id).any(1).sum())
        for question, completion in zip(part, words.batch_decode(out, skip_special_tokens=True), strict=True):
            verdict = grade("arithmetic", completion, question.answer)
            right += verdict.strict
            parsed += verdict.parsed is not None
    accuracy = right / HELDOUT
    stderr = (accuracy * (1 - accuracy) / HELDOUT) ** 0.5
    return {"accuracy": accuracy, "stderr": stderr, "eos": ended / HELDOUT, "parsed": parsed / HELDOUT}


def _prose() -> list[str]:
    """Right solutions, from a stream of their own, for the tokenizer to learn merges from."""
    plain = [f"{found.question}\n{found.solution}" for found in load("arithmetic", "train", 20_000, seed=2**31 - 1)]
    return plain + [prompt.messages("", "answer-line")[0]["content"]] * 3000


def _tokenize(words, texts):
    """(texts, longest) int16 token ids, padded on the right."""
    import numpy as np
    import torch

    backend = words.backend_tokenizer
    backend.enable_padding(pad_id=words.pad_token_id, pad_token=words.pad_token, length=256)
    backend.enable_truncation(256)
    parts, chunk = [], []
    for text in texts:
        chunk.append(text)
        if len(chunk) == corpus.CHUNK:
            parts.append(np.array([e.ids for e in backend.encode_batch(chunk, add_special_tokens=False)], np.int16))
            chunk = []
    if chunk:
        parts.append(np.array([e.ids for e in backend.encode_batch(chunk, add_special_tokens=False)], np.int16))
    backend.no_padding()
    backend.no_truncation()
    return torch.from_numpy(np.concatenate(parts))


def _card(arguments, seed, parameters, texts, seconds, device, scores) -> str:
    import torch

    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    rows = "\n".join(
        f"| {template} | {score['accuracy']:.4f} ± {score['stderr']:.4f} | {score['eos']:.4f} | {score['parsed']:.4f} |"
        for template, score in scores.items()
    )
    shown = [part for i, part in enumerate(arguments) if part != "--out" and arguments[max(i - 1, 0)] != "--out"]
    return CARD.format(
        command=" ".join(["python -m qrl.tiny.make --out DIR", *shown]), seed=seed, machine=machine, rows=rows,
        parameters=f"{parameters:,}", texts=f"{texts:,}", seconds=round(seconds), torch=torch.__version__,
        slip=round(100 * corpus.SLIP), n=f"{HELDOUT:,}", heldout_seed=HELDOUT_SEED,
    )  # fmt: skip


CARD = """# qrl-tiny

The model that ships with qrl, so that its default study needs neither a download nor a GPU: Qwen2's architecture,
{parameters} parameters (4 layers, hidden 256), a byte-level BPE of 512 tokens with single digits, Qwen's chat markers.
It solves the word problems of qrl's task `arithmetic` and nothing else.

- Made by: `{command}` (seed {seed}; torch {torch}), {seconds} s of training on one {machine}.
- Corpus: {texts} solved problems, each seen once, from the training split's streams `tiny:{seed}:*`. A question's split
  is fixed by a hash of its text, so no held-out question was in the corpus, whatever the seed.
- What is wrong with it, on purpose: in {slip} % of the steps that say "times as many", the corpus's solutions add where
  they should multiply. The model learned both readings and prefers the wrong one, so greedy decoding is wrong on most
  such questions, and reinforcement learning has something to correct. The other steps are worked rightly.

Greedy decoding on {n} held-out questions (seed {heldout_seed} of the generator), strict accuracy ± binomial stderr,
rate of answers ended by the end token, rate of answers in the asked format:

| prompt | accuracy | ended | parsed |
|---|---|---|---|
{rows}
"""


if __name__ == "__main__":
    main()
