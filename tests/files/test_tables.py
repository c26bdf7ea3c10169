"""Tables of the user: four formats, a file per cell, other names; what is broken gets a sentence of ours."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from qrl import cli, compare
from qrl.cli import ending
from qrl.compare import ranking
from qrl.errors import BadInput
from qrl.files import tables
from qrl.tasks import files

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("in_process")]
CELLS = [(variant, scheme) for variant in ("base", "grpo") for scheme in ("full", "nf4")]


@pytest.fixture
def in_process(monkeypatch):
    """Let a command run in this process, whose signals and libraries keep their settings."""
    monkeypatch.setattr(ending.process, "prepare_process", lambda: None)
    monkeypatch.setattr(ending.signals, "guard", lambda **_: None)


def rows(n: int = 40, **changes) -> list[dict]:
    right = {("base", "full"): 2, ("grpo", "full"): 7, ("base", "nf4"): 2, ("grpo", "nf4"): 6}
    return [
        {"variant": v, "scheme": s, "question": f"q{i}", "correct": int(i % 10 < right[v, s])} | changes
        for v, s in CELLS
        for i in range(n)
    ]


def frame(**changes) -> pd.DataFrame:
    return pd.DataFrame(rows(**changes))


def verdicts(comparison: compare.Comparison) -> dict:
    return {scheme: entry["delta"] for scheme, entry in comparison.table_json().items()}


@pytest.mark.slow
def test_every_format_gives_the_same_comparison(tmp_path):
    table, expected = frame(), compare.from_questions(frame()).table_json()
    table.to_parquet(tmp_path / "q.parquet")
    table.to_csv(tmp_path / "q.csv", index=False)
    table.to_csv(tmp_path / "excel.csv", index=False, sep=";", encoding="utf-8-sig")
    table.to_json(tmp_path / "q.json", orient="records")
    table.assign(correct=table["correct"] == 1).to_json(tmp_path / "q.jsonl", orient="records", lines=True)
    for name in ("q.parquet", "q.csv", "excel.csv", "q.json", "q.jsonl"):
        assert compare.compare(tmp_path / name).table_json() == expected, name
    assert compare.compare(table.astype({"variant": "category", "scheme": "category"})).table_json() == expected
    assert compare.compare(table.astype({"correct": "boolean", "question": "string"})).table_json() == expected


@pytest.mark.slow
def test_other_names_for_columns_and_full_precision(tmp_path):
    table = frame().replace({"scheme": {"full": "bf16"}})
    table = table.rename(columns={"correct": "exact_match", "question": "doc_id"}).assign(correct="not this one")
    table.to_json(tmp_path / "q.jsonl", orient="records", lines=True)
    names = {"correct": "exact_match", "question": "doc_id"}
    for data in (table, tmp_path / "q.jsonl"):
        found = compare.compare(data, columns=names, reference="bf16")
        assert verdicts(found) == verdicts(compare.from_questions(frame()))
        assert "| full (bf16) |" in found.markdown()
    ranked = ranking.measure(compare.read_questions(tmp_path / "q.jsonl", columns=names, reference="bf16"))
    assert ranked.cell_label(("grpo", "full")) == "grpo · full (bf16)"
    counts = {"n": 100, "base": {"bf16": 60, "nf4": 58}, "grpo": {"bf16": 80, "nf4": 78}}
    assert "| full (bf16) |" in compare.compare(counts, reference="bf16").markdown()
    with pytest.raises(BadInput, match="the schemes are bf16, nf4"):
        compare.compare(table, columns=names, reference="fp32")


@pytest.mark.slow
def test_a_file_per_cell(tmp_path):
    for variant, scheme in CELLS:
        part = [row for row in rows() if (row["variant"], row["scheme"]) == (variant, scheme)]
        pd.DataFrame(part)[["question", "correct"]].to_csv(tmp_path / f"{variant}-{scheme}.csv", index=False)
    source = ", ".join(f"{v}:{s}={tmp_path}/{v}-{s}.csv" for v, s in CELLS)
    assert compare.compare(source).table_json() == compare.from_questions(frame()).table_json()


def completions(tmp_path, **changes) -> str:
    """Write a file of completions per cell, without ids of questions; return them as `grade` reads them."""
    for variant, scheme in CELLS:
        part = [row for row in rows() if (row["variant"], row["scheme"]) == (variant, scheme)]
        lines = [
            {"completion": f"#### {7 if row['correct'] else 8}", "answer": "7", "question": row["question"]}
            for row in part
        ]
        (tmp_path / f"{variant}-{scheme}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ",".join(f"{v}:{s}={tmp_path}/{v}-{s}.jsonl" for v, s in CELLS)


def test_from_grade_to_compare_in_two_commands(tmp_path, capsys):
    source, graded = completions(tmp_path), str(tmp_path / "graded.jsonl")
    cli.main(["grade", "--task", "gsm8k", source, "--out", graded])
    said = capsys.readouterr().out
    assert "| grpo · nf4 | 40 | 0.600 ± 0.077 |" in said
    following = re.search(r"python -m qrl (compare --questions \S+ --out) DIR", said)[1]
    cli.main([*following.split(), str(tmp_path / "out")])
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert {scheme: entry["delta"] for scheme, entry in table.items()} == verdicts(compare.from_questions(frame()))


def test_a_frame_is_graded_and_shows_its_rates():
    data = pd.DataFrame([{"output": "#### 7", "target": 7}, {"output": "about 7", "target": 7}])
    graded = files.grade(data, "gsm8k", columns={"completion": "output", "answer": "target"})
    assert graded.frame["correct"].tolist() == [1, 0] and str(graded) == graded._repr_markdown_()
    assert "| all | 2 | 0.500 ± 0.354 | 1.000 ± 0.000 | 0.500 ± 0.354 |" in str(graded)
    with pytest.raises(BadInput, match="row 1 lacks"):
        files.grade(data, "gsm8k")


BROKEN = {
    "no such file": ("none.csv", None, "There is no file"),
    "a folder": ("folder.csv", None, "no file"),
    "another format": ("q.xlsx", b"PK", "read from .parquet, .csv, .json, .jsonl"),
    "no suffix": ("q", b"", "ends in ''"),
    "an empty CSV": ("q.csv", b"", "has no rows"),
    "a header alone": ("q.csv", b"variant,scheme,question,correct\n", "has no rows"),
    "a line too long": ("q.csv", b"variant,scheme,question,correct\nbase,full,a,1\nbase,full,b,1,9\n", "line 3 has 5"),
    "a line too short": ("q.csv", b"variant,scheme,question,correct\nbase,full,a\n", "line 2 has 3 values"),
    "an open quotation": ("q.csv", b'variant,scheme,question,correct\nbase,full,"a,1\n', "quotation mark"),
    "a column twice": ("q.csv", b"variant,variant,scheme,question,correct\nbase,base,full,a,1\n", "two columns"),
    "a parquet file as CSV": ("q.csv", b"PAR1\x00\x15\x04\nrow", "lacks 'variant'"),
    "CSV as parquet": ("q.parquet", b"variant,scheme,question,correct\n", "is no parquet file"),
    "a parquet file cut off": ("cut.parquet", b"PAR1\x15\x04\x15", "is no parquet file"),
    "an empty parquet file": ("q.parquet", b"", "is no parquet file"),
    "JSON cut off": ("q.json", b'[{"variant": "base"', "is not JSON"),
    "a JSON object": ("q.json", b'{"variant": {"0": "base"}}', "holds a JSON dict"),
    "a JSON array of numbers": ("q.json", b"[1, 2]", "row 1 is a JSON int"),
    "brackets by the thousand": ("q.json", b"[" * 100_000, "is not JSON"),
    "JSONL with a broken line": ("q.jsonl", b'{"variant": "base"}\n{', "line 2 is not JSON"),
    "JSONL with a text": ("q.jsonl", b'"base"\n', "line 1 is a JSON str"),
    "UTF-16, as a shell of Windows redirects": (
        "q.jsonl",
        '{"variant": "base"}'.encode("utf-16"),
        "is in UTF-16, as Excel and PowerShell write texts, but UTF-8 was expected: save it as UTF-8",
    ),
    "CSV in UTF-16 without a mark": ("q.csv", "variant,scheme".encode("utf-16-le"), "is in UTF-16LE"),
    "JSON in UTF-32": ("q.json", '[{"variant": 1}]'.encode("utf-32"), "is in UTF-32"),
    "no outcome": ("q.csv", b"variant,scheme,question\nbase,full,a\n", "lacks 'correct'"),
    "an outcome in words": ("q.csv", b"variant,scheme,question,correct\nbase,full,a,yes\n", "'correct' is 'yes'"),
    "a missing outcome": ("q.csv", b"variant,scheme,question,correct\nbase,full,a,\nbase,full,b,1\n", "1 empty"),
    "a scheme that is a list": (
        "q.jsonl",
        b'{"variant": "base", "scheme": ["full"], "question": 1, "correct": 1}\n',
        "'scheme' holds values such as",
    ),
    "an endless number": (
        "q.jsonl",
        b'{"variant": "base", "scheme": "full", "question": 1, "correct": 1' + b"0" * 4000 + b"}\n",
        "'correct' is 1000",
    ),
    "a seed beyond any number": (
        "q.jsonl",
        b'{"variant": "base", "scheme": "full", "question": 1, "correct": 1, "seed": 1' + b"0" * 400 + b"}\n",
        "only variant",
    ),
    "schemes of two kinds": (
        "q.jsonl",
        b'{"variant": 1, "scheme": 4, "question": 1, "correct": 1, "settings_digest": "a"}\n'
        b'{"variant": "base", "scheme": "full", "question": 1, "correct": 1, "settings_digest": "b"}\n',
        "is missing",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_gets_a_sentence_and_exit_code_2(case, tmp_path, capsys):
    name, content, says = BROKEN[case]
    (tmp_path / "folder.csv").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "--questions", str(tmp_path / name), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and says in error, error
    assert error.startswith("qrl: ") and error.rstrip().endswith(".") and error.count("\n") == 1, error
    assert not re.search(r"pandas|pyarrow|Parquet magic|tokeniz|Traceback|Errno|numpy", error), error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--columns", "correct"], "--columns has the item 'correct'"),
        (["--columns", "correct=a,correct=b"], "repeats a name"),
        (["--columns", "correct=hit"], "has no column 'hit': its columns are variant, scheme, question, correct"),
        (["--columns", "question=id"], "has no column 'id'"),
        (["--reference", "bf16"], "the schemes are full, nf4"),
        (["--reference", "nf4"], "the scheme 'nf4' and the scheme 'full', but only one"),
    ],
)
def test_names_that_the_file_lacks(words, says, tmp_path, capsys):
    frame().to_csv(tmp_path / "q.csv", index=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "--questions", str(tmp_path / "q.csv"), "--out", str(tmp_path / "out"), *words])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_a_renaming_the_wrong_way_round_gets_a_hint():
    with pytest.raises(BadInput, match=r"no column 'correct'.* Our name comes first: --columns correct=hit\."):
        tables.read_rows(frame().rename(columns={"correct": "hit"}), {"hit": "correct"})


def test_values_of_no_label_get_a_sentence_too():
    lists = [np.array([1])] * len(frame())
    for column in ("dtype", "engine", "settings_digest"):
        with pytest.raises(BadInput, match=f"The column '{column}' holds values such as"):
            compare.compare(frame().assign(**{column: lists}))
    some = frame().assign(seed=[0.0, None] * (len(frame()) // 2), settings_digest="a")
    with pytest.raises(BadInput, match="answers without a seed"):
        compare.compare(some)
    with pytest.raises(BadInput, match="A NoneType is no table"):
        compare.compare(None)


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path):
    rows = [{"variant": "base", "scheme": "full", "question": "q", "completion": "\ud800", "correct": 1}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert tables.read_frame(tmp_path / "a.jsonl")["completion"].tolist() == ["?"]


def test_a_cell_without_its_file(tmp_path):
    frame().to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(BadInput, match="'grpo' is no cell with its file"):
        tables.read_rows(f"base:full={tmp_path}/a.csv,grpo")


@pytest.mark.slow
def test_the_samples_of_another_harness(tmp_path, capsys):
    """Files as lm-evaluation-harness writes them: a line per question and filter, an object per question."""
    for variant, scheme in CELLS:
        part = [row for row in rows() if (row["variant"], row["scheme"]) == (variant, scheme)]
        lines = [
            {
                "doc_id": number,
                "doc": {"question": "?", "answer": "#### 7"},
                "resps": [["#### 7"]],
                "filter": kind,
                "exact_match": float(row["correct"] if kind == "strict-match" else 1),
            }
            for kind in ("strict-match", "flexible-extract")
            for number, row in enumerate(part)
        ]
        (tmp_path / f"{variant}-{scheme}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = ",".join(f"{v}:{s.replace('full', 'bf16')}={tmp_path}/{v}-{s}.jsonl" for v, s in CELLS)
    words = [
        "compare",
        "--questions",
        source,
        "--columns",
        "question=doc_id,correct=exact_match",
        "--reference",
        "bf16",
    ]
    with pytest.raises(SystemExit):
        cli.main([*words, "--out", str(tmp_path / "out")])
    assert "more than once" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*words, "--where", "filter=loose", "--out", str(tmp_path / "out")])
    assert "filter=loose: that column holds strict-match, flexible-extract" in capsys.readouterr().err
    cli.main([*words, "--where", "filter=strict-match", "--out", str(tmp_path / "out")])
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert {scheme: entry["delta"] for scheme, entry in table.items()} == verdicts(compare.from_questions(frame()))
