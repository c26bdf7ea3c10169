"""Notes on what a comparison rests on: stored updates, and variants that answer alike, from frames and from files."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from qrl import compare, names
from qrl.compare import notes
from qrl.formats.kept import Kept
from qrl.steps import compare as steps

LOST = Kept(0.04, 0.999, 0.015, "bfloat16")
WHOLE = Kept(1.0, 0.999, 0.999, "float32")


def rows(variant, scheme, texts, seed=0, **more):
    values = {"question": [f"q{i}" for i in range(len(texts))], "completion": texts}
    values |= {"correct": [int(len(text) % 2) for text in texts], "n_tokens": [len(text) for text in texts]}
    return pd.DataFrame({"variant": variant, "scheme": scheme, **values, "seed": seed} | more)


SAME = ["a", "bb", "ccc", "dddd"]
OTHER = ["a", "bb", "ccc", "dxdd"]  # of the same lengths and outcomes: only its text tells it apart


def study(trained=SAME, quantized=SAME, **more):
    cells = {("base", "full"): SAME, ("grpo", "full"): trained, ("base", "nf4"): SAME, ("grpo", "nf4"): quantized}
    return pd.concat([rows(*cell, texts, **more) for cell, texts in cells.items()], ignore_index=True)


def alike(frame):
    return notes.find_alike(compare.from_questions(frame).answered)


def test_variants_with_equal_texts_are_found_by_scheme():
    assert alike(study()) == [notes.Alike("base", "grpo", ("full", "nf4"), 4)]
    assert alike(study(trained=OTHER)) == [notes.Alike("base", "grpo", ("nf4",), 4)]
    assert alike(study(trained=OTHER, quantized=OTHER)) == []
    assert alike(study(trained=["a", "b", "ccc", "dddd"], quantized=OTHER)) == []  # another outcome
    assert alike(study(quantized=["a", "bb", "ccc", "dddddd"], trained=OTHER)) == []  # another length


def test_the_order_of_rows_decides_nothing_and_every_seed_must_be_alike():
    shuffled = study().sample(frac=1, random_state=0)
    assert alike(shuffled) == alike(study())
    two = pd.concat([study(), rows("grpo", "full", SAME, seed=1), rows("grpo", "nf4", OTHER, seed=1)])
    assert alike(two) == [notes.Alike("base", "grpo", ("full",), 4)]


@pytest.mark.parametrize("lacks", ["completion", "all"])
def test_nothing_is_said_where_texts_are_unknown(lacks):
    frame = study()
    assert alike(frame.drop(columns="completion") if lacks == "completion" else frame.assign(completion=None)) == []


def test_texts_are_read_from_files_where_the_table_does_not_hold_them(tmp_path):
    for name, frame in (("same", study()), ("other", study(trained=OTHER, quantized=OTHER))):
        frame.to_parquet(tmp_path / f"{name}.parquet")
        read = compare.read_questions(tmp_path / f"{name}.parquet", whole=False)
        assert "completion" not in read and bool(alike(read)) == (name == "same")


def test_a_note_for_each_training_with_warnings_first():
    found = notes.notes_on_updates(
        [
            notes.Stored("grpo", "0", WHOLE, "train.store_dtype=fp32"),
            notes.Stored("sft", "", LOST, "train.store_dtype=fp32"),
        ]
    )
    assert found[0].startswith(f"{notes.WARNING}sft: ") and "train.store_dtype=fp32" in found[0]
    assert "The stored weights of grpo, seed 0 (fp32) keep 100 % of the update" in found[1]
    assert "sft (bf16) keep 4 %" in found[2] and len(found) == 3


@pytest.mark.process
def test_the_notes_stand_in_the_table_and_beside_it(tmp_path):
    comparison = compare.from_questions(study(trained=OTHER, group_size=64.0))
    found = [*steps.notes_on(comparison), *notes.notes_on_updates([notes.Stored("grpo", "", LOST, "x")])]
    text = steps.write(comparison, tmp_path, found)
    assert json.loads((tmp_path / names.NOTES_JSON).read_text()) == found
    (warning,) = re.findall(r"- \*\*Warning:\*\* base and grpo gave the same text .*", text)
    assert "each of the 4 questions under nf4 (groups of 64)" in warning and "store_dtype" in warning
    assert notes.TITLE in text and "keep 4 % of the update" in text and (tmp_path / names.TABLE_MD).read_text() == text
    quiet = steps.write(compare.from_questions(study(OTHER, OTHER)), tmp_path / "quiet")
    assert notes.TITLE not in quiet and not (tmp_path / "quiet" / names.NOTES_JSON).exists()


def test_a_large_table_without_equal_answers_is_not_searched_in_its_texts(monkeypatch):
    generator = np.random.default_rng(0)
    texts = ["x" * int(length) for length in generator.integers(1, 9, 500)]
    frame = pd.concat([rows("base", "full", texts), rows("grpo", "full", texts[::-1])], ignore_index=True)

    def refuse(*args):
        raise AssertionError("texts were read")

    monkeypatch.setattr(notes, "_texts", refuse)
    assert notes.find_alike(compare.from_questions(frame).answered) == []
