"""Names and files that somebody made to hang, crash or fool a command: a sentence each, within seconds.

Files are fuzzed for `QRL_FUZZ_SECONDS` in all, 20 if it is not set: `QRL_FUZZ_SECONDS=600 python -m pytest
tests/test_hostile.py -m process`.
"""

import io
import itertools
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import click
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mlflow.entities.model_registry import ModelVersion, RegisteredModel

from qrl import checkpoint, cli, cluster, recipe, tiny, workspace
from qrl.checkpoint import header
from qrl.cli import ending
from qrl.compare import logs, read, validate
from qrl.engine import hf
from qrl.errors import PANIC, BadInput, QrlError
from qrl.files import tables
from qrl.formats.fakequant import file as formats
from qrl.recipe import documents, prompts
from qrl.registry import adopt, history, signing
from qrl.study import environments
from qrl.tasks import rows

CASES = json.loads((Path(__file__).parent / "cases" / "names.json").read_text())
NAMES = [
    (command, value)
    for commands, values in (("reading", CASES["texts"] | CASES["places"]), ("writing", CASES["texts"]))
    for command, value in itertools.product(CASES[commands], values)
]
# Every third is tried on each push, which leaves out no command and no value.
NAMES = [pytest.param(*name, marks=[] if n % 3 == 0 else pytest.mark.slow) for n, name in enumerate(NAMES)]
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]")
FUZZ_S = float(os.environ.get("QRL_FUZZ_SECONDS", "20"))
SLOWEST_S = 10.0  # of one example, on a busy machine


@pytest.fixture
def here(monkeypatch, capsys, store):
    """Run a command in this process; return its exit code and what it wrote to stderr, without lines of progress."""
    monkeypatch.setattr(ending.process, "prepare_process", lambda: None)
    monkeypatch.setattr(ending.signals, "guard", lambda **_: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("given.jsonl").write_text('{"completion": "#### 1", "answer": "1"}\n')
    monkeypatch.setenv("QRL_API_KEY", "")  # which an option sets
    monkeypatch.setattr(environments, "hand_over", lambda *_: pytest.fail("was let through to another environment"))
    rows = [ROW | {"variant": each, "question": f"q{n}"} for each in ("base", "grpo") for n in range(40)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("log.jsonl").write_text("".join(f"{json.dumps(HARNESS | {'doc_id': n})}\n" for n in range(40)))
    Path("cluster.yaml").write_bytes(CLUSTER)
    Path("counts.json").write_text('{"n": 9, "base": {"full": 6, "nf4": 5}, "grpo": {"full": 7, "nf4": 6}}')

    def command(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(list(words))
        return ended.value.code, re.sub(r"[^\n]*\r", "", capsys.readouterr().err)

    return command


@pytest.mark.process
@pytest.mark.parametrize(("command", "value"), NAMES)
def test_a_hostile_name_gets_a_sentence_and_is_never_echoed_whole(command, value, here):
    words, text = (CASES["reading"] | CASES["writing"])[command], (CASES["texts"] | CASES["places"])[value]
    if repeated := re.fullmatch(r"(.*)\*1000", text, re.DOTALL):
        text = repeated[1] * 1000
    before = set(os.listdir())
    code, said = here(*(word.replace("X", text) for word in words))
    said = said[said.find("qrl: ") :]  # what libraries log while they are imported comes before
    assert code == 2 and said
    assert len(said) < 7000 and not CONTROL.search(said)
    assert set(os.listdir()) - before <= {".qrl", "mlruns"}


def test_every_option_that_is_a_text_has_a_hostile_case():
    shown = [command for command in cli.cli.commands.values() if not command.hidden]
    texts = {
        (command.name, each.opts[0])
        for command in shown
        for each in command.params
        if isinstance(each, click.Option) and isinstance(each.type, click.types.StringParamType)
    }
    kinds = {key: recipe.type_name(annotation) for key, (annotation, _) in recipe.fields().items()}
    fields = {f"--{key}" for key, kind in kinds.items() if kind in ("text", "list", "JSON")}
    cases = (CASES["reading"] | CASES["writing"]).values()
    tried = {(words[0], option) for words in cases for option, value in itertools.pairwise(words) if "X" in value}
    assert not texts - tried
    assert not fields - {option for _, option in tried}


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="device or a pipe"), workspace.write_atomically(tmp_path / "pipe"):
        pass
    assert not (tmp_path / "pipe").is_file()


@pytest.mark.process
@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi")),
        "a: &a [*a]",
        "a: &a {x: 1}\nb: &b {<<: [*a, *a, *a, *a]}\n"
        + "".join(
            f"{chr(c + 1)}: &{chr(c + 1)} {{k: [*{chr(c)}, *{chr(c)}, *{chr(c)}, *{chr(c)}, *{chr(c)}]}}\n"
            for c in range(98, 112)
        ),
        "a: " + "[" * 5000,
        "a: x\n" * 60_000,
    ],
    ids=["aliases", "itself", "merges", "nested", "long"],
)
def test_a_yaml_bomb_is_a_sentence_at_once(text, tmp_path):
    (tmp_path / "bomb.yaml").write_text(text)
    began = time.monotonic()
    with pytest.raises(BadInput):
        recipe.load(str(tmp_path / "bomb.yaml"))
    assert time.monotonic() - began < SLOWEST_S


def test_a_parquet_file_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables.reading, "TABLE_BYTES", 1 << 20)
    pd.DataFrame({"completion": ["a" * 10_000] * 1000}).to_parquet(tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 17
    with pytest.raises(BadInput, match="unpacks to more than 1 MiB"):
        tables.read_rows(tmp_path / "a.parquet")


def test_texts_of_a_parquet_file_that_are_no_utf_8_are_a_sentence(tmp_path):
    pq.write_table(
        pa.table({"question": ["q1", "q2"], "answer": ["one", "one"]}), tmp_path / "a.parquet", compression="none"
    )
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"one", b"o\xffe"))
    assert tables.read_columns([({}, tmp_path / "a.parquet")], ["question", "answer"], []) is None
    with pytest.raises(BadInput, match=r"a\.parquet"):
        list(tables.read_rows(tmp_path / "a.parquet"))


@pytest.mark.process
def test_a_text_that_a_parquet_file_holds_once_is_not_written_out_for_every_row(tmp_path, monkeypatch):
    long, n = "a" * 300_000, 4000
    answers = pa.DictionaryArray.from_arrays(pa.array([0] * n, pa.int32()), [long])
    asked = pa.array([f"q{i % 7}" for i in range(n)])
    pq.write_table(pa.table({"question": asked, "completion": answers}), tmp_path / "a.parquet")  # 1.2 GB
    monkeypatch.setattr(tables.reading, "memory_limit_bytes", lambda: 1 << 20)
    found = tables.read_columns([({}, tmp_path / "a.parquet")], ["question"], ["completion"])
    assert list(found["question"]) == asked.to_pylist() and list(found["completion"].cat.categories) == [long]
    taken = found.attrs[tables.TEXTS].take(found[tables.ROW].iloc[:3], ["completion"])
    assert list(taken["completion"]) == [long] * 3
    monkeypatch.undo()
    with pytest.raises(BadInput, match="unpacks to more than 1,024 MiB"):
        tables.read_rows(tmp_path / "a.parquet")
    monkeypatch.setattr(tables.reading, "TABLE_BYTES", 1 << 20)
    pd.DataFrame({"turns": [["b" * 1000] * 500] * 4}).to_parquet(tmp_path / "nested.parquet")
    with pytest.raises(BadInput, match="unpacks to more than 1 MiB"):
        tables.read_rows(tmp_path / "nested.parquet")


@pytest.mark.parametrize("read", [tables.read_rows, lambda path: tables.read_columns([({}, path)], ["correct"], [])])
def test_a_parquet_file_of_more_values_than_fit_is_refused(read, tmp_path, monkeypatch):
    pd.DataFrame({"correct": [1] * 200_000}).to_parquet(tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 12
    monkeypatch.setattr(tables.reading, "memory_limit_bytes", lambda: 1 << 20)
    with pytest.raises(BadInput, match="unpacks to more than 1 MiB"):
        read(tmp_path / "a.parquet")


TWICE = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
HOSTILE_TOKENIZERS = {
    "a text 2⁶⁰ times as long": {"normalizer": {"type": "Sequence", "normalizers": [TWICE] * 60}},
    "the same in two parts": {"normalizer": {"type": "Sequence", "normalizers": [[TWICE] * 5, [TWICE] * 6]}},
    "decoded": {"decoder": {"type": "Sequence", "decoders": [TWICE] * 60}},
    "a million letters before": {"normalizer": {"type": "Prepend", "prepend": "p" * 1_000_000}},
    "a million tokens before": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000 + [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": [0] * 1000, "tokens": ["x"] * 1000}},
        }
    },
    "nothing replaced, where the library panics": {"normalizer": TWICE | {"pattern": {"String": ""}}},
}


@pytest.mark.parametrize("case", HOSTILE_TOKENIZERS)
def test_a_tokenizer_that_makes_texts_too_long_is_a_sentence(case, tmp_path):
    path = shutil.copytree(tiny.PATH, tmp_path / "model")
    for name, change in {
        "tokenizer.json": HOSTILE_TOKENIZERS[case],
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "config.json": {"model_type": "llama"},  # else transformers builds its own tokenizer of the vocabulary
    }.items():
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | change))
    began = time.monotonic()
    for reader in (hf.tokenizer, hf.plain_tokenizer):
        with pytest.raises(BadInput, match=r"The tokenizer of .* cannot be read"):
            reader(path)
    assert time.monotonic() - began < SLOWEST_S


def test_a_librarys_panic_is_a_sentence(here, monkeypatch):
    panic = type(PANIC, (BaseException,), {})
    monkeypatch.setattr(validate, "check_grid", mock.Mock(side_effect=panic("retry-limit-in-match over")))
    monkeypatch.setattr("qrl.compare.build.check_grid", validate.check_grid)
    code, said = here("compare", "--counts", "counts.json", "--out", "out")
    assert (code, "retry-limit" in said) == (2, True) and "Traceback" not in said


VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**30, "x", "1e9"]),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=8), parts, max_size=4),
    max_leaves=8,
)


def mutated(document: object) -> st.SearchStrategy:
    """Return documents like one of ours, in which a part is another value, or is missing."""
    if isinstance(document, dict) and document:
        others = st.sampled_from(sorted(document)).flatmap(
            lambda key: (
                mutated(document[key]).map(lambda value: document | {key: value})
                | st.just({name: value for name, value in document.items() if name != key})
            )
        )
    elif isinstance(document, list) and document:
        others = mutated(document[0]).map(lambda value: [value, *document[1:]])
    else:
        return VALUE
    return VALUE | others | others | others


def damaged(content: bytes) -> st.SearchStrategy:
    """Return a file with a part cut out, doubled or replaced by other bytes."""
    places = st.integers(0, len(content))
    return st.builds(
        lambda a, b, new: content[: min(a, b)] + new + content[max(a, b) :], places, places, st.binary(max_size=16)
    )


def files(document: object) -> st.SearchStrategy:
    """Return JSON files like one of ours, of another structure or with other bytes."""
    return mutated(document).map(lambda made: json.dumps(made).encode()) | damaged(json.dumps(document).encode())


def binary(head: object) -> st.SearchStrategy:
    """Return safetensors files with another header."""
    text = json.dumps(head).encode()
    whole = len(text).to_bytes(8, "little") + text + bytes(64)
    return damaged(whole) | files(head).map(lambda made: len(made).to_bytes(8, "little") + made + bytes(64))


def zipped(document: object) -> bytes:
    """Return a log of inspect_ai with one sample."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({key: value for key, value in document.items() if key != "samples"}))
        archive.writestr("samples/1.json", json.dumps(document["samples"][0]))
    return packed.getvalue()


def parquet() -> bytes:
    """Return a table of outcomes."""
    packed = io.BytesIO()
    pd.DataFrame([ROW] * 4).to_parquet(packed)
    return packed.getvalue()


ROW = {"variant": "base", "scheme": "full", "question": "q", "correct": 1, "completion": "#### 1", "answer": "1"}
HARNESS = {"doc_id": 1, "doc": {}, "target": "7", "arguments": {"a": {"b": "x"}}, "resps": [["7"]], "exact_match": 1.0}
HARNESS |= {"filter": "none", "metrics": ["exact_match"]}
SAMPLE = {"id": 1, "epoch": 1, "input": "x", "target": "7", "scores": {"match": {"value": "C"}}}
SAMPLE |= {"messages": [{"role": "user", "content": "x"}], "output": {"completion": "7"}}
LOG = {"status": "success", "eval": {"task": "t", "config": {"epochs": 1}, "model_generate_config": {"seed": 1}}}
LOG |= {"plan": {"steps": [{"solver": "s"}], "config": {}}, "samples": [SAMPLE]}
HEADER = {"a": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]}, "__metadata__": {"format": "pt"}}
COUNTS = {"n": 9, "base": {"full": 6, "nf4": 5}, "grpo": {"full": 7, "nf4": 6}}
CONFIG = {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 4, "rope_parameters": {"a": 1}}
RECIPE = b"extends: tiny\nseed: 3\ntrain: {steps: 4, rewards: &a [correct]}\nquantize:\n  schemes: [nf4, int8]\nx: *a\n"
PROMPT = {"user": "{question}", "system": "x", "tasks": ["gsm8k"]}


def model(path: Path) -> None:
    """Check a checkpoint with this config.json; its one tensor is an embedding."""
    text = json.dumps({"model.embed_tokens.weight": HEADER["a"]}).encode()
    (path.parent / checkpoint.WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    checkpoint.check(path.parent, need_tokenizer=False)


def index(path: Path) -> None:
    """Read a checkpoint in two shards with this index."""
    for number, name in enumerate(INDEX["weight_map"].values()):
        text = json.dumps({f"{'ab'[number]}": HEADER["a"]}).encode()
        (path.parent / name).write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    checkpoint.entries(path.parent)


def tokenizer(path: Path) -> None:
    """Load the shipped tokenizer with these settings, as evaluation does and as AWQ's environment does."""
    shutil.copyfile(tiny.PATH / "tokenizer.json", path.parent / "tokenizer.json")
    hf.plain_tokenizer(path.parent)
    hf.tokenizer(path.parent)


def record(path: Path) -> None:
    """Read a registered model's record of two decisions, this one between them, and what follows from it."""
    text = path.read_text(errors="replace")
    run = {"info": SimpleNamespace(run_id="r", lifecycle_stage="active")}
    run["data"] = SimpleNamespace(params={"000001": f"nonce 1 {text}"})
    model = RegisteredModel("m", tags=[SimpleNamespace(key="qrl.history", value="r")])
    client = SimpleNamespace(search_model_versions=lambda *_: [])
    finds = {"find_run": lambda run_id: run_id and SimpleNamespace(**run), "record_runs": lambda *_: []}
    with mock.patch.multiple(history, MlflowClient=lambda: client, **finds):
        past = history.read_history("m", model)
    for each in (past.state.aliases(), past.state.shown(), past.state.stages, past.gates(1), past.until("2026")):
        str(each)
    for each in past.records:
        history.standing_decision(past.gates(), each.stage)
        ", ".join([each.time, each.by, each.run[:8], each.digest[:12], *each.reasons, *each.bounds])


def tags(path: Path) -> None:
    """Take over a registered model without a record, with these tags, of the model and of its version."""
    given = documents.parse(path, "It")
    texts = {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    entries = [SimpleNamespace(key=key, value=value) for key, value in texts.items()]
    aliases = [SimpleNamespace(alias=each, version="1") for each in ("grpo", "awq-previous")]
    version = ModelVersion("m", "1", 0, tags=entries)
    adopt.first_decision(RegisteredModel("m", tags=entries, aliases=aliases), [version])


@cache
def signed() -> tuple[bytes, str]:
    """Return the signature of a folder with one file, `a`, and the public key."""
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    with TemporaryDirectory() as place:
        (folder := Path(place, "model")).mkdir()
        (folder / "a").write_text("a")
        key, out = Path(place, "key.pem"), Path(place, signing.SIGNATURE)
        key.write_bytes(private.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()))
        keys = signing.load_keys(SimpleNamespace(sign_with=(str(key),), require_signature=""))
        keys.signer.sign(folder, out)
        return out.read_bytes(), keys.public_key


def signature(path: Path) -> None:
    """Verify that folder with this signature."""
    (folder := path.parent / "model").mkdir(exist_ok=True)
    (folder / "a").write_text("a")
    signing._check("version 1", folder, path, signed()[1])


INDEX = {"metadata": {"total_size": 128}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
CLUSTER = b"driver: slurm\nshared: /a\nsetup: [module load cuda]\ndefaults: {cpus: 4, memory: 16G, time: '2:00:00'}\n"
CLUSTER += b"steps:\n  train: {partition: gpu, gpus: 1, options: {constraint: a}}\npoll: 10\n"
FORMAT = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}
FORMAT |= {"input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}}
STAGES = "base=base:full,int4=base:rtn-int4;made_from=base;max_loss=0.02"
DECISION = {"action": "promote", "stage": "int4", "version": 1, "run": "r", "digest": "d", "reasons": ["it was better"]}
DECISION |= {"bounds": {"gain": 0.1}, "declared": STAGES.partition(",")[2], "number": 1, "time": "2026", "previous": ""}
ADOPTED = {
    "at": {"grpo": 1},
    "before": {"grpo": 2},
    "declared": {"grpo": "grpo=grpo:full"},
    "mirrors": {"Staging": "grpo"},
}
ADOPTED |= {"gates": [DECISION]}
FORMER = {
    "qrl.gate.grpo": "passed",
    "qrl.gate.grpo.record": {"run": "r", "bounds": {"n": 1}},
    "qrl.gate.awq": "refused",
}


READERS: dict[str, tuple[str, st.SearchStrategy, Callable[[Path], object]]] = {
    "lines": ("a.jsonl", files(ROW), tables.read_rows),
    "array": ("a.json", files([ROW]), tables.read_rows),
    "csv": ("a.csv", damaged(pd.DataFrame([ROW] * 3).to_csv().encode()), tables.read_frame),
    "parquet": ("a.parquet", damaged(parquet()), tables.read_rows),
    "data": ("a.jsonl", files({"question": "1?", "answer": "#### 1"}), lambda path: list(rows.of_file(path))),
    "counts": ("a.json", files(COUNTS), read.read_counts),
    "harness": ("samples_a.jsonl", files(HARNESS), lambda path: logs.read_logs(f"base:full={path}")),
    "inspect": ("a.json", files(LOG), lambda path: logs.read_logs(f"base:full={path}")),
    "inspect, packed": ("a.eval", damaged(zipped(LOG)), lambda path: logs.read_logs(f"base:full={path}")),
    "safetensors": ("model.safetensors", binary(HEADER), header.read),
    "config": ("config.json", files(CONFIG), model),
    "recipe": ("a.yaml", damaged(RECIPE), lambda path: recipe.load(str(path))),
    "yaml": ("a.yaml", files(PROMPT), lambda path: documents.parse(path, "It")),
    "prompt": ("a.yaml", files(PROMPT), lambda path: prompts.resolve(str(path), Path())),
    "questions": ("a.jsonl", files(ROW), lambda path: validate.read_outcomes(read.read_questions(path))),
    "questions, parquet": ("a.parquet", damaged(parquet()), lambda path: read.read_questions(path, whole=False)),
    "index": (checkpoint.INDEX, files(INDEX), index),
    "tokenizer": (
        "tokenizer_config.json",
        files(json.loads((tiny.PATH / "tokenizer_config.json").read_text())),
        tokenizer,
    ),
    "signature": (signing.SIGNATURE, st.deferred(lambda: files(json.loads(signed()[0]))), signature),
    "cluster": ("cluster.yaml", damaged(CLUSTER) | files(documents.yaml.safe_load(CLUSTER)), cluster.load),
    "format": ("a.yaml", files(FORMAT), formats.read),
    "record": ("a", files(DECISION) | files({"action": "adopt", "adopted": ADOPTED, "number": 1}), record),
    "tags": ("a.yaml", files(FORMER), tags),
}


@pytest.mark.process
@pytest.mark.parametrize("document", [DECISION, {"action": "adopt", "adopted": ADOPTED, "number": 1}])
def test_the_decisions_that_are_fuzzed_are_read_when_whole(document, tmp_path):
    (tmp_path / "a").write_text(json.dumps(document))
    record(tmp_path / "a")


def prepare(name: str) -> None:
    """Import what a reader imports, which takes many seconds."""
    if name == "tokenizer":
        hf.tokenizer(tiny.PATH)
    if name == "format":
        formats.presets.library()


def check_reader(name: str, folder: Path, content: bytes) -> None:
    """Check that a reader returns or raises QrlError, soon, whatever its file holds."""
    file, _, reader = READERS[name]
    (folder / file).write_bytes(content)
    began = time.monotonic()
    try:
        reader(folder / file)
    except QrlError as refused:
        assert len(str(refused)) < 7000 and not CONTROL.search(str(refused))
    assert time.monotonic() - began < SLOWEST_S


@pytest.mark.process
@pytest.mark.parametrize("name", READERS)
def test_no_file_gets_more_than_a_sentence(name, tmp_path, request):
    """Whatever a file holds, its reader returns or raises QrlError, soon."""
    if name == "signature":
        request.getfixturevalue("model_signing")
    prepare(name)
    strategy = READERS[name][1]

    def attempt(content: bytes) -> None:
        check_reader(name, tmp_path, content)

    end, tried = time.monotonic() + FUZZ_S / len(READERS), 0
    checks = list(HealthCheck)
    while tried == 0 or time.monotonic() < end:
        tried += 1
        batch = settings(max_examples=50, database=None, deadline=None, suppress_health_check=checks)
        seed(tried)(batch(given(content=strategy)(attempt)))()
    print(f"{name}: {50 * tried:,} files")  # `-rP` shows it
    shutil.rmtree(tmp_path)
