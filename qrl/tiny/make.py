"""Make a small model of any shape, from scratch: `python -m qrl.tiny.make --out DIR`; the defaults make qrl-tiny.

Makes the tokenizer and a model with random weights, trains it on generated word problems, measures its accuracy on
held-out ones, and writes a model card. The folder appears when all of it is done; a killed command, typed again in the
same folder, goes on. With `--steps 0`, the weights stay random: for measuring speed and memory at a real model's shape.
"""

import hashlib
import json
import shutil
import sys
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qrl import process, stats
from qrl.errors import BadInput
from qrl.tasks import arithmetic, grade_many, load, prompt
from qrl.tiny import corpus as texts
from qrl.tiny import tokenizer
from qrl.tiny.corpus import Corpus
from qrl.tiny.shape import LONGEST, SMALLEST_VOCABULARY, TYPES, Shape, new_model
from qrl.tiny.train import Budget, Progress, peak_rate, train
from qrl.workspace import workspace, written_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HELDOUT_SEED = 0
SPARE = 16  # tokens that an answer may have beyond the longest right one
RECORD = "made.json"  # in the model's folder: its settings and what came out
CARD = Path(__file__).with_name("card.md")
THOUGHT = """- In half of the texts, the bare calculations come first, between <think> tags. In the other half,
  that part is empty, as `enable_thinking=False` writes it into the prompt.
"""
COUNT, SHARE = click.IntRange(1), click.FloatRange(0, 1)


def _option(name: str, default, text: str, kind=None, **more):
    return click.option(name, default=default, type=kind, help=text, show_default=default is not None, **more)


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the model.")
@_option("--type", "qwen2", "Architecture.", click.Choice(TYPES))
@_option("--layers", 4, "Decoder layers.", COUNT)
@_option("--hidden", 256, "Width of the hidden states; a multiple of 128 fits every scheme.", COUNT)
@_option("--heads", None, "Query heads; default: hidden / 64.", COUNT)
@_option("--kv-heads", None, "Key and value heads; default: half of the query heads.", COUNT)
@_option("--intermediate", None, "Width of the feed-forward part; default: 2 × hidden.", COUNT)
@_option("--vocab", 512, "Rows of the embedding; prose teaches some 550 tokens.", click.IntRange(SMALLEST_VOCABULARY))
@_option("--positions", 512, "Longest text, in tokens.", click.IntRange(64, LONGEST))
@_option("--untied", False, "Give the output head weights of its own.", is_flag=True)
@_option("--form", "arithmetic", "The task whose form solutions have: #### 12, or LaTeX and \\boxed{12} for math.",
         click.Choice(list(texts.FORMS)))  # fmt: skip
@_option("--thinking", False, "Think between <think> tags unless the template's enable_thinking is false.",
         is_flag=True)  # fmt: skip
@_option("--slip", texts.SLIP, "Share of the steps 'times as many' that are solved wrongly.", SHARE)
@_option("--seed", 0, "Seed of initial weights, corpus and order.")
@_option("--steps", 1000, "Optimizer steps; 0 leaves the weights random.", click.IntRange(0))
@_option("--batch", 512, "Texts in one step; each text is used once.", COUNT)
@_option("--micro-batch", 0, "Texts computed at once; 0: all of a step, or half if memory runs out.", click.IntRange(0))
@_option("--learning-rate", None, "AdamW's peak, after 5 % of the steps; default: 2e-3 or, if less, 0.7 / hidden.",
         click.FloatRange(0, min_open=True))  # fmt: skip
@_option("--weight-decay", 0.1, "AdamW's weight decay, for matrices.", click.FloatRange(0))
@_option("--heldout", 2000, "Held-out questions for each prompt.", click.IntRange(2))
@_option("--device", "auto", "Where to train; auto prefers a GPU.", click.Choice(["auto", "cpu", "cuda"]))
@_option("--workers", 8, "Processes that make the corpus; 0 makes it in this one.", click.IntRange(0))
@_option("--save-every", 100, "Steps after which the state is saved.", COUNT)
def main(out, form, thinking, slip, seed, steps, batch, micro_batch, learning_rate, weight_decay, heldout, device,
         workers, save_every, **shape) -> None:  # fmt: skip
    with process.sentences():
        rate = peak_rate(shape["hidden"]) if learning_rate is None else learning_rate
        corpus, budget = Corpus(seed, form, thinking, slip), Budget(steps, batch, rate, weight_decay)
        limits = {"workers": workers, "save_every": save_every, "micro_batch": micro_batch}
        make(out, Shape(**shape), corpus, budget, heldout, device, **limits)


def make(
    out: Path, shape: Shape, corpus: Corpus, budget: Budget, heldout: int = 2000, device: str = "auto", *,
    workers: int = 8, save_every: int = 100, micro_batch: int = 0,
) -> None:  # fmt: skip
    """Make a model in a new folder, or finish one that a killed process began under the same settings.

    Args:
        heldout: number of held-out questions for each prompt.
        device: "cpu", "cuda", or "auto".
        workers: processes that make the corpus.
        save_every: steps from one saved state to the next.
        micro_batch: texts computed at once; 0: a step's texts together.

    Raises:
        BadInput: the settings are impossible, the folder holds something else, or other settings were begun there.
        QrlError: memory runs out for half of the texts, too.
    """
    import torch

    from qrl.engine import device as devices
    from qrl.engine import memory

    process.hush_transformers()
    shape, place = shape.whole(), devices.choose(device)
    settings = {"shape": asdict(shape), "corpus": asdict(corpus), "budget": asdict(budget), "heldout": heldout}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if (out / RECORD).is_file() and json.loads((out / RECORD).read_text())["settings"] == settings:
            print(f"{out} holds this model already.")
            return
        raise BadInput(f"{out} exists and holds something else: give a new folder.")
    own = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:12]
    with workspace(f"tiny-{own}", keep_on_error=True) as work:
        _same_settings(work, settings)
        tokens = _tokenizer(work / "tokenizer", shape, corpus)

        def trained(texts: int) -> "tuple[PreTrainedModel, Progress]":
            torch.manual_seed(corpus.seed)
            with torch.device("cpu" if budget.steps else place):  # a CPU takes minutes to draw the weights of 8 B
                model = new_model(shape, tokens).to(place)
            print(
                f"{shape.type}, {model.num_parameters():,} parameters, {len(tokens):,} of {shape.vocab:,} tokens used; "
                f"{budget.steps:,} steps of {budget.batch:,} texts on {place}",
                flush=True,
            )
            limits = {"workers": workers, "save_every": save_every, "micro_batch": texts}
            if not budget.steps:
                return model, Progress()
            return model, train(model, tokens, corpus, budget, work, shape.positions, **limits)

        model, progress = memory.halved(trained, micro_batch or budget.batch, "--micro-batch")
        shutil.rmtree(work / "model", ignore_errors=True)  # of a try that was killed after it
        with written_whole(work / "model") as folder:
            shutil.copytree(work / "tokenizer", folder)
            model.to(torch.bfloat16).save_pretrained(folder)
        parameters = model.num_parameters()
        del model
        scores = evaluate(work / "model", shape, corpus, heldout, place) if budget.steps else []
        machine = torch.cuda.get_device_name() if place == "cuda" else "CPU"
        result = {"parameters": parameters, "machine": machine, "torch": torch.__version__, **vars(progress)}
        card = _card(settings, result, scores)
        (work / "model" / RECORD).write_text(
            json.dumps(
                {"settings": settings, "result": result, "scores": [asdict(score) for score in scores]}, indent=1
            )
        )
        (work / "model" / "README.md").write_text(card)
        with written_whole(out) as folder:
            shutil.copytree(work / "model", folder)
        data = "" if corpus.form == "arithmetic" else f" data=DIR, from `python -m qrl.tasks.write --as {corpus.form}`"
        if scores and not any(score.accuracy for score in scores):
            print("It answers no question yet, and a study would refuse it as a base: raise --steps.")
        print(f"{out} is ready: use model={out} task={corpus.form}{data}")


@dataclass(frozen=True)
class Score:
    """A model's greedy answers to held-out questions under one prompt."""

    prompt: str  # template
    thinking: bool | None  # whether it was to think; None if it never does
    n: int
    accuracy: float  # strict
    stderr: float
    low: float  # 95 % interval
    high: float
    ended: float  # share of answers with the end token
    parsed: float  # share of answers in the form
    tokens: float  # mean length of an answer

    @property
    def name(self) -> str:
        """The prompt with the way of thinking."""
        return self.prompt + {None: "", True: ", thinking", False: ", not thinking"}[self.thinking]


def evaluate(folder: Path, shape: Shape, corpus: Corpus, n: int, device: str) -> list[Score]:
    """Return a saved model's scores on n held-out questions, a score per prompt, and per way of thinking."""
    import torch

    from qrl.engine import hf

    model, tokens = hf.load(folder, device, torch.float32)
    questions, scores = load("arithmetic", "heldout", n, HELDOUT_SEED), []
    answers = [question.answer for question in questions]
    worked = [question.solution for question in corpus.questions(400, 0)]
    longest = SPARE + max(map(len, tokens(worked)["input_ids"]))
    for template in sorted(set(texts.FORMS[corpus.form][1])):
        for thinking in (True, False) if corpus.thinking else (None,):
            empty = tokens(texts.NO_THOUGHT)["input_ids"] if thinking is False else []
            prompts = [prompt.render(tokens, question.question, template) + empty for question in questions]
            longest_new = min(longest, shape.positions - max(map(len, prompts)))
            written = hf.generate(model, tokens, prompts, max_new_tokens=longest_new, batch_size=500)
            verdicts = grade_many(corpus.form, [completion.text for completion in written], answers)
            right = stats.accuracy(sum(verdict.strict for verdict in verdicts), n)
            shares = (
                sum(completion.finish_reason == "stop" for completion in written) / n,
                sum(verdict.parsed is not None for verdict in verdicts) / n,
                sum(completion.n_tokens for completion in written) / n,
            )
            bounds = (right.estimate, right.stderr, right.low, right.high)
            scores.append(Score(template, thinking, n, *bounds, *shares))
            print(
                f"prompt {scores[-1].name}: {right.estimate:.3f} right [{right.low:.3f}, {right.high:.3f}], n = {n:,}; "
                f"{shares[1]:.3f} in the form, {shares[0]:.3f} ended, {shares[2]:.1f} tokens an answer",
                flush=True,
            )
    return scores


def _same_settings(work: Path, settings: dict) -> None:
    """Store the settings beside the work in progress; raise BadInput if it was begun under others."""
    file = work / "settings.json"
    if not file.is_file():
        with written_whole(file) as path:
            path.write_text(json.dumps(settings))
    elif (begun := json.loads(file.read_text())) != settings:
        other = [part for part in settings if begun.get(part) != settings[part]]
        begun_before = f"A model with another {' and '.join(other)} was begun for this folder"
        raise BadInput(f"{begun_before}: repeat its options, give a new folder, or delete {work}.")


def _tokenizer(folder: Path, shape: Shape, corpus: Corpus):
    """Return the tokenizer in a folder; make it if there is none, from right solutions of a stream of their own."""
    from transformers import AutoTokenizer

    if folder.is_dir():
        return AutoTokenizer.from_pretrained(folder)
    written, templates = texts.FORMS[corpus.form]
    problems = islice(arithmetic.problems("train", 2**31 - 1), 20_000)
    prose = [f"{problem.question}\n{arithmetic.solve(problem, form=written)[0]}" for problem in problems]
    prose += [prompt.messages("", max(set(templates) - {"plain"}))[0]["content"]] * 3000
    with written_whole(folder) as partial:
        return tokenizer.make(prose, partial, shape.vocab, shape.positions, corpus.thinking)


def _card(settings: dict, result: dict, scores: list[Score]) -> str:
    shape, corpus, budget = settings["shape"], settings["corpus"], settings["budget"]
    shown = [part for i, part in enumerate(sys.argv[1:], 1) if part != "--out" and sys.argv[i - 1] != "--out"]
    rows = "\n".join(
        f"| {score.name} | {score.accuracy:.4f} [{score.low:.4f}, {score.high:.4f}] | {score.ended:.4f} "
        f"| {score.parsed:.4f} | {score.tokens:.1f} |"
        for score in scores
    )
    facts = {
        **shape, **corpus, **result, "n": settings["heldout"], "heldout_seed": HELDOUT_SEED, "rows": rows,
        "command": " ".join(["python -m qrl.tiny.make --out DIR", *shown]), "percent": 100 * corpus["slip"],
        "texts": budget["steps"] * budget["batch"], "thought": THOUGHT if corpus["thinking"] else "",
    }  # fmt: skip
    head, trained = CARD.read_text().split("<!-- trained -->\n")
    return (head + trained if scores else head + "- Its weights are random: it answers nothing.\n").format(**facts)


if __name__ == "__main__":
    process.settle()
    main()
