"""Requests of OpenAI's API, checked before an engine reads them: a field is honoured, or the answer is 400.

`Chat` and `Text` are what the transformers server honours. vLLM ignores fields that it does not know and renders any
role, so `Check` checks its requests first. README.md has the table of what each engine honours.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import JSONResponse

PATHS = {"/v1/chat/completions": "chat", "/v1/completions": "text"}
# Fields that vLLM accepts, and ignores as it is started here, or for most chat templates.
_WITHOUT_EFFECT = {"priority", "parallel_tool_calls", "reasoning_effort", "include_reasoning", "return_token_offsets"}
_LONGEST_INPUT = 60  # characters of a wrong value in a sentence
LARGEST_BODY = 32 << 20  # bytes; a prompt of a million token ids has 7 MB

Count = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
Stop = Annotated[str, Field(min_length=1)]


class Refusal(Exception):
    """A request that is not answered, with the reason for its client."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param  # the field to blame
        self.code = code  # OpenAI's name of the error
        self.status = status

    def response(self) -> JSONResponse:
        """Return the error in OpenAI's form."""
        from starlette.responses import JSONResponse

        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status)


class _Strict(BaseModel):
    """JSON's types as they are: no number from a text, no field without a meaning here."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class _StreamOptions(_Strict):
    include_usage: bool = False


class Sampling(_Strict):
    """Fields of both endpoints. None is OpenAI's default."""

    model: str
    max_tokens: Count | None = None  # None: as many as the window has room for, 16 of a text
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], Bias] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None  # the client's own name for its user; it changes no answer

    @model_validator(mode="after")
    def _check_stream(self) -> Sampling:
        if self.stream_options and not self.stream:
            raise ValueError("`stream_options` needs `stream`: set it to true, or leave both out")
        return self


class _Turn(_Strict):
    """A message; the engine checks what is in its content and calls."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> _Turn:
        if self.content is None and not self.tool_calls:
            raise ValueError("`content` of a message is missing: give a text, or a list of parts")
        return self


class ChatFields(Sampling):
    """Fields of `/v1/chat/completions` that mean the same to every engine."""

    messages: Annotated[list[_Turn], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: None = None  # vLLM needs a parser of the model's own calls for them
    tool_choice: Literal["none"] | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatFields:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: set it to true, or leave both out")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("`max_tokens` is the old name of `max_completion_tokens`: give one of them")
        return self


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    role: Role
    content: str | list[_TextPart]


class _TextFormat(_Strict):
    type: Literal["text"]


class Chat(ChatFields):
    """What the transformers server honours at `/v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    response_format: _TextFormat | None = None


class Text(Sampling):
    """What the transformers server honours at `/v1/completions`."""

    prompt: str | list[int]
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None
    best_of: Literal[1] | None = None


AnyRequest = TypeVar("AnyRequest", bound=Sampling)


async def body_of(request: Request) -> bytes:
    """Return a request's body; raise Refusal once more than `LARGEST_BODY` bytes of it have come."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise Refusal(f"The body has more than {LARGEST_BODY >> 20} MiB: send a shorter prompt.", status=413)
    return bytes(body)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Return a request from its body.

    Raises:
        Refusal: it is no JSON, or lacks a field, or has one that would not be honoured; the first is named.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> Refusal:
    """Return the refusal for the first error of a request, in words for its client."""
    first = error.errors(include_url=False)[0]
    location = first["loc"]
    reason = first["msg"]
    if first["type"] == "value_error":  # of a validator of ours, which names the field first
        reason = reason.removeprefix("Value error, ")
        return Refusal(f"{reason}.", reason.split("`")[1], "invalid_value")
    if not location:
        return Refusal(f"The body is not what was expected ({reason}): send one JSON object.")

    field = _field_name(location)
    if first["type"] == "missing":
        return Refusal(f"`{field}` is missing: it is needed.", field, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return Refusal(f"`{field}` is no field that this engine honours: leave it out.", field, "unknown_parameter")
    value = repr(first["input"])
    if len(value) > _LONGEST_INPUT:
        value = f"{value[:_LONGEST_INPUT]}…"
    if first["type"] == "none_required":
        reason = "It is not supported here: leave it out"
    return Refusal(f"`{field}` is {value}. {reason}.", field, "invalid_value")


def _field_name(location: tuple[str | int, ...]) -> str:
    """Return a field as a client writes it: `messages[0].content`."""
    depth = 3 if location[0] == "messages" else 1  # what follows is pydantic's name of a type
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[:depth]]
    return "".join(parts).removeprefix(".")


class Check:
    """ASGI middleware before vLLM: refuse what `ChatFields` and `Sampling` refuse, and fields that vLLM ignores."""

    def __init__(self, app: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        self.app = app
        self.kinds = {
            "chat": _with_engine_fields(ChatFields, ChatCompletionRequest),
            "text": _with_engine_fields(Sampling, CompletionRequest),
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request

        kind = PATHS.get(scope.get("path")) if scope.get("method") == "POST" else None
        if kind is None:
            await self.app(scope, receive, send)
            return
        try:
            body = await body_of(Request(scope, receive))
            parse(self.kinds[kind], body)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
            return

        # The body was read here, so the engine gets it from here, and what follows (a disconnection) from the server.
        body_messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive_body_again() -> Any:
            return next(body_messages, None) or await receive()

        await self.app(scope, receive_body_again, send)


def _with_engine_fields(kind: type[Sampling], engine_kind: type[BaseModel]) -> type[Sampling]:
    """Return a kind of request that also lets through the engine's own fields, for the engine to check."""
    names = engine_kind.model_fields.keys() - kind.model_fields.keys() - _WITHOUT_EFFECT
    return create_model(kind.__name__, __base__=kind, **{name: (Any, None) for name in names})
