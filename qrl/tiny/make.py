"""Make a small model of any shape, from scratch: `python -m qrl.tiny.make --out DIR`; the defaults make qrl-tiny.

Makes the tokenizer and a model with random weights, trains it on generated word problems, measures its accuracy on
held-out ones, and writes a model card. The folder appears when all of it is done; a killed command, typed again in the
same folder, resumes. With `--steps 0`, the weights stay random: for measuring speed and memory at a real model's shape.
"""

import hashlib
import itertools
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
from qrl.workspace import workspace, write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HELDOUT_SEED = 0
SPARE = 16  # tokens that an answer may have beyond the longest right one
RECORD = "made.json"  # in the model's folder: its settings and what came out
CARD = Path(__file__).with_name("card.md")
THOUGHT = """- In half of the texts, the bare calculations come first, between <think> tags. In the other half,
  that part is empty, as `enable_thinking=False` writes it into the prompt.
"""
COUNT = click.IntRange(1)
SHARE = click.FloatRange(0, 1)


def _option(name: str, default, text: str, kind=None, is_flag: bool = False):
    shows_default = default is not None
    return click.option(name, default=default, type=kind, help=text, show_default=shows_default, is_flag=is_flag)


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
        if learning_rate is None:
            learning_rate = peak_rate(shape["hidden"])
        corpus = Corpus(seed, form, thinking, slip)
        budget = Budget(steps, batch, learning_rate, weight_decay)
        make(
            out, Shape(**shape), corpus, budget, heldout, device,
            workers=workers, save_every=save_every, micro_batch=micro_batch,
        )  # fmt: skip


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
    shape = shape.whole()
    device = devices.choose(device)
    settings = {"shape": asdict(shape), "corpus": asdict(corpus), "budget": asdict(budget), "heldout": heldout}
    if _is_made(out, settings):
        print(f"{out} holds this model already.")
        return

    # The work in progress is found again by the folder's path, so that a killed command can resume.
    work_name = f"tiny-{hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:12]}"
    with workspace(work_name, keep_on_error=True) as work:
        _check_same_settings(work, settings)
        tokens = _tokenizer(work / "tokenizer", shape, corpus)

        def trained(texts_at_once: int) -> "tuple[PreTrainedModel, Progress]":
            model = _initial_model(shape, corpus, budget, tokens, device)
            if not budget.steps:
                return model, Progress()
            progress = train(
                model, tokens, corpus, budget, work, shape.positions,
                workers=workers, save_every=save_every, micro_batch=texts_at_once,
            )  # fmt: skip
            return model, progress

        model, progress = memory.halved(trained, micro_batch or budget.batch, "--micro-batch")
        shutil.rmtree(work / "model", ignore_errors=True)  # of an attempt that was killed after it
        with write_atomically(work / "model") as folder:
            shutil.copytree(work / "tokenizer", folder)
            model.to(torch.bfloat16).save_pretrained(folder)
        parameters = model.num_parameters()
        del model  # its memory is for the copy that answers

        scores = evaluate(work / "model", shape, corpus, heldout, device) if budget.steps else []
        machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        result = {"parameters": parameters, "machine": machine, "torch": torch.__version__, **vars(progress)}
        record = {"settings": settings, "result": result, "scores": [asdict(score) for score in scores]}
        (work / "model" / RECORD).write_text(json.dumps(record, indent=1))
        (work / "model" / "README.md").write_text(_card(settings, result, scores))
        with write_atomically(out) as folder:
            shutil.copytree(work / "model", folder)

    if scores and not any(score.accuracy for score in scores):
        print("It answers no question yet, and a study would refuse it as a base: raise --steps.")
    data = "" if corpus.form == "arithmetic" else f" data=DIR, from `python -m qrl.tasks.write --as {corpus.form}`"
    print(f"{out} is ready: use model={out} task={corpus.form}{data}")


def _is_made(out: Path, settings: dict) -> bool:
    """Return whether a folder holds a model of these settings; raise BadInput if it holds something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    record = out / RECORD
    if record.is_file() and json.loads(record.read_text())["settings"] == settings:
        return True
    raise BadInput(f"{out} exists and holds something else: give a new folder.")


def _initial_model(shape: Shape, corpus: Corpus, budget: Budget, tokens, device: str) -> "PreTrainedModel":
    """Return a model with random weights on the device, and print what will be done with it."""
    import torch

    torch.manual_seed(corpus.seed)
    # A CPU takes minutes to draw the weights of 8 B, but its draws are the same on every machine.
    with torch.device("cpu" if budget.steps else device):
        model = new_model(shape, tokens).to(device)
    print(
        f"{shape.type}, {model.num_parameters():,} parameters, {len(tokens):,} of {shape.vocab:,} tokens used; "
        f"{budget.steps:,} steps of {budget.batch:,} texts on {device}",
        flush=True,
    )
    return model


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
        if self.thinking is None:
            return self.prompt
        return f"{self.prompt}, thinking" if self.thinking else f"{self.prompt}, not thinking"


def evaluate(folder: Path, shape: Shape, corpus: Corpus, n: int, device: str) -> list[Score]:
    """Return a saved model's scores on n held-out questions, a score per prompt, and per way of thinking."""
    import torch

    from qrl.engine import hf

    model, tokens = hf.load(folder, device, torch.float32)
    questions = load("arithmetic", "heldout", n, HELDOUT_SEED)
    answers = [question.answer for question in questions]
    solutions = [question.solution for question in corpus.questions(400, 0)]
    longest_solution = max(map(len, tokens(solutions)["input_ids"]))
    templates = sorted(set(texts.FORMS[corpus.form][1]))
    ways_of_thinking = (True, False) if corpus.thinking else (None,)

    scores = []
    for template, thinking in itertools.product(templates, ways_of_thinking):
        # Without thinking, the prompt ends with an empty thinking part, as `enable_thinking=False` writes it.
        suffix = tokens(texts.NO_THOUGHT)["input_ids"] if thinking is False else []
        prompts = [prompt.render(tokens, question.question, template) + suffix for question in questions]
        available = shape.positions - max(map(len, prompts))
        completions = hf.generate(
            model, tokens, prompts, max_new_tokens=min(SPARE + longest_solution, available), batch_size=500
        )
        verdicts = grade_many(corpus.form, [completion.text for completion in completions], answers)
        accuracy = stats.accuracy(sum(verdict.strict for verdict in verdicts), n)
        score = Score(
            prompt=template,
            thinking=thinking,
            n=n,
            accuracy=accuracy.estimate,
            stderr=accuracy.stderr,
            low=accuracy.low,
            high=accuracy.high,
            ended=sum(completion.finish_reason == "stop" for completion in completions) / n,
            parsed=sum(verdict.parsed is not None for verdict in verdicts) / n,
            tokens=sum(completion.n_tokens for completion in completions) / n,
        )
        scores.append(score)
        print(
            f"prompt {score.name}: {score.accuracy:.3f} right [{score.low:.3f}, {score.high:.3f}], n = {n:,}; "
            f"{score.parsed:.3f} in the form, {score.ended:.3f} ended, {score.tokens:.1f} tokens an answer",
            flush=True,
        )
    return scores


def _check_same_settings(work: Path, settings: dict) -> None:
    """Store the settings with the work in progress; raise BadInput if it was started under other ones."""
    file = work / "settings.json"
    if not file.is_file():
        with write_atomically(file) as path:
            path.write_text(json.dumps(settings))
        return
    stored = json.loads(file.read_text())
    if stored != settings:
        different = [part for part in settings if stored.get(part) != settings[part]]
        cause = f"A model with another {' and '.join(different)} was begun for this folder"
        raise BadInput(f"{cause}: repeat its options, give a new folder, or delete {work}.")


def _tokenizer(folder: Path, shape: Shape, corpus: Corpus):
    """Return the tokenizer in a folder; make it if there is none, from right solutions of a stream of their own."""
    from transformers import AutoTokenizer

    if folder.is_dir():
        return AutoTokenizer.from_pretrained(folder)
    form, templates = texts.FORMS[corpus.form]
    problems = islice(arithmetic.problems("train", 2**31 - 1), 20_000)
    prose = [f"{problem.question}\n{arithmetic.solve(problem, form=form)[0]}" for problem in problems]
    # The instruction is in every prompt that has one, so its words should be few tokens.
    instruction = max(set(templates) - {"plain"})
    prose += [prompt.messages("", instruction)[0]["content"]] * 3000
    with write_atomically(folder) as partial:
        return tokenizer.make(prose, partial, shape.vocab, shape.positions, corpus.thinking)


def _card(settings: dict, result: dict, scores: list[Score]) -> str:
    corpus = settings["corpus"]
    budget = settings["budget"]
    rows = [
        f"| {score.name} | {score.accuracy:.4f} [{score.low:.4f}, {score.high:.4f}] | {score.ended:.4f} "
        f"| {score.parsed:.4f} | {score.tokens:.1f} |"
        for score in scores
    ]
    facts = {
        **settings["shape"],
        **corpus,
        **result,
        "n": settings["heldout"],
        "heldout_seed": HELDOUT_SEED,
        "rows": "\n".join(rows),
        "command": " ".join(["python -m qrl.tiny.make --out DIR", *_options_without_out(sys.argv[1:])]),
        "percent": 100 * corpus["slip"],
        "texts": budget["steps"] * budget["batch"],
        "thought": THOUGHT if corpus["thinking"] else "",
    }
    head, trained_part = CARD.read_text().split("<!-- trained -->\n")
    if scores:
        return (head + trained_part).format(**facts)
    return (head + "- Its weights are random: it answers nothing.\n").format(**facts)


def _options_without_out(options: list[str]) -> list[str]:
    """Return the options of the command without `--out` and its folder."""
    options_shown = []
    previous = ""
    for option in options:
        if "--out" not in (option, previous):
            options_shown.append(option)
        previous = option
    return options_shown


if __name__ == "__main__":
    process.prepare_process()
    main()
