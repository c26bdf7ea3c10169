"""`python -m qrl.serve.transformers_server`: a checkpoint at an OpenAI-compatible address, through transformers.

`transformers_model` generates; this module speaks HTTP. `requests` says what is honoured; anything else is refused.
"""

import argparse
import asyncio
import json
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from qrl.serve import requests
from qrl.serve.engines import API_KEY, DRAIN_S, KEEP_ALIVE_S
from qrl.serve.requests import PATHS, Chat, Refusal, Text
from qrl.serve.transformers_model import Model, Piece


def application(model: Model, name: str, key: str = "") -> Starlette:
    """Return the application that serves a model under a name, to clients that send the key, if there is one."""
    authorization = f"Bearer {key}".encode()
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "qrl",
        "max_model_len": model.window,
    }

    def check_key(http_request: Request) -> None:
        sent = http_request.headers.get("authorization", "").encode()
        if key and not secrets.compare_digest(sent, authorization):
            raise Refusal("The API key is missing or wrong: send this server's.", code="invalid_api_key", status=401)

    async def complete(http_request: Request) -> Response:
        check_key(http_request)
        kind = Chat if PATHS[http_request.url.path] == "chat" else Text
        request = requests.parse(kind, await requests.body_of(http_request))
        _check_names(request, model, name)
        prompt = await asyncio.to_thread(model.prompt, request)
        pieces = model.write(request, prompt, model.room(request, prompt))
        head = _head(request, name)
        if request.stream:
            return StreamingResponse(_events(request, head, pieces, len(prompt)), media_type="text/event-stream")

        answers: dict[int, list[Piece]] = {}
        async for piece in pieces:
            answers.setdefault(piece.index, []).append(piece)
            if await http_request.is_disconnected():  # nobody waits for the rest, and others wait for this engine
                await pieces.aclose()
                return Response()
        choices = [_choice(request, _joined(parts), "message") for parts in answers.values()]
        written = sum(parts[-1].written for parts in answers.values())
        return JSONResponse(head | {"choices": choices, "usage": _usage(len(prompt), written)})

    async def models(http_request: Request) -> Response:
        check_key(http_request)
        return JSONResponse({"object": "list", "data": [card]})

    async def health(_http_request: Request) -> Response:
        return Response()

    async def refuse(_http_request: Request, error: Exception) -> Response:
        return _refusal(error).response()

    routes = [Route(path, complete, methods=["POST"]) for path in PATHS]
    routes += [Route("/v1/models", models), Route("/health", health)]
    handlers = {Refusal: refuse, HTTPException: refuse, Exception: refuse}
    return Starlette(routes=routes, exception_handlers=handlers)


def _check_names(request: Chat | Text, model: Model, name: str) -> None:
    """Raise Refusal if a request names another model, or a token that this one does not have."""
    if request.model != name:
        unknown = f"There is no model '{request.model}' here: '{name}' is served"
        raise Refusal(f"{unknown}.", "model", "model_not_found", 404)
    if any(int(token) >= model.model.config.vocab_size for token in request.logit_bias or {}):
        raise Refusal("`logit_bias` names a token that the model does not have: remove it.", "logit_bias")


def _refusal(error: Exception) -> Refusal:
    """Return the refusal of a request that ended with an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):  # no such path, or no such method there
        return Refusal(f"{error.detail}: expected one of {', '.join(PATHS)}.", status=error.status_code)
    return Refusal(f"The engine failed ({type(error).__name__}): see its log.", status=500)


def _head(request: Chat | Text, name: str) -> dict[str, Any]:
    """Return the fields with which every answer, and every chunk of one, begins."""
    prefix = "chatcmpl" if isinstance(request, Chat) else "cmpl"
    kind = "text_completion"
    if isinstance(request, Chat):
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name, "object": kind}


async def _events(
    request: Chat | Text, head: dict[str, Any], pieces: AsyncIterator[Piece], prompt_tokens: int
) -> AsyncIterator[str]:
    """Yield an answer as server-sent events."""
    written: dict[int, int] = {}  # index of an answer → its tokens so far
    wants_usage = request.stream_options is not None and request.stream_options.include_usage
    try:
        async for piece in pieces:
            choice = _choice(request, piece, "delta")
            if isinstance(request, Chat) and piece.index not in written:
                choice["delta"] = {"role": "assistant"} | choice["delta"]
            written[piece.index] = piece.written
            chunk = head | {"choices": [choice]}
            if wants_usage:  # OpenAI's chunks have the field from the first one on
                chunk["usage"] = None
            yield _event(chunk)
    except Exception as error:  # the status is out already
        yield _event(json.loads(Refusal(f"The engine failed ({type(error).__name__}).", status=500).response().body))
        raise
    if wants_usage:
        yield _event(head | {"choices": [], "usage": _usage(prompt_tokens, sum(written.values()))})
    yield "data: [DONE]\n\n"


def _event(data: dict) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _choice(request: Chat | Text, piece: Piece, key: str) -> dict[str, Any]:
    """Return one choice of an answer.

    Args:
        key: where its text goes: "message" of a whole answer, "delta" of a chunk; a `Text` has neither.
    """
    choice: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish, "logprobs": None}
    if isinstance(request, Text):
        return choice | {"text": piece.text}
    message = {"content": piece.text}
    if key == "message":
        message = {"role": "assistant", "content": piece.text}
    choice[key] = message
    if request.logprobs:
        choice["logprobs"] = {"content": piece.logprobs}
    return choice


def _joined(parts: list[Piece]) -> Piece:
    """Return the whole answer of its pieces."""
    text = "".join(part.text for part in parts)
    logprobs = [entry for part in parts for entry in part.logprobs]
    return replace(parts[-1], text=text, logprobs=logprobs)


def _usage(prompt_tokens: int, written: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": written, "total_tokens": prompt_tokens + written}


def main() -> None:
    """Load the checkpoint that the options name, then listen."""
    parser = argparse.ArgumentParser()
    for option in ("--model", "--name", "--device", "--dtype", "--chat", "--host"):
        parser.add_argument(option, required=True)
    parser.add_argument("--port", required=True, type=int)
    options = parser.parse_args()
    model = Model(Path(options.model), options.device, options.dtype, json.loads(options.chat))
    app = application(model, options.name, os.environ.get(API_KEY, ""))
    uvicorn.run(
        app, host=options.host, port=options.port, timeout_graceful_shutdown=DRAIN_S, timeout_keep_alive=KEEP_ALIVE_S
    )


if __name__ == "__main__":
    main()
