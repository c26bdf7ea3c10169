"""Files of completions: graded whatever characters they contain."""

import json

import pytest

from qrl.errors import BadInput
from qrl.tasks import files


def test_rows_come_back_with_their_verdicts_whatever_characters_they_contain(tmp_path):
    rows = [
        {"completion": "so\n#### 1,000 \udc80\ud800", "answer": 1000, "id": "é\u2028\0"},
        {"completion": "#### 1\n#### 2", "answer": "2"},
        {"completion": "", "answer": "2"},
    ]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = files.grade_file("gsm8k", file, out)
    graded = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [{key: row[key] for key in ("completion", "answer")} for row in graded] == [
        {key: row[key] for key in ("completion", "answer")} for row in rows
    ]
    assert graded[0]["id"] == rows[0]["id"]
    assert [(row["parsed"], row["strict"], row["flexible"]) for row in graded] == [
        ("1000", True, True),
        (None, False, True),
        (None, False, False),
    ]
    assert "n = 3: strict 0.3333, flexible 0.6667, parsed 0.3333" in summary


def test_bytes_that_are_not_utf8_are_replaced_and_graded(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'{"completion": "\xff\xfe\\n#### 18 \xed\xa0", "answer": "18"}\n')
    assert "strict 1.0000" in files.grade_file("gsm8k", tmp_path / "in.jsonl", tmp_path / "out.jsonl")


@pytest.mark.parametrize("answer", ["null", "true", "[1]", '{"a": 1}'])
def test_an_answer_that_is_neither_text_nor_number_is_rejected_for_every_task(tmp_path, answer):
    (tmp_path / "in.jsonl").write_text(
        '{"completion": "1", "answer": "1"}\n{"completion": "1", "answer": ' + answer + "}\n"
    )
    for task in ("gsm8k", "math"):
        with pytest.raises(BadInput, match=r"line 2: 'answer' is .*, but must be a text or a number"):
            files.grade_file(task, tmp_path / "in.jsonl", tmp_path / "out.jsonl")


def test_an_output_that_cannot_be_written_is_reported_before_grading(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"completion": "1", "answer": "one"}\n')  # the grader would reject it
    for out in ("none/out.jsonl", "."):
        with pytest.raises(BadInput, match="cannot be written"):
            files.grade_file("gsm8k", tmp_path / "in.jsonl", tmp_path / out)


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, "1", "null", '{"completion": 1, "answer": "1"}', '{"completion": "1", "answer": "one"}', "{"],
)
def test_a_line_that_cannot_be_graded_is_named_and_nothing_is_written(tmp_path, line):
    (tmp_path / "in.jsonl").write_text('{"completion": "1", "answer": "1"}\n' + line)
    with pytest.raises(BadInput, match="line 2"):
        files.grade_file("gsm8k", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_cannot_be_read_or_written_are_told(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"completion": "1", "answer": "1"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    for file, out, reason in [
        ("none.jsonl", "out", "There is no file"),
        ("in.jsonl", "none/out", "cannot be written"),
        ("empty.jsonl", "out", "no rows"),
    ]:
        with pytest.raises(BadInput, match=reason):
            files.grade_file("gsm8k", tmp_path / file, tmp_path / out)


def test_nothing_is_left_where_the_rows_cannot_be_put(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"completion": "#### 3", "answer": "#### 3"}\n')
    (tmp_path / "out").mkdir()
    with pytest.raises(BadInput, match="cannot be written"):
        files.grade_file("gsm8k", tmp_path / "in.jsonl", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out"}


@pytest.mark.parametrize("container", [list, tuple])
def test_a_list_of_rows_is_graded_as_the_same_file_is(tmp_path, container):
    rows = [{"completion": "#### 12", "answer": 12}, {"completion": "#### 11", "answer": "12"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    graded = files.grade(container(rows), "gsm8k")
    assert graded.rows == files.grade(tmp_path / "rows.jsonl", "gsm8k").rows
    assert [row["correct"] for row in graded.rows] == [1, 0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], "has no rows"),
        ([{"completion": "#### 1", "answer": 1}, "#### 1"], "row 2 of the list is a str: expected a dict"),
        ([{"completion": "#### 1"}], "row 1 lacks 'answer'"),
        ({"completion": "#### 1"}, "A dict is no table: give a frame, a list of rows"),
    ],
)
def test_a_list_that_holds_something_else_than_rows_is_refused(data, reason):
    with pytest.raises(BadInput, match=reason):
        files.grade(data, "gsm8k")


def test_a_comparison_that_would_be_refused_is_not_recommended(tmp_path):
    def summary(rows: list[dict]) -> str:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return files.grade_file("gsm8k", tmp_path / "in.jsonl", tmp_path / "out.jsonl")

    def row(variant: str, question: str, **more) -> dict:
        return {"variant": variant, "scheme": "full", "question": question, "completion": "#### 1", "answer": 1} | more

    cells = [row(variant, question) for variant in ("base", "grpo") for question in ("a", "b")]
    assert "Next: " in summary(cells)
    twice = summary([*cells, row("grpo", "b")])
    assert "Next: " not in twice and "'b' is repeated in grpo · full: number several answers" in twice
    sampled = [each | {"sample": sample} for each in cells for sample in (0, 1)]
    assert "Next: " in summary(sampled)
    lone = summary([row("grpo", "a"), row("sft", "a")])
    assert "Next: " not in lone and "the variant `base`" in lone
