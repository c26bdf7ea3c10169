"""`python -m qrl.serve.transformers_server`: a checkpoint at an OpenAI-compatible address, through transformers.

The model is loaded as evaluation loads it, so that greedy answers are those that were graded. Requests are answered
one after the other. `requests` says what is honoured; anything else is refused.
"""

import argparse
import asyncio
import json
import os
import secrets
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from qrl.engine import device as devices
from qrl.engine import hf
from qrl.serve import requests
from qrl.serve.engines import API_KEY, DRAIN_S, KEEP_ALIVE_S
from qrl.serve.requests import PATHS, Chat, Refusal, Text

GREEDY = 1e-5  # temperatures below it are greedy, as in vLLM
TEXT_TOKENS = 16  # OpenAI's default of `max_tokens` at /v1/completions
WINDOW = 2048  # tokens, where a config names no window, as in vLLM


@dataclass(frozen=True)
class Piece:
    """A part of one answer."""

    index: int  # of the answer, 0 to n - 1
    text: str
    logprobs: list[dict]  # of its tokens, if they were wanted
    finish: str | None  # with the last piece: "stop" or "length"
    written: int  # tokens of this answer so far


@dataclass(frozen=True)
class _Job:
    """A request on its way to the worker, and where its pieces go."""

    asked: Chat | Text
    prompt: list[int]
    room: int
    hand_over: Callable[[Piece], None]
    cancelled: threading.Event


class Model:
    """A loaded checkpoint that answers one request at a time."""

    def __init__(self, path: Path, device: str, dtype: str, chat: Mapping[str, Any] | None = None) -> None:
        self.chat = chat or {}  # variables of the chat template
        self.model, self.tokens = hf.load(path, device, devices.compute_dtype(dtype, device))
        config = self.model.config.get_text_config()
        self.window, rope = getattr(config, "max_position_embeddings", WINDOW), getattr(config, "rope_parameters", None)
        if rope and rope.get("rope_type") in ("linear", "dynamic"):  # the others count it in already
            self.window = int(self.window * rope["factor"])
        self._worker = ThreadPoolExecutor(1)

    def prompt(self, asked: Chat | Text) -> list[int]:
        """Return the token ids of a request's prompt; raise Refusal if the model has none for it."""
        if isinstance(asked, Text):
            ids = self.tokens(asked.prompt)["input_ids"] if isinstance(asked.prompt, str) else asked.prompt
            if not ids or not all(0 <= token < self.model.config.vocab_size for token in ids):
                raise Refusal("`prompt` is empty or has tokens that the model does not know: give a text.", "prompt")
            return ids
        messages = [{"role": turn.role, "content": _text(turn.content)} for turn in asked.messages]
        how = {"add_generation_prompt": True, "return_dict": True, **self.chat}
        try:
            return self.tokens.apply_chat_template(messages, **how)["input_ids"]
        except Exception as error:  # the template is a program: it can raise anything
            raise Refusal(f"The model's chat template refuses these messages ({error}).", "messages") from None

    def room(self, asked: Chat | Text, prompt: list[int]) -> int:
        """Return how many tokens an answer may have; raise Refusal if the window has no room for them."""
        wanted = asked.max_tokens or getattr(asked, "max_completion_tokens", None)
        left, code = self.window - len(prompt), "context_length_exceeded"
        limit = f"The model's window is {self.window} tokens, and the prompt has {len(prompt)}"
        if left < 1:
            raise Refusal(f"{limit}: shorten it.", "messages" if isinstance(asked, Chat) else "prompt", code)
        if (wanted or 0) > left:
            raise Refusal(f"{limit}: an answer can have {left} at most, not {wanted}.", "max_tokens", code)
        return wanted or (left if isinstance(asked, Chat) else min(TEXT_TOKENS, left))

    async def write(self, asked: Chat | Text, prompt: list[int], room: int) -> AsyncIterator[Piece]:
        """Yield the pieces of all answers to a request as they are written; a caller that stops cancels the rest."""
        loop, queue, cancelled = asyncio.get_running_loop(), asyncio.Queue(), threading.Event()

        def hand_over(piece: Piece) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, piece)

        job = _Job(asked, prompt, room, hand_over, cancelled)
        work = loop.run_in_executor(self._worker, self._generate, job)
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            await work
        finally:
            cancelled.set()

    def _generate(self, job: _Job) -> None:
        asked = job.asked
        temperature = 1.0 if asked.temperature is None else asked.temperature
        how = {"do_sample": temperature >= GREEDY, "max_new_tokens": job.room}
        how |= {"temperature": temperature, "top_p": asked.top_p or 1.0, "top_k": 0} if how["do_sample"] else {}
        ids = torch.tensor([job.prompt], device=self.model.device)
        if asked.seed is None:
            torch.seed()  # not the continuation of an earlier request's seed
        else:
            torch.manual_seed(asked.seed)
        for index in range(asked.n or 1):
            answer = _Answer(self, job, index)
            how |= {"logits_processor": [answer.shape], "stopping_criteria": [answer.watch]}
            if not job.cancelled.is_set():
                with torch.inference_mode():
                    self.model.generate(ids, attention_mask=torch.ones_like(ids), **how)


class _Answer:
    """One answer as it is written: shapes the scores of each step, and hands over text that is final."""

    def __init__(self, model: Model, job: _Job, index: int) -> None:
        self.tokens, self.job, self.asked, self.index = model.tokens, job, job.asked, index
        ends = model.model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends)
        self.stops = [job.asked.stop] if isinstance(job.asked.stop, str) else job.asked.stop or []
        self.bias = {int(token): value for token, value in (job.asked.logit_bias or {}).items()}
        self.sent, self.logprobs = 0, []
        self.scores: torch.Tensor | None = None  # log-probabilities of the present step, before anything shapes them

    def shape(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores (1, V) of the next token with OpenAI's penalties and biases."""
        self.scores, asked = scores[0].float().log_softmax(-1), self.asked
        if asked.frequency_penalty or asked.presence_penalty:
            counts = input_ids[0, len(self.job.prompt) :].bincount(minlength=scores.shape[-1])
            scores = scores - (asked.frequency_penalty or 0) * counts - (asked.presence_penalty or 0) * (counts > 0)
        for token, value in self.bias.items():
            scores[:, token] += value
        return scores

    def watch(self, input_ids: torch.Tensor, _scores: object, **_rest: object) -> torch.Tensor:
        """Take in the newest token, hand over text, and return whether the answer is complete, (1,) bool."""
        ids = input_ids[0, len(self.job.prompt) :].tolist()
        ended = ids[-1] in self.ends
        if getattr(self.asked, "logprobs", None) and not ended:
            self.logprobs.append(self._logprob(ids[-1]))
        text = self.tokens.decode(ids[: len(ids) - ended], skip_special_tokens=True)
        stop = min((at for word in self.stops if (at := text.find(word)) >= 0), default=None)
        finish = "stop" if ended or stop is not None else "length" if len(ids) >= self.job.room else None
        final = len(text) if finish else len(text) - _held(text, self.stops)
        fresh = text[self.sent : final if stop is None else stop]
        if fresh or finish:
            self.job.hand_over(Piece(self.index, fresh, self.logprobs, finish, len(ids)))
            self.sent, self.logprobs = self.sent + len(fresh), []
        return torch.tensor([finish is not None or self.job.cancelled.is_set()], device=input_ids.device)

    def _logprob(self, token: int) -> dict:
        best = self.scores.topk(self.asked.top_logprobs or 0).indices.tolist()
        return self._entry(token) | {"top_logprobs": [self._entry(other) for other in best]}

    def _entry(self, token: int) -> dict:
        text = self.tokens.decode([token])
        return {"token": text, "logprob": self.scores[token].item(), "bytes": list(text.encode())}


def _held(text: str, stops: list[str]) -> int:
    """Return how many characters at the end may still change, or begin a stop sequence."""
    begun = (size for word in stops for size in range(1, min(len(word), len(text) + 1)) if text.endswith(word[:size]))
    return max(begun, default=len(text) - len(text.rstrip("\ufffd")))


def _text(content: str | list) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)  # as vLLM joins them


def application(model: Model, name: str, key: str = "") -> Starlette:
    """Return the application that serves a model under a name, to clients that send the key, if there is one."""
    expected = f"Bearer {key}".encode()
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "qrl",
        "max_model_len": model.window,
    }

    def check_key(request: Request) -> None:
        if key and not secrets.compare_digest(request.headers.get("authorization", "").encode(), expected):
            raise Refusal("The API key is missing or wrong: send this server's.", code="invalid_api_key", status=401)

    async def complete(request: Request) -> Response:
        check_key(request)
        is_chat = PATHS[request.url.path] == "chat"
        asked = requests.parse(Chat if is_chat else Text, await requests.body_of(request))
        if asked.model != name:
            unknown = f"There is no model '{asked.model}' here: '{name}' is served"
            raise Refusal(f"{unknown}.", "model", "model_not_found", 404)
        if any(int(token) >= model.model.config.vocab_size for token in asked.logit_bias or {}):
            raise Refusal("`logit_bias` names a token that the model does not have: remove it.", "logit_bias")
        prompt = await asyncio.to_thread(model.prompt, asked)
        pieces = model.write(asked, prompt, model.room(asked, prompt))
        head = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}
        head |= {"model": name, "object": "text_completion"}
        if asked.stream:
            head |= {"object": "chat.completion.chunk"} if is_chat else {}
            return StreamingResponse(_events(asked, head, pieces, len(prompt)), media_type="text/event-stream")
        answers: dict[int, list[Piece]] = {}
        async for piece in pieces:
            answers.setdefault(piece.index, []).append(piece)
            if await request.is_disconnected():  # nobody waits for the rest, and others wait for this engine
                await pieces.aclose()
                return Response()
        head |= {"object": "chat.completion"} if is_chat else {}
        choices = [_choice(asked, _joined(parts), "message") for parts in answers.values()]
        written = sum(parts[-1].written for parts in answers.values())
        return JSONResponse(head | {"choices": choices, "usage": _usage(len(prompt), written)})

    async def models(request: Request) -> Response:
        check_key(request)
        return JSONResponse({"object": "list", "data": [card]})

    async def health(_request: Request) -> Response:
        return Response()

    async def refuse(_request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # no such path, or no such method there
            error = Refusal(f"{error.detail}: expected one of {', '.join(PATHS)}.", status=error.status_code)
        elif not isinstance(error, Refusal):
            error = Refusal(f"The engine failed ({type(error).__name__}): see its log.", status=500)
        return error.response()

    routes = [Route(path, complete, methods=["POST"]) for path in PATHS]
    routes += [Route("/v1/models", models), Route("/health", health)]
    return Starlette(routes=routes, exception_handlers=dict.fromkeys((Refusal, HTTPException, Exception), refuse))


async def _events(asked: Chat | Text, head: dict, pieces: AsyncIterator[Piece], prompt: int) -> AsyncIterator[str]:
    """Yield an answer as server-sent events."""
    written: dict[int, int] = {}
    wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
    try:
        async for piece in pieces:
            chunk = _choice(asked, piece, "delta")
            if isinstance(asked, Chat) and piece.index not in written:
                chunk["delta"] = {"role": "assistant"} | chunk["delta"]
            written[piece.index] = piece.written
            yield _event(head | {"choices": [chunk]} | ({"usage": None} if wants_usage else {}))
    except Exception as error:  # the status is out already
        yield _event(json.loads(Refusal(f"The engine failed ({type(error).__name__}).", status=500).response().body))
        raise
    if wants_usage:
        yield _event(head | {"choices": [], "usage": _usage(prompt, sum(written.values()))})
    yield "data: [DONE]\n\n"


def _event(data: dict) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _choice(asked: Chat | Text, piece: Piece, key: str) -> dict:
    choice = {"index": piece.index, "finish_reason": piece.finish, "logprobs": None}
    if isinstance(asked, Text):
        return choice | {"text": piece.text}
    content = {"content": piece.text} if key == "delta" else {"role": "assistant", "content": piece.text}
    return choice | {key: content} | ({"logprobs": {"content": piece.logprobs}} if asked.logprobs else {})


def _joined(parts: list[Piece]) -> Piece:
    logprobs = [entry for part in parts for entry in part.logprobs]
    return replace(parts[-1], text="".join(part.text for part in parts), logprobs=logprobs)


def _usage(prompt: int, written: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def main() -> None:
    """Load the checkpoint that the options name, then listen."""
    parser = argparse.ArgumentParser()
    for option in ("--model", "--name", "--device", "--dtype", "--chat", "--host", "--port"):
        parser.add_argument(option, required=True, type=int if option == "--port" else str)
    given = parser.parse_args()
    model = Model(Path(given.model), given.device, given.dtype, json.loads(given.chat))
    app = application(model, given.name, os.environ.get(API_KEY, ""))
    uvicorn.run(
        app, host=given.host, port=given.port, timeout_graceful_shutdown=DRAIN_S, timeout_keep_alive=KEEP_ALIVE_S
    )


if __name__ == "__main__":
    main()
