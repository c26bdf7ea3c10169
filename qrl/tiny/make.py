"""Train qrl-tiny: `python -m qrl.tiny.make --out DIR`, a minute or two on one GPU.

Makes the tokenizer, the corpus, a Qwen2 model from scratch, its accuracy on held-out questions, and a model card.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
from tqdm import tqdm

from qrl.tasks import grade_many, load, prompt
from qrl.tiny import corpus, tokenizer

HELDOUT, HELDOUT_SEED = 2000, 0
LENGTH = 256  # longest text, in tokens
CARD = Path(__file__).with_name("card.md")


@click.command(help=__doc__.splitlines()[0])
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the model.")
@click.option("--seed", default=0, show_default=True, help="Seed of initial weights, corpus and order.")
@click.option("--steps", default=1000, show_default=True, help="Optimizer steps.")
@click.option("--batch", default=512, show_default=True, help="Texts in one step; each text is used once.")
@click.option("--learning-rate", default=2e-3, show_default=True, help="AdamW's peak, reached after 5 % of the steps.")
@click.option("--weight-decay", default=0.1, show_default=True, help="AdamW's weight decay, for matrices.")
@click.option("--workers", default=8, show_default=True, help="Processes that make the corpus.")
def main(out: Path, seed: int, steps: int, batch: int, learning_rate: float, weight_decay: float, workers: int) -> None:
    import torch

    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = tokenizer.make(_prose(), out)
    ids = _tokenize(tokens, corpus.texts(tokens, steps * batch, seed, workers))
    model = new_model(tokens).to(device)
    started = time.monotonic()
    train(model, ids, tokens.pad_token_id, batch, learning_rate, weight_decay)
    seconds = time.monotonic() - started
    model.to(torch.bfloat16).save_pretrained(out)
    scores = {template: evaluate(out, device, template) for template in prompt.TEMPLATES}
    card = _card(sys.argv[1:], seed, model.num_parameters(), steps * batch, seconds, device, scores)
    (out / "README.md").write_text(card)
    print(card)


def new_model(tokens):
    """Return a Qwen2 model with random weights: 4 layers, hidden 256, every matrix's inputs a multiple of 128."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    special = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    shape = {"vocab_size": len(tokens), "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "bos_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = Qwen2Config(**shape, **heads, max_position_embeddings=512, rope_parameters=rope, **special)
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model


def train(model, ids, pad: int, batch: int, learning_rate: float, weight_decay: float) -> None:
    """Train for one pass over the corpus: AdamW, linear warm-up, cosine to zero, bf16 autocast; loss on every token.

    Args:
        model: causal LM with fp32 weights, trained in place.
        ids: (texts, length) int16 token ids, padded on the right with `pad`.
        batch: texts in one step.
    """
    import torch

    device = model.device
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    n = len(ids) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, n, pct_start=0.05, cycle_momentum=False)
    model.train()
    bar = tqdm(range(n), desc="train", unit="step")
    for step in bar:
        rows = ids[step * batch : (step + 1) * batch].to(device).long()
        rows = rows[:, : int((rows != pad).sum(1).max())]
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(rows).logits
        predicted, expected = logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(predicted, expected, ignore_index=pad)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}")


def evaluate(folder: Path, device: str, template: str) -> dict[str, float]:
    """Return a saved model's greedy accuracy, its binomial stderr, and the rates of end tokens and parsed answers."""
    import torch

    from qrl.engine import hf

    model, tokens = hf.load(folder, device, torch.float32)
    questions = load("arithmetic", "heldout", HELDOUT, HELDOUT_SEED)
    prompts = [prompt.render(tokens, question.question, template) for question in questions]
    with tqdm(total=HELDOUT, desc=f"evaluate {template}", unit="prompt") as bar:
        completions = hf.generate(model, tokens, prompts, max_new_tokens=128, batch_size=500, progress=bar.update)
    texts, answers = [completion.text for completion in completions], [question.answer for question in questions]
    verdicts = grade_many("arithmetic", texts, answers)
    accuracy = sum(verdict.strict for verdict in verdicts) / HELDOUT
    return {
        "accuracy": accuracy,
        "stderr": (accuracy * (1 - accuracy) / HELDOUT) ** 0.5,
        "eos": sum(completion.finish_reason == "stop" for completion in completions) / HELDOUT,
        "parsed": sum(verdict.parsed is not None for verdict in verdicts) / HELDOUT,
    }


def _prose() -> list[str]:
    """Return right solutions, from a stream of their own, for the tokenizer to learn merges from."""
    questions = load("arithmetic", "train", 20_000, seed=2**31 - 1)
    plain = [f"{question.question}\n{question.solution}" for question in questions]
    return plain + [prompt.messages("", "answer-line")[0]["content"]] * 3000


def _tokenize(tokens, texts: Iterator[str]):
    """Return (texts, `LENGTH`) int16 token ids, padded on the right."""
    import torch

    fitted = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    parts = []
    while chunk := list(itertools.islice(texts, corpus.CHUNK)):
        parts.append(tokens(chunk, add_special_tokens=False, **fitted)["input_ids"].to(torch.int16))
    return torch.cat(parts)


def _card(arguments, seed, parameters, texts, seconds, device, scores) -> str:
    import torch

    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    rows = "\n".join(
        f"| {template} | {score['accuracy']:.4f} ± {score['stderr']:.4f} | {score['eos']:.4f} | {score['parsed']:.4f} |"
        for template, score in scores.items()
    )
    shown = [part for i, part in enumerate(arguments) if part != "--out" and arguments[max(i - 1, 0)] != "--out"]
    return CARD.read_text().format(
        command=" ".join(["python -m qrl.tiny.make --out DIR", *shown]), seed=seed, machine=machine, rows=rows,
        parameters=f"{parameters:,}", texts=f"{texts:,}", seconds=round(seconds), torch=torch.__version__,
        slip=round(100 * corpus.SLIP), n=f"{HELDOUT:,}", heldout_seed=HELDOUT_SEED,
    )  # fmt: skip


if __name__ == "__main__":
    main()
