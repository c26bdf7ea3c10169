"""Evaluate a cell, one variant under one scheme: every held-out question, a row per answer."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qrl import checkpoint, names, tasks
from qrl.engine import device as devices
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.formats import kind, plain
from qrl.recipe import Recipe
from qrl.tasks import prompt, thinking
from qrl.tasks.question import leaked
from qrl.workspace import workspace

if TYPE_CHECKING:
    import pandas as pd

    from qrl.engine import vllm


# What an engine imports when it starts: processes that are forked after this share it.
_ENGINE_MODULES = ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker")


@dataclass(frozen=True)
class Cell:
    """The checkpoint to evaluate, and its labels in the table."""

    variant: str
    scheme: str
    path: Path


@dataclass(frozen=True)
class Answers:
    """A cell's answers, a row per question or per sample of one, and how fast they were generated."""

    # variant, scheme, dtype, question, correct, correct_flexible, parsed, answer, completion, answer_start, leaked,
    # n_tokens, finish_reason, fault, reached, question_text; subject and level if the questions have them; sample if
    # there are several; reference_logprob with `evaluate.perplexity`
    frame: pd.DataFrame
    tokens_per_s: float  # generated tokens over the wall time of decoding, batches padded
    dtype: str  # of activations
    receipt: dict[str, Any]  # engine, version and settings that generated them


class Engines(AbstractContextManager):
    """The vLLM engine of the last cell, kept for a next one that differs from it in nothing but its weights.

    An engine takes 20 s or more to start on a GPU, and a second to replace its weights. Leave the `with` block to
    stop it.
    """

    def __init__(self) -> None:
        self._engine: vllm.Vllm | None = None
        self._built_for: tuple = ()

    @contextmanager
    def open(self, path: Path, device: str, dtype: str, **settings: Any) -> Iterator[vllm.Vllm]:
        """Yield an engine with a checkpoint's weights; arguments as for `Vllm`. It is stopped if its user fails."""
        from qrl.engine import vllm

        built_for = (device, dtype, settings)
        can_reload = self._engine is not None and self._built_for == built_for
        if not (can_reload and self._engine.reload(path)):
            self.close()
            self._engine = vllm.Vllm(path, device, dtype, **settings)
            self._built_for = built_for
        try:
            yield self._engine
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine, if there is one."""
        engine = self._engine
        self._engine = None  # first: an engine that fails to close is not asked again
        if engine is not None:
            engine.close()


def answer_questions(
    cell: Cell,
    questions: Sequence[tasks.Question],
    recipe: Recipe,
    device: str,
    *,
    render: Callable = prompt.render,
    progress: Callable[[int], object] = lambda n: None,
    engines: Engines | None = None,
) -> Answers:
    """Generate a cell's answer to every question, greedily or several times, and grade it.

    Args:
        cell: the checkpoint to evaluate.
        questions: N held-out questions.
        recipe: its task, prompt template, seed and `evaluate` section, which says how many samples, S, a question gets.
        device: "cpu" or "cuda".
        render: (tokenizer, question text, template) → prompt ids; the one renderer, unless a test breaks it on purpose.
        progress: called with the number of answers that each batch finished.
        engines: keeps vLLM's engine for a next cell; default: it is stopped.

    Returns:
        N × S rows in the order of `questions`, the samples of a question together, and the decoding speed.
    """
    settings = recipe.evaluate
    samples = settings.samples
    tokens = hf.tokenizer(cell.path)
    tags = prompt.thinking_tags(tokens, prompt.of_recipe(recipe))
    inputs = read_inputs(cell.path, tokens, questions, recipe, render=render)
    check_lengths(cell.path, questions, inputs.prompts)

    # A row per sample: each question and its prompt are repeated, the samples of a question together.
    prompts = _repeated(inputs.prompts, samples)
    repeated_questions = _repeated(questions, samples)
    references = inputs.references

    # The caller's engines stay open for its next cell; without any, this cell's is stopped.
    engines_context = nullcontext(engines) if engines else Engines()
    with engines_context as open_engines, _opened(cell, recipe, device, inputs.window, open_engines) as engine:
        engine.generate(prompts[: settings.batch_size], max_new_tokens=2)  # warm-up: libraries initialize themselves
        start = time.perf_counter()
        completions = engine.generate(
            prompts,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature if samples > 1 else 0.0,
            seed=recipe.seed,
            progress=progress,
        )
        seconds = time.perf_counter() - start  # decoding alone, without loading
        scores = []
        if references:
            reference_prompts = [inputs.prompts[index] for index in references]
            scores = engine.log_likelihoods(reference_prompts, list(references.values()))

    labels = {"variant": cell.variant, "scheme": cell.scheme, "dtype": engine.dtype}
    frame = graded_frame(labels, repeated_questions, completions, recipe.task, tokens, tags)
    if references:
        score_of = dict(zip(references, scores, strict=True))
        frame[names.REFERENCE_LOGPROB] = [score_of.get(row // samples) for row in range(len(frame))]
    if samples > 1:
        frame["sample"] = [row % samples for row in range(len(frame))]
    receipt = engine.receipt | {"completions": _digest(completions)}
    generated = sum(completion.n_tokens for completion in completions)
    return Answers(frame, generated / seconds, engine.dtype, receipt)


@dataclass(frozen=True)
class Inputs:
    """What an engine reads for N questions."""

    prompts: list[list[int]]  # N, as token ids
    references: dict[
        int, list[int]
    ]  # with `evaluate.perplexity`: question → its worked solution, which follows its prompt
    window: int  # tokens of the longest prompt with its answer, or with its solution


def read_inputs(
    path: Path, tokens: Any, questions: Sequence[tasks.Question], recipe: Recipe, *, render: Callable = prompt.render
) -> Inputs:
    """Return what an engine reads for N questions; arguments as for `answer_questions`."""
    template = prompt.of_recipe(recipe)
    prompts = _rendered(path, tokens, questions, template, render)
    references: dict[int, list[int]] = {}
    if recipe.evaluate.perplexity:
        references = _references(questions, prompts, tokens, path, prompt.thinking_tags(tokens, template))
    window = max(map(len, prompts)) + recipe.evaluate.max_new_tokens
    for index, ids in references.items():
        window = max(window, len(prompts[index]) + len(ids) + 1)
    return Inputs(prompts, references, window)


def _repeated(items: Sequence[Any], times: int) -> list[Any]:
    """Return each item several times, the copies together."""
    result = []
    for item in items:
        result += [item] * times
    return result


def _digest(completions: Sequence[hf.Completion]) -> str:
    """Return the sha256 over completions and how they ended; it is equal if a run repeats exactly."""
    total = sha256()
    for completion in completions:
        total.update(f"{completion.raw}\0{completion.finish_reason}\0".encode())
    return total.hexdigest()


_last_prompts: dict[tuple, list[list[int]]] = {}  # the prompts of the last cell, by what they depend on


def _rendered(path: Path, tokens: Any, questions: Sequence, template: Any, render: Callable) -> list[list[int]]:
    """Return N prompts; the next cell in the process reuses them if its tokenizer, questions and template are the same.

    A template is rendered in another process: two seconds for 4,000 questions, which a small model on a GPU answers in
    ten.
    """
    files = [(name, sha256((path / name).read_bytes()).hexdigest()) for name in checkpoint.text_files(path)]
    config = checkpoint.config(path)  # transformers chooses a tokenizer's class by it
    tokenizer_class = tuple(str(config.get(key)) for key in ("model_type", "tokenizer_class", "transformers_version"))
    texts = tuple(question.question for question in questions)
    key = (tuple(files), tokenizer_class, prompt.template_hash(template), texts, render)
    if key not in _last_prompts:
        _last_prompts.clear()
        _last_prompts[key] = [render(tokens, text, template) for text in texts]
    return _last_prompts[key]


def graded_frame(
    labels: dict,
    questions: Sequence,
    completions: Sequence,
    task: str,
    tokens: Any,
    tags: thinking.Tags = thinking.TAGS,
) -> pd.DataFrame:
    """Return a row per answer: its labels, and the verdict on it.

    Args:
        labels: of every row, before the other columns.
        questions: N, one per completion.
        completions: N answers of an engine.
        task: which grader judges them.
        tokens: the tokenizer; its special tokens are leaks in an answer.
        tags: the model's tags around its thinking.
    """
    import pandas as pd

    markers = [token for token in tokens.all_special_tokens if token]
    completions = [
        replace(completion, text=tags.text(completion.text, completion.raw, markers)) for completion in completions
    ]
    texts = [completion.text for completion in completions]
    answers = [question.answer for question in questions]
    verdicts = tasks.grade_many(task, texts, answers, tags=tags)
    rows = []
    for question, completion, verdict in zip(questions, completions, verdicts, strict=True):
        rows.append(labels | _row(task, markers, question, completion, verdict, tags))
    return pd.DataFrame(rows)


def check_lengths(path: Path, questions: Sequence, prompts: Sequence) -> None:
    """Raise BadInput if a prompt fills all of the model's positions: it would answer beyond what it was trained for."""
    positions = checkpoint.positions(path)
    for question, ids in zip(questions, prompts, strict=True):
        if positions and len(ids) >= positions:
            raise BadInput(
                f"Question {question.id} ('{question.question[:40]}…') is a prompt of {len(ids):,} tokens, "
                f"but the model was made for {positions:,}: remove it from the held-out questions."
            )


def _references(
    questions: Sequence[tasks.Question],
    prompts: Sequence[Sequence[int]],
    tokens: Any,
    path: Path,
    tags: thinking.Tags = thinking.TAGS,
) -> dict[int, list[int]]:
    """Return index of a question → token ids of its worked solution and the end of the turn, which follow its prompt.

    A question is left out if its solution is no more than the answer, or too long for the model's positions.
    """
    positions = checkpoint.positions(path) or float("inf")
    references = {}
    for index, (question, prompt_ids) in enumerate(zip(questions, prompts, strict=True)):
        bare_answers = ("", question.answer, f"#### {question.answer}", f"\\boxed{{{question.answer}}}")
        if question.solution.strip() in bare_answers:
            continue
        ids = prompt.solution_ids(tokens, question.solution, tags)
        if len(prompt_ids) + len(ids) < positions:
            references[index] = ids
    return references


@dataclass(frozen=True)
class _LoadedEngine:
    """What an evaluation needs of an engine with a checkpoint's weights."""

    generate: Callable  # prompts → completions
    log_likelihoods: Callable  # prompts, token ids that follow them → nats a token
    dtype: str  # of activations
    receipt: dict[str, Any]  # engine, version and settings


@contextmanager
def _opened(cell: Cell, recipe: Recipe, device: str, window: int, engines: Engines) -> Iterator[_LoadedEngine]:
    """Yield the engine of the recipe with a cell's weights.

    Args:
        window: tokens of the longest prompt with its answer.
        engines: keeps vLLM's engine.
    """
    if recipe.evaluate.engine == hf.NAME:
        yield _transformers_engine(cell.path, recipe, device)
        return
    settings = recipe.evaluate
    options = {
        "max_tokens": window,
        "sequences": settings.batch_size,
        "memory": settings.gpu_memory_utilization,
        "cache_gib": settings.kv_cache_gib,
        "gpus": settings.tensor_parallel,
        "deterministic": settings.deterministic,
        "seed": recipe.seed,
        "compiled": settings.compiles,
        "in_process": multiprocessing.parent_process() is not None,  # a lane: one start is saved
        "kv_fp8": cell.scheme.endswith(names.KV_FP8),
    }
    with (
        _loadable(cell.path, recipe, device) as folder,
        engines.open(folder, device, settings.dtype, **options) as engine,
    ):
        receipt = engine.receipt()
        if folder != cell.path:
            receipt = receipt | {"unpacked": True}
        yield _LoadedEngine(engine.generate, engine.log_likelihoods, engine.dtype, receipt)


def _transformers_engine(path: Path, recipe: Recipe, device: str) -> _LoadedEngine:
    """Load a checkpoint with transformers."""
    import transformers

    settings = recipe.evaluate
    model, tokens = hf.load(path, device, devices.compute_dtype(settings.dtype, device))
    receipt = {"engine": f"{hf.NAME} {transformers.__version__}", "attention": model.config._attn_implementation}
    simulated = hf.describe_departure(path, device)
    if simulated:
        receipt["simulated"] = simulated
    receipt["batch_size"] = settings.batch_size
    return _LoadedEngine(
        generate=partial(hf.generate, model, tokens, batch_size=settings.batch_size),
        log_likelihoods=partial(hf.log_likelihoods, model, batch_size=settings.batch_size),
        dtype=str(model.dtype).removeprefix("torch."),
        receipt=receipt,
    )


@contextmanager
def _loadable(path: Path, recipe: Recipe, device: str) -> Iterator[Path]:
    """Yield the folder that vLLM loads: the checkpoint's own, or a copy with the weights unpacked."""
    if not _is_unpacked(path, recipe):
        yield path
        return
    dtype = str(devices.compute_dtype(recipe.evaluate.dtype, device)).removeprefix("torch.")
    with workspace("unpacked", shared=True) as work:
        yield plain.write(path, work / "plain", dtype)


def _is_unpacked(path: Path, recipe: Recipe) -> bool:
    """Return whether vLLM gets the checkpoint's values instead of its codes."""
    quantization = checkpoint.config(path).get("quantization_config")
    return bool(recipe.evaluate.unpacked and quantization and kind.of_weights_alone(quantization))


def can_fork_engines() -> bool:
    """Return whether forked processes can run vLLM: it is imported here, and this process has not used the GPU."""
    try:
        for module in _ENGINE_MODULES:
            importlib.import_module(module)
    except ImportError:  # `Vllm` says what to do
        return False
    import torch

    return not torch.cuda.is_initialized()


def engine_sort_key(path: Path, scheme: str, recipe: Recipe) -> tuple[bool, bool]:
    """Return a sort key that groups the cells which one engine can answer: (FP8 cache?, packed weights?)."""
    packed = "quantization_config" in checkpoint.config(path) and not _is_unpacked(path, recipe)
    return scheme.endswith(names.KV_FP8), packed


def _row(
    task: str,
    markers: list[str],
    question: tasks.Question,
    completion: hf.Completion,
    verdict: tasks.Verdict,
    tags: thinking.Tags,
) -> dict:
    reached = False if verdict.strict else tasks.has_stated_answer(task, completion.text, question, tags)
    row = {
        "question": question.id,
        "correct": int(verdict.strict),
        "correct_flexible": int(verdict.flexible),
        "parsed": verdict.parsed,
        "answer": question.answer,
        "completion": completion.text,
        names.ANSWER_START: thinking.length(completion.text, tags),
        "leaked": int(leaked(question.question, completion.text, completion.raw, markers, tags)),
        "n_tokens": completion.n_tokens,
        "finish_reason": completion.finish_reason,
        "fault": verdict.fault,
        "reached": None if reached is None else int(reached),
        names.QUESTION_TEXT: question.question,
    }
    # Tables have a column of subjects or levels only if the questions have them.
    if question.subject is not None:
        row["subject"] = question.subject
    if question.level is not None:
        row["level"] = question.level
    return row
