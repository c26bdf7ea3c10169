"""A checkpoint that answers requests through transformers, one after the other.

The model is loaded as evaluation loads it, so that greedy answers are those that were graded. A worker thread
generates. Each step of an answer passes two hooks of transformers: `_Answer.shape` sees the scores of the next token,
and `_Answer.watch` the token that was drawn. `watch` hands over the text that no later token can change.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qrl.engine import device as devices
from qrl.engine import hf
from qrl.serve.requests import Chat, Refusal, Text
from qrl.tasks import sandbox

GREEDY = 1e-5  # temperatures below it are greedy, as in vLLM
TEXT_TOKENS = 16  # OpenAI's default of `max_tokens` at /v1/completions
WINDOW = 2048  # tokens, where a config names no window, as in vLLM


@dataclass(frozen=True)
class Piece:
    """A part of one answer."""

    index: int  # of the answer, 0 to n - 1
    text: str
    logprobs: list[dict]  # of its tokens, if they were requested
    finish: str | None  # with the last piece: "stop" or "length"
    written: int  # tokens of this answer so far


@dataclass(frozen=True)
class _Job:
    """A request on its way to the worker, and where its pieces go."""

    request: Chat | Text
    prompt: list[int]
    max_tokens: int
    hand_over: Callable[[Piece], None]
    cancelled: threading.Event


class Model:
    """A loaded checkpoint that answers one request at a time."""

    def __init__(self, path: Path, device: str, dtype: str, chat: Mapping[str, Any] | None = None) -> None:
        """Args: `chat` holds the variables of the chat template; the others are those of `hf.load`."""
        self.chat = chat or {}
        self.model, self.tokens = hf.load(path, device, devices.compute_dtype(dtype, device))
        self.window = _window(self.model.config.get_text_config())
        self._worker = ThreadPoolExecutor(1)

    def prompt(self, request: Chat | Text) -> list[int]:
        """Return the token ids of a request's prompt; raise Refusal if the model has none for it."""
        if isinstance(request, Text):
            is_text = isinstance(request.prompt, str)
            ids = self.tokens(request.prompt)["input_ids"] if is_text else request.prompt
            if not ids or not all(0 <= token < self.model.config.vocab_size for token in ids):
                raise Refusal("`prompt` is empty or has tokens that the model does not know: give a text.", "prompt")
            return ids

        messages = [{"role": turn.role, "content": _text(turn.content)} for turn in request.messages]
        try:
            text = sandbox.render(self.tokens, messages, self.chat)
        except Exception as error:  # the template is a program: it can raise anything
            raise Refusal(f"The model's chat template refuses these messages ({error}).", "messages") from None
        return self.tokens(text, add_special_tokens=False)["input_ids"]

    def room(self, request: Chat | Text, prompt: list[int]) -> int:
        """Return how many tokens an answer may have; raise Refusal if the window has no room for them."""
        requested = request.max_tokens or getattr(request, "max_completion_tokens", None)
        available = self.window - len(prompt)
        sizes = f"The model's window is {self.window} tokens, and the prompt has {len(prompt)}"
        code = "context_length_exceeded"
        if available < 1:
            raise Refusal(f"{sizes}: shorten it.", "messages" if isinstance(request, Chat) else "prompt", code)
        if requested and requested > available:
            raise Refusal(f"{sizes}: an answer can have {available} at most, not {requested}.", "max_tokens", code)
        if requested:
            return requested
        return available if isinstance(request, Chat) else min(TEXT_TOKENS, available)

    async def write(self, request: Chat | Text, prompt: list[int], max_tokens: int) -> AsyncIterator[Piece]:
        """Yield the pieces of all answers to a request as they are written; a caller that stops cancels the rest."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Piece | None] = asyncio.Queue()
        cancelled = threading.Event()

        def hand_over(piece: Piece) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, piece)

        job = _Job(request, prompt, max_tokens, hand_over, cancelled)
        work = loop.run_in_executor(self._worker, self._generate, job)
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            await work
        finally:
            cancelled.set()

    def _generate(self, job: _Job) -> None:
        """Write all answers to a request; runs on the worker thread."""
        request = job.request
        temperature = 1.0 if request.temperature is None else request.temperature
        options: dict[str, Any] = {"do_sample": temperature >= GREEDY, "max_new_tokens": job.max_tokens}
        if options["do_sample"]:
            options |= {"temperature": temperature, "top_p": request.top_p or 1.0, "top_k": 0}
        if request.seed is None:
            torch.seed()  # not the continuation of an earlier request's seed
        else:
            torch.manual_seed(request.seed)

        ids = torch.tensor([job.prompt], device=self.model.device)
        for index in range(request.n or 1):
            if job.cancelled.is_set():
                return
            answer = _Answer(self, job, index)
            options |= {"logits_processor": [answer.shape], "stopping_criteria": [answer.watch]}
            with torch.inference_mode():
                self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)


class _Answer:
    """One answer as it is written: shapes the scores of each step, and hands over text that is final."""

    def __init__(self, model: Model, job: _Job, index: int) -> None:
        request = job.request
        self.tokens = model.tokens
        self.job = job
        self.request = request
        self.index = index
        end_tokens = model.model.generation_config.eos_token_id
        self.end_tokens = {end_tokens} if isinstance(end_tokens, int) else set(end_tokens)
        self.stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        self.bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        self.sent = 0  # characters that were handed over
        self.logprobs: list[dict] = []  # of the tokens since then
        self.scores: torch.Tensor | None = None  # log-probabilities of the present step, before anything shapes them

    def shape(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores (1, V) of the next token with OpenAI's penalties and biases."""
        self.scores = scores[0].float().log_softmax(-1)
        frequency_penalty = self.request.frequency_penalty or 0
        presence_penalty = self.request.presence_penalty or 0
        if frequency_penalty or presence_penalty:
            counts = input_ids[0, len(self.job.prompt) :].bincount(minlength=scores.shape[-1])
            scores = scores - frequency_penalty * counts - presence_penalty * (counts > 0)
        for token, value in self.bias.items():
            scores[:, token] += value
        return scores

    def watch(self, input_ids: torch.Tensor, _scores: object, **_options: object) -> torch.Tensor:
        """Take in the newest token, hand over text, and return whether the answer is complete, (1,) bool."""
        ids = input_ids[0, len(self.job.prompt) :].tolist()
        is_end = ids[-1] in self.end_tokens
        if getattr(self.request, "logprobs", None) and not is_end:
            self.logprobs.append(self._logprob(ids[-1]))
        text = self.tokens.decode(ids[:-1] if is_end else ids, skip_special_tokens=True)

        stop = _first_stop(text, self.stops)
        finish = None
        if is_end or stop is not None:
            finish = "stop"
        elif len(ids) >= self.job.max_tokens:
            finish = "length"

        final = len(text) if finish else len(text) - _held(text, self.stops)
        if stop is not None:
            final = stop
        new_text = text[self.sent : final]
        if new_text or finish:
            self.job.hand_over(Piece(self.index, new_text, self.logprobs, finish, len(ids)))
            self.sent += len(new_text)
            self.logprobs = []
        is_complete = finish is not None or self.job.cancelled.is_set()
        return torch.tensor([is_complete], device=input_ids.device)

    def _logprob(self, token: int) -> dict:
        best = self.scores.topk(self.request.top_logprobs or 0).indices.tolist()
        return self._entry(token) | {"top_logprobs": [self._entry(candidate) for candidate in best]}

    def _entry(self, token: int) -> dict:
        text = self.tokens.decode([token])
        return {"token": text, "logprob": self.scores[token].item(), "bytes": list(text.encode())}


def _window(config: Any) -> int:
    """Return the longest text of a model in tokens, prompt included."""
    window = getattr(config, "max_position_embeddings", WINDOW)
    rope = getattr(config, "rope_parameters", None)
    if rope and rope.get("rope_type") in ("linear", "dynamic"):  # the other types count the factor in already
        window = int(window * rope["factor"])
    return window


def _first_stop(text: str, stops: list[str]) -> int | None:
    """Return where the first stop sequence of a text begins; None without one."""
    starts = [text.find(stop) for stop in stops]
    return min((start for start in starts if start >= 0), default=None)


def _held(text: str, stops: list[str]) -> int:
    """Return how many characters at the end may still change, or begin a stop sequence."""
    longest_begun = 0
    for stop in stops:
        for size in range(1, min(len(stop), len(text) + 1)):
            if text.endswith(stop[:size]):
                longest_begun = max(longest_begun, size)
    # A character of several tokens is decoded as U+FFFD until its last one has come.
    return longest_begun or len(text) - len(text.rstrip("\ufffd"))


def _text(content: str | list) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)  # as vLLM joins them
