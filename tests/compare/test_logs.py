"""Logs of lm-evaluation-harness and inspect_ai: real ones give their outcomes, unfit and hostile ones a sentence."""

import json
import zipfile
from pathlib import Path

import pytest

from qrl import cli, compare
from qrl.compare import logs
from qrl.errors import BadInput

CASES = Path(__file__).parents[1] / "cases" / "logs"
HARNESS = {"base": "base.jsonl", "grpo": "grpo.jsonl", "base-nf4": "base-nf4.jsonl", "grpo-nf4": "grpo-nf4.jsonl"}
INSPECT = {"base": "base.json", "grpo": "grpo.eval", "base-nf4": "base-nf4.eval", "grpo-nf4": "grpo-nf4.eval"}
CELLS = {"base": "base:full", "grpo": "grpo:full", "base-nf4": "base:nf4", "grpo-nf4": "grpo:nf4"}


def named(files, folder=CASES, **others) -> str:
    return ",".join(f"{CELLS[model]}={others.get(model.replace('-', '_'), folder / files[model])}" for model in files)


def rows(model) -> list[dict]:
    return [json.loads(line) for line in (CASES / HARNESS[model]).read_text().splitlines()]


def document() -> dict:
    return json.loads((CASES / "base.json").read_text())


@pytest.mark.parametrize("name", ["strict-match", "flexible-extract"])
def test_samples_of_lm_eval_are_read_as_the_tool_scored_them(name):
    frame = compare.read_logs(named(HARNESS), filter=name)
    for model, cell in CELLS.items():
        variant, _, scheme = cell.partition(":")
        own = frame[(frame["variant"] == variant) & (frame["scheme"] == scheme)]
        scored = {str(row["doc_id"]): row["exact_match"] for row in rows(model) if row["filter"] == name}
        assert dict(zip(own["question"], own["correct"], strict=True)) == scored and len(own) == 12
        assert own["completion"].str.contains("####").all()
    found = compare.from_questions(frame)
    assert found.n == 12 and found.evidence.samples["grpo", "nf4"] == 1


@pytest.mark.parametrize("name", ["pattern", "match"])
def test_logs_of_inspect_are_read_in_both_formats_and_epochs_are_samples(name):
    frame = compare.read_logs(named(INSPECT), metric=name)
    found = compare.from_questions(frame)
    assert found.n == 6 and set(found.evidence.samples.values()) == {2}
    scores = document()["results"]["scores"]
    reported = next(score["metrics"]["accuracy"]["value"] for score in scores if score["name"] == name)
    assert found.cells["base", "full"].estimate == pytest.approx(reported)
    for model, file in INSPECT.items():
        if file.endswith(".eval"):  # what the tool's own summary of the log says
            with zipfile.ZipFile(CASES / file) as archive:
                header = json.loads(logs._content(CASES / file, archive, archive.getinfo("header.json")))
            variant, _, scheme = CELLS[model].partition(":")
            reported = next(s["metrics"]["accuracy"]["value"] for s in header["results"]["scores"] if s["name"] == name)
            assert found.cells[variant, scheme].estimate == pytest.approx(reported)


def test_a_log_in_a_folder_or_of_a_pattern_and_another_name_for_full_precision(tmp_path):
    name = "samples_words_2026-11-22T23-45-00.000000.jsonl"
    for model, file in HARNESS.items():
        (tmp_path / model / "a model").mkdir(parents=True)
        (tmp_path / model / "a model" / name).write_bytes((CASES / file).read_bytes())
    source = ",".join(f"{CELLS[model].replace('full', 'bf16')}={tmp_path / model}" for model in CELLS)
    frame = compare.read_logs(source, filter="strict-match", reference="bf16")
    assert frame.drop(columns="dtype").equals(compare.read_logs(named(HARNESS), filter="strict-match"))
    assert compare.from_questions(frame).full == "full (bf16)"
    pattern = str(tmp_path / "*" / "a model" / name)
    assert len(compare.read_logs(f"base:full={tmp_path}/base/**/samples_words*", filter="strict-match")) == 12
    for several in (tmp_path, pattern):
        with pytest.raises(BadInput, match=r"There are 4 logs .*samples_words.*expected one per cell"):
            compare.read_logs(f"base:full={several}", filter="strict-match")


CHANGES = {  # of a row of lm-evaluation-harness
    "another prompt": (lambda row: row["arguments"]["gen_args_0"].update(arg_0="Question: 1 + 1?"), "another prompt"),
    "few-shot examples": (
        lambda row: row["arguments"]["gen_args_0"].update(arg_0="Q: 1\n" + row["arguments"]["gen_args_0"]["arg_0"]),
        r"another prompt in grpo . full \(other.jsonl\) than in base . full \(base.jsonl\): '<\|im_start.*few-shot",
    ),
    "another question": (lambda row: row.update(doc_hash="0"), "another question"),
    "another gold answer": (lambda row: row.update(target_hash="0"), "another gold answer"),
    "another limit": (lambda row: row["arguments"]["gen_args_0"]["arg_1"].update(max_gen_toks=9), "another generation"),
    "another prompt by its hash alone": (lambda row: row.update(prompt_hash="0"), "another prompt hash"),
    "a score above 1": (lambda row: row.update(exact_match=1.5), "1.5, but must be 0 or 1, .* partial credit"),
    "a score below 0": (lambda row: row.update(exact_match=-0.5), "-0.5, but must be 0 or 1"),
    "a score that is no number": (lambda row: row.update(exact_match=float("nan")), "nan, but must be 0 or 1"),
    "a score that is a text": (lambda row: row.update(exact_match="yes"), "must be 0 or 1"),
    "a score that is a list": (lambda row: row.update(exact_match=[1]), "must be 0 or 1"),
    "no score": (lambda row: row.update(metrics=["acc"], acc=1), "has the metric 'acc', not 'exact_match'"),
    "another filter": (lambda row: row.update(filter="none"), "has the filter 'none', not 'strict-match'"),
    "no prompt": (lambda row: row.pop("arguments"), "line 1 has no 'arguments'"),
    "arguments that are a number": (lambda row: row.update(arguments=1), "cannot be read as a log"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_samples_that_differ_in_more_than_the_model_are_refused(case, tmp_path):
    change, sentence = CHANGES[case]
    changed = rows("grpo")
    for row in changed:
        change(row)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in changed))
    with pytest.raises(BadInput, match=sentence):
        compare.read_logs(f"base:full={CASES / 'base.jsonl'},grpo:full={other}", filter="strict-match")


def test_samples_of_versions_without_hashes_and_lists_of_metrics_are_read(tmp_path):
    old = rows("base")
    for row in old:
        row["arguments"] = [list(row["arguments"]["gen_args_0"].values())]
        for key in ("doc_hash", "prompt_hash", "target_hash", "metrics"):
            del row[key]
    other = tmp_path / "old.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in old))
    frame = compare.read_logs(f"base:full={other}", filter="strict-match")
    own = compare.read_logs(f"base:full={CASES / 'base.jsonl'}", filter="strict-match")
    assert frame.equals(own)


def write_unnamed(path: Path, samples: list[dict], each: int = 1) -> Path:
    """Write samples without the names of their filters, each several times."""
    lines = [json.dumps({key: value for key, value in row.items() if key != "filter"}) + "\n" for row in samples]
    path.write_text("".join(lines * each))
    return path


def test_samples_that_name_no_filter_are_read_alone_and_else_the_sentence_says_why_not(tmp_path):
    one = [row for row in rows("base") if row["filter"] == "strict-match"]
    log = write_unnamed(tmp_path / "one.jsonl", one)
    frame = compare.read_logs(f"base:full={log}")
    own = compare.read_logs(f"base:full={CASES / 'base.jsonl'}", filter="strict-match")
    assert frame.equals(own)
    with pytest.raises(BadInput, match="name no filter, so it is not known whether 'strict-match' made their scores"):
        compare.read_logs(f"base:full={log}", filter="strict-match")
    with pytest.raises(BadInput, match="name no filter"):
        compare.read_logs(f"base:full={CASES / 'base.jsonl'},grpo:full={log}", filter="strict-match")
    twice = write_unnamed(tmp_path / "twice.jsonl", one, each=2)
    with pytest.raises(BadInput, match=r"2 samples of document .* names no filter: the task has several filters"):
        compare.read_logs(f"base:full={twice}")


SETTINGS = {  # of a log of inspect
    "another temperature": (lambda log: log["plan"]["config"].update(temperature=0), r"generate.temperature: 0.7 in"),
    "more epochs": (lambda log: log["eval"]["config"].update(epochs=4), r"config.epochs: 2 in .* and 4 in"),
    "another task": (lambda log: log["eval"].update(task="sums"), "differ in task: 'words'"),
    "other arguments": (lambda log: log["eval"]["task_args"].update(fewshot=5), "task_args.fewshot: None"),
    "another solver": (lambda log: log["plan"]["steps"].insert(0, {"solver": "chain_of_thought"}), "differ in solver"),
    "another question": (lambda log: log["samples"][0].update(input="1 + 1?"), "another question"),
    "a system prompt": (
        lambda log: log["samples"][3]["messages"].insert(0, {"role": "system", "content": "Think."}),
        "another prompt",
    ),
    "another gold answer": (lambda log: log["samples"][0].update(target="1"), "another gold answer"),
    "an evaluation that was stopped": (lambda log: log.update(status="cancelled"), "status 'cancelled'"),
    "an answer that failed": (lambda log: log["samples"][2].update(error={"message": "out of memory"}), "in an error"),
    "answers not scored": (lambda log: log["samples"][0].update(scores=None), "has no scores"),
    "an unknown grade": (lambda log: log["samples"][0]["scores"]["pattern"].update(value="X"), "'X', but must"),
    "more than right": (lambda log: log["samples"][0]["scores"]["pattern"].update(value=85), "85, but must be 0 or 1"),
    "no answers": (lambda log: log.pop("samples"), "has no answers"),
    "no settings": (lambda log: log.update(eval=[]), "cannot be read as a log"),
    "samples that are texts": (lambda log: log.update(samples=["a"]), "cannot be read as a log"),
    "results of lm-eval": (lambda log: log.pop("eval"), "give samples_"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_logs_of_inspect_that_differ_in_more_than_the_model_are_refused(case, tmp_path):
    change, sentence = SETTINGS[case]
    change(log := document())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(log))
    with pytest.raises(BadInput, match=sentence):
        compare.read_logs(f"base:full={CASES / 'base.json'},grpo:full={other}", metric="pattern")


def test_partial_credit_is_read_from_both_tools(tmp_path):
    log, changed = document(), rows("grpo")
    for sample, value in zip(log["samples"], ("P", 0.25, "C", "I"), strict=False):
        sample["scores"]["pattern"]["value"] = value
    (tmp_path / "partial.json").write_text(json.dumps(log))
    found = compare.read_logs(f"base:full={tmp_path / 'partial.json'}", metric="pattern")
    assert found["correct"].tolist()[:4] == [0.5, 0.25, 1, 0]  # inspect's own value of "P" is a half
    for row in changed:
        row["exact_match"] = 0.5
    (tmp_path / "partial.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    source = f"base:full={CASES / 'base.jsonl'},grpo:full={tmp_path / 'partial.jsonl'}"
    comparison = compare.from_questions(compare.read_logs(source, filter="strict-match"))
    assert comparison.cells["grpo", "full"].estimate == 0.5 and comparison.row("full").mcnemar is None


@pytest.mark.parametrize("change", [{"error": {"message": "out of memory"}}, {"scores": None}])
def test_samples_of_inspect_that_failed_count_as_wrong_on_request(change, tmp_path):
    log = document()
    log["samples"][0].update(change)
    (tmp_path / "failed.json").write_text(json.dumps(log))
    with pytest.raises(BadInput, match="--missing wrong"):
        compare.read_logs(f"base:full={tmp_path / 'failed.json'}", metric="match")
    source = named(INSPECT, base=tmp_path / "failed.json")
    found = compare.from_questions(compare.read_logs(source, metric="match", missing="wrong"), missing="wrong")
    assert found.answered.missing_answers == {("base", "full"): 1} and found.n == 6


def test_a_score_with_parts_attachments_and_seeds_are_read(tmp_path):
    log = document()
    log["plan"]["config"]["seed"] = 7  # another draw of the same distribution
    for sample in log["samples"]:
        sample["scores"]["pattern"]["value"] = {"right": sample["scores"]["pattern"]["value"], "short": 0.3}
        text = sample["messages"][0]["content"]
        sample["messages"][0]["content"], sample["attachments"] = "attachment://ab", {"ab": text}
    other = tmp_path / "parts.json"
    other.write_text(json.dumps(log))
    own = compare.read_logs(f"base:full={other}", metric="pattern.right")
    assert own.equals(compare.read_logs(f"base:full={CASES / 'base.json'}", metric="pattern"))
    with pytest.raises(BadInput, match=r"the metrics 'pattern\.right', 'pattern\.short', 'match': choose"):
        compare.read_logs(f"base:full={other}")


HOSTILE = {
    "nested JSON": ("a.json", b"[" * 100_000, "not JSON"),
    "nested JSON in a line": ("a.jsonl", b'{"doc":' * 100_000, "line 1 is not JSON"),
    "a number of a million digits": ("a.json", b"9" * 1_000_000, "not JSON"),
    "no UTF-8": ("a.json", b"\xff\xfe\x00", "not JSON"),
    "no archive": ("a.eval", b"not a zip", "is no .eval log"),
    "half an archive": ("a.eval", None, "is no .eval log"),
    "an array": ("a.json", b"[1]", "has no 'eval'"),
    "nothing": ("a.jsonl", b"", "has no rows"),
    "another kind of file": ("a.csv", b"a,b", "ends in '.csv'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_gets_a_sentence(case, tmp_path):
    name, content, sentence = HOSTILE[case]
    (tmp_path / name).write_bytes(content if content is not None else (CASES / "grpo.eval").read_bytes()[:9000])
    with pytest.raises(BadInput, match=sentence):
        compare.read_logs(f"base:full={tmp_path / name}")


def test_values_that_json_holds_and_a_table_does_not(tmp_path):
    log = document()
    log["samples"][0]["output"]["completion"] = "\ud800"  # a lone surrogate
    (tmp_path / "a.json").write_text(json.dumps(log))
    assert "?" in set(compare.read_logs(f"base:full={tmp_path / 'a.json'}", metric="match")["completion"])
    log["samples"][0]["epoch"] = float("inf")
    (tmp_path / "a.json").write_text(json.dumps(log))
    with pytest.raises(BadInput, match="cannot be read as a log"):
        compare.read_logs(f"base:full={tmp_path / 'a.json'}", metric="match")


def test_an_archive_that_lies_or_has_too_much_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    bomb = tmp_path / "bomb.eval"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", "{}")
        for number in range(3):
            archive.writestr(f"samples/{number}.json", bytes(1 << 20))
    for place, name, value in ((logs, "LARGEST", 3 << 20), (logs.reading, "memory_limit_bytes", lambda: 1 << 22)):
        with monkeypatch.context() as limited, pytest.raises(BadInput, match="unpacks to more than"):
            limited.setattr(place, name, value)
            compare.read_logs(f"base:full={bomb}")
    whole = bytearray((CASES / "grpo.eval").read_bytes())
    monkeypatch.setattr(logs, "LARGEST", len(whole) - 1)
    with pytest.raises(BadInput, match="is larger than"):
        compare.read_logs(f"base:full={CASES / 'grpo.eval'}")
    monkeypatch.undo()
    entry = whole.rindex(b"PK\x01\x02", 0, whole.rindex(b"header.json"))
    whole[entry + 24 : entry + 28] = (100).to_bytes(4, "little")  # the uncompressed size: less than there is
    bomb.write_bytes(whole)
    with pytest.raises(BadInput, match=r"damaged \(bad checksum"):
        compare.read_logs(f"base:full={bomb}", metric="pattern")
    with zipfile.ZipFile(bomb, "w") as archive:
        archive.writestr("_journal/start.json", "{}")
    with pytest.raises(BadInput, match="no header"):
        compare.read_logs(f"base:full={bomb}")


def command(capsys, *words: str) -> tuple[int, str]:
    try:
        cli.main(["compare", *words])
    except SystemExit as ended:
        return int(ended.code or 0), capsys.readouterr().err
    return 0, capsys.readouterr().err


WORDS = {
    "no filter": (["--logs", named(HARNESS)], "the filters 'strict-match', 'flexible-extract': choose one with --fil"),
    "no metric": (["--logs", named(INSPECT)], "the metrics 'pattern', 'match': choose one with --metric"),
    "an unknown filter": (["--logs", named(HARNESS), "--filter", "x"], "not 'x'"),
    "an unknown metric": (["--logs", named(INSPECT), "--metric", "x"], "not 'x'"),
    "a filter of inspect": (["--logs", named(INSPECT), "--metric", "match", "--filter", "x"], "has no filters"),
    "two tools": (["--logs", named(HARNESS, grpo=CASES / "grpo.eval"), "--filter", "strict-match"], "of one tool"),
    "a cell twice": (["--logs", f"a:b={CASES}/base.json,a:b={CASES}/base.json", "--metric", "match"], "twice"),
    "no cell": (["--logs", "a.jsonl"], "no cell with its file"),
    "no file": (["--logs", "base:full=none.jsonl"], "There are 0 logs at none.jsonl"),
    "columns": (["--logs", "a:b=c", "--columns", "a=b"], "--columns is about files of --questions, not --logs"),
    "a metric of counts": (["--counts", "a.json", "--metric", "a"], "--metric is about files of --logs"),
    "two inputs": (["--logs", "a:b=c", "--counts", "a.json"], "needs one of"),
    "an unknown verdict": (["--counts", "a.json", "--fail-on", "lost,weak"], "--fail-on has 'weak': expected lost or"),
    "verdicts of a ranking": (["--logs", "a:b=c", "--rank", "--fail-on", "lost"], "no verdicts"),
}


@pytest.mark.parametrize("case", WORDS)
def test_words_that_compare_does_not_know_are_refused(case, tmp_path, capsys):
    words, sentence = WORDS[case]
    code, text = command(capsys, *words, "--out", str(tmp_path / "out"))
    assert code == 2 and sentence in text and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.process
def test_fail_on_gives_exit_code_3_and_names_the_scheme(tmp_path, capsys, monkeypatch):
    counts, out = tmp_path / "counts.json", tmp_path / "out"
    cells = {"full": 12000, "nf4": 11950, "awq": 9000}
    counts.write_text(json.dumps({"n": 20000, "base": dict.fromkeys(cells, 8000), "grpo": cells}))
    code, text = command(capsys, "--counts", str(counts), "--out", str(out), "--fail-on", "lost,inconclusive")
    assert code == 3 and "grpo · awq is lost (gain survival −0.150 [" in text and "nf4" not in text
    assert json.loads((out / "table.json").read_text())["awq"]["verdict"] == "lost"
    assert command(capsys, "--counts", str(counts), "--out", str(out), "--fail-on", "inconclusive")[0] == 0
    counts.write_text(json.dumps({"n": 20000, "base": dict.fromkeys(cells, 8000), "grpo": cells | {"awq": 11000}}))
    code, text = command(capsys, "--counts", str(counts), "--out", str(out), "--fail-on", "reduced")
    assert code == 3 and "grpo · awq is reduced (gain survival −0.050 [" in text and "75 % [" in text
    words = ["--logs", named(HARNESS), "--filter", "strict-match", "--out", str(out)]
    code, text = command(capsys, *words, "--fail-on", "inconclusive")
    assert code == 3 and "grpo · nf4 is inconclusive" in text
    assert command(capsys, *words, "--fail-on", "lost")[0] == 0 == command(capsys, *words)[0]
    assert command(capsys, *words, "--rank")[0] == 0
    rows = tmp_path / "rows.csv"
    compare.read_logs(named(HARNESS), filter="strict-match").to_csv(rows)
    assert command(capsys, "--questions", str(rows), "--out", str(out), "--fail-on", "inconclusive")[0] == 3
    counts.write_text('{"n": 100, "base": {"full": 50}, "grpo": {"full": 60}}')
    code, text = command(capsys, "--counts", str(counts), "--out", str(out), "--fail-on", "lost")
    assert code == 3 and "no scheme is quantized" in text
