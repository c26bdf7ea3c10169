"""What `mlflow.pyfunc.load_model` loads of a stored model: chats in which every field is honoured or refused.

MLflow's own wrapper ignores a temperature, and answers past the model's window. This file is copied into each stored
model, under `code/`, so that it answers where qrl is not installed: it must not import qrl.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mlflow import transformers
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

if TYPE_CHECKING:
    import pandas

DEFAULT_MAX_TOKENS = 512  # of an answer, unless `max_tokens` says otherwise
ROLES = ("system", "developer", "user", "assistant", "tool")
HONOURED = ("messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> Chat:
    return Chat(transformers._load_pyfunc(path, model_config))


class Chat:
    """A chat model; `wrapped` is MLflow's own."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def predict(self, data: pandas.DataFrame | dict[str, Any], params: dict[str, Any] | None = None) -> list[dict]:
        """Return a chat completion per row, greedy unless a row has a `temperature` above 0.

        Args:
            data: `messages` and, optionally, other fields of `HONOURED`; a row per chat, or one chat as a dict.
            params: fields of all rows.

        Raises:
            MlflowException: a field is not honoured here, or the window has no room for the answer.
        """
        rows = [data] if isinstance(data, dict) else data.to_dict("records")
        return [self._answer({**(params or {}), **row}) for row in rows]

    def _answer(self, row: dict[str, Any]) -> dict:
        fields = {key: value for key, value in row.items() if value is not None and not _is_nan(value)}
        unknown = sorted(fields.keys() - set(HONOURED))
        if unknown:
            raise _wrong(f"`{unknown[0]}` is not honoured by pyfunc: leave it out, or serve the model with qrl")
        messages = list(fields["messages"])
        if not messages or any(message["role"] not in ROLES for message in messages):
            raise _wrong(f"`messages` is empty or has another role than {', '.join(ROLES)}")
        max_tokens = self._max_tokens(messages, fields.get("max_tokens"))
        sampling = _sampling(fields)
        if "seed" in fields:
            import torch  # takes seconds, and whoever only stores or lists models needs none

            torch.manual_seed(fields["seed"])
        body = {"messages": messages, "max_tokens": max_tokens}
        stops = list(fields.get("stop", ()))
        if stops:
            body["stop"] = stops
        (answer,) = self._wrapped.predict(body, sampling)
        message = answer["choices"][0]["message"]
        message["content"] = _cut(message["content"], stops)  # MLflow leaves the stop sequence in
        return answer

    def _max_tokens(self, messages: list[dict], requested: int | None) -> int:
        """Return the limit of an answer's tokens; raise MlflowException if the window has no room for it."""
        pipeline = self._wrapped.pipeline
        prompt = pipeline.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        n = len(prompt["input_ids"])
        window = getattr(pipeline.model.config, "max_position_embeddings", 2048)
        room = window - n
        if room <= 0:
            raise _wrong(f"The model's window is {window} tokens, and the prompt has {n}: shorten it")
        max_tokens = min(DEFAULT_MAX_TOKENS, room) if requested is None else requested
        if not 0 < max_tokens <= room:
            raise _wrong(f"`max_tokens` is {max_tokens}, but after this prompt it can be 1 to {room}")
        return max_tokens


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the settings to sample with; empty for greedy answers."""
    temperature = fields.get("temperature", 0.0)
    if not 0 <= temperature <= 2:
        raise _wrong(f"`temperature` is {temperature}: expected 0 to 2")
    if not temperature:
        return {}
    chosen = {key: fields[key] for key in ("top_p", "top_k") if key in fields}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, **chosen}


def _cut(content: str, stops: list[str]) -> str:
    """Return a text up to the first of the stop sequences."""
    positions = [content.find(stop) for stop in stops]
    found = [position for position in positions if position >= 0]
    return content[: min(found, default=len(content))]


def _is_nan(value: object) -> bool:
    """Return whether a frame lacks a value."""
    return isinstance(value, float) and math.isnan(value)


def _wrong(sentence: str) -> MlflowException:
    return MlflowException(f"{sentence}.", error_code=INVALID_PARAMETER_VALUE)
