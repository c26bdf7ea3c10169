"""The table of cells: study 000's numbers, the contract, pairing, and what is refused."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from qrl import compare
from qrl.errors import BadInput
from qrl.stats.verdict import WORDS
from qrl.steps import compare as steps

SEED_000 = {"n": 100, "base": {"full": 68, "nf4": 65, "awq": 58}, "grpo": {"full": 72, "nf4": 68, "awq": 67}}
RATES = {
    ("base", "full"): 0.65,
    ("base", "nf4"): 0.63,
    ("base", "awq"): 0.62,
    ("grpo", "full"): 0.78,
    ("grpo", "nf4"): 0.76,
    ("grpo", "awq"): 0.62,
}


def questions(rates=RATES, n=1000, seed=0):
    rng = np.random.default_rng(seed)
    difficulty = rng.normal(size=n)
    rows = []
    for (variant, scheme), rate in rates.items():
        correct = (0.8 * difficulty + 0.6 * rng.normal(size=n) < scipy.stats.norm.ppf(rate)).astype(int)
        rows.append(
            pd.DataFrame(
                {"variant": variant, "scheme": scheme, "question": [f"q{i}" for i in range(n)], "correct": correct}
            )
        )
    return pd.concat(rows, ignore_index=True)


@pytest.fixture(scope="module")
def frame():
    return questions()


@pytest.fixture(scope="module")
def comparison(frame):
    return compare.from_questions(frame)


def test_cells_that_got_a_question_in_two_prompts_are_not_subtracted(frame):
    one = frame.assign(prompt_hash=frame["question"].map(str))  # each question its own, as other harnesses record it
    assert compare.from_questions(one).table_json() == compare.from_questions(frame).table_json()
    other = one.assign(prompt_hash=one["prompt_hash"].where(frame["variant"] == "base", "x"))
    with pytest.raises(BadInput, match=r"another prompt .*template_kwargs"):
        compare.from_questions(other)
    older = one.assign(prompt_hash=one["prompt_hash"].where(frame["variant"] == "base"))  # unknown for the others
    compare.from_questions(older)


def test_seed_000_from_counts():
    found = compare.from_counts(SEED_000)
    table = found.table_json()
    assert [table[scheme]["delta"]["estimate"] for scheme in ("full", "nf4", "awq")] == pytest.approx(
        [0.04, 0.03, 0.09]
    )
    assert [table[scheme]["gain_survival"]["estimate"] for scheme in ("nf4", "awq")] == pytest.approx([-0.01, 0.05])
    assert table["full"]["cells"]["base"]["stderr"] == pytest.approx(math.sqrt(0.68 * 0.32 / 100))
    assert table["nf4"]["gain_survival"]["stderr"] == pytest.approx(0.092968, abs=1e-6)
    for scheme in ("nf4", "awq"):
        assert table[scheme]["verdict"] == "inconclusive"
        assert "not shown to be above 0" in table[scheme]["reason"]
    assert found.sentence().count("inconclusive") == 2
    assert "independent" in found.markdown()


def test_the_readmes_worked_example_is_what_is_printed():
    from pathlib import Path

    text, found = (Path(compare.__file__).parent / "README.md").read_text(), compare.from_counts(SEED_000)
    assert json.dumps(SEED_000) in text
    for line in found.markdown().splitlines():
        if line.startswith("| ") and "unpaired" in line:
            assert line.replace(" unpaired |", "") in text
    assert f"change of the gain of {found.row('nf4').verdict.smallest_effect:.3f} with 80 % power" in " ".join(
        text.split()
    )


def test_the_contract_of_table_json(comparison):
    table = json.loads(json.dumps(comparison.table_json(), allow_nan=False))
    assert list(table) == ["full", "nf4", "awq"]
    for scheme, entry in table.items():
        for variant in ("base", "grpo"):
            cell = entry["cells"][variant]
            assert cell["n"] == 1000 and cell["low"] < cell["accuracy"] < cell["high"] and cell["stderr"] > 0
        assert entry["delta"]["low"] < entry["delta"]["estimate"] < entry["delta"]["high"]
        if scheme == "full":  # the reference: survival is not defined
            assert entry["gain_survival"] is entry["verdict"] is entry["p_holm"] is None and entry["loss"] == {}
        else:
            assert set(entry["gain_survival"]) == {"estimate", "stderr", "low", "high"}
            assert entry["verdict"] in WORDS and entry["reason"] and entry["headline"].startswith(entry["verdict"])
            assert set(entry["gain_kept"]) == {"estimate", "stderr", "low", "high"}
            assert (entry["p_value"] is None) == (entry["verdict"] == "inconclusive")
            if entry["p_value"] is not None:
                assert entry["p_value"] <= entry["p_holm"] <= 2 * entry["p_value"]
            assert set(entry["loss"]) == {"base", "grpo"}


def test_numbers_are_those_of_the_questions(frame, comparison):
    wide = frame.pivot(index="question", columns=["variant", "scheme"], values="correct")
    values = (wide["grpo", "nf4"] - wide["base", "nf4"]) - (wide["grpo", "full"] - wide["base", "full"])
    found = comparison.table_json()["nf4"]["gain_survival"]
    assert found["estimate"] == pytest.approx(values.mean(), rel=1e-9)
    assert found["stderr"] == pytest.approx(values.std(ddof=1) / math.sqrt(1000), rel=1e-9)
    pair = comparison.difference(("grpo", "awq"), ("grpo", "full"))
    interval = scipy.stats.ttest_rel(wide["grpo", "awq"], wide["grpo", "full"]).confidence_interval()
    assert pair.high == pytest.approx(interval.high, rel=1e-9)
    assert interval.low - 3e-4 < pair.low <= interval.low  # losses lean to that side: `test_stats.py` says how far
    assert comparison.row("awq").losses["grpo"] == pair


def test_verdicts_of_a_clear_study(comparison):
    """Of a gain of 0.13 nothing is lost under nf4, which 1,000 questions cannot show, and all of it under awq."""
    found = {row.scheme: row.verdict.verdict for row in comparison.rows if row.verdict}
    assert found == {"nf4": "inconclusive", "awq": "lost"}
    assert "nf4: inconclusive: " in comparison.sentence() and "awq: lost, all of it: " in comparison.sentence()
    wider = compare.from_questions(questions(), margin=0.05)
    assert wider.row("nf4").verdict.verdict == "survives" and "nf4: survives: " in wider.sentence()


def test_pairing_narrows_what_independence_cannot(frame, comparison):
    sums = frame.groupby(["variant", "scheme"])["correct"].sum()
    counts = {"n": 1000} | {
        variant: {scheme: int(sums[variant, scheme]) for scheme in ("full", "nf4", "awq")}
        for variant in ("base", "grpo")
    }
    independent = compare.from_counts(counts)
    for row in independent.rows:
        paired = comparison.row(row.scheme)
        assert paired.delta.estimate == pytest.approx(row.delta.estimate)
        assert paired.delta.stderr < row.delta.stderr


def test_partial_credit_has_t_intervals_no_mcnemar_and_no_right_or_wrong(frame, tmp_path):
    draw = np.random.default_rng(3)
    credit = frame.assign(correct=frame["correct"] * draw.choice([0.5, 0.75, 1.0], len(frame)))
    found = compare.from_questions(credit)
    wide = credit.pivot(index="question", columns=["variant", "scheme"], values="correct")
    accuracy = found.cells["grpo", "full"]
    assert accuracy.estimate == pytest.approx(wide["grpo", "full"].mean())
    assert accuracy.stderr == pytest.approx(wide["grpo", "full"].std(ddof=1) / math.sqrt(1000))
    assert accuracy.low < accuracy.estimate < accuracy.high
    interval = scipy.stats.ttest_rel(wide["grpo", "nf4"], wide["base", "nf4"]).confidence_interval()
    assert found.row("nf4").delta.low == pytest.approx(interval.low, abs=3e-4)
    assert all(row.mcnemar is None for row in found.rows) and not found.pass_at
    answers, nf4, full = found.answers["grpo", "nf4"], wide["grpo", "nf4"], wide["grpo", "full"]
    assert (answers.right_to_wrong, answers.wrong_to_right) == ((nf4 < full).sum(), (nf4 > full).sum())
    text = found.markdown()
    assert "p of gain (t)" in text and "| less credit | more credit |" in text and "right → wrong" not in text
    assert set(found.changed_sample()["change"]) == {"less credit", "more credit", "right → wrong", "wrong → right"}
    credit.astype({"correct": str}).to_csv(tmp_path / "credit.csv", index=False)
    assert compare.compare(tmp_path / "credit.csv").table_json() == found.table_json()
    credit.to_parquet(tmp_path / "credit.parquet")
    assert compare.compare(tmp_path / "credit.parquet").table_json() == found.table_json()


def test_pass_at_k_is_not_defined_with_partial_credit(frame):
    twice = pd.concat([frame.assign(sample=0), frame.assign(sample=1, correct=frame["correct"] / 2)])
    assert not compare.from_questions(twice).pass_at
    assert compare.from_questions(pd.concat([frame.assign(sample=0), frame.assign(sample=1)])).pass_at


def test_order_of_rows_and_columns_does_not_matter(frame, comparison):
    shuffled = frame.sample(frac=1, random_state=1)[["correct", "question", "scheme", "variant"]]
    assert compare.from_questions(shuffled).table_json() == comparison.table_json()


def test_a_claim_that_holm_does_not_bear_out_is_marked():
    found = compare.from_counts(
        {"n": 1000, "base": {"full": 600, "nf4": 600, "awq": 600}, "grpo": {"full": 800, "nf4": 749, "awq": 790}}
    )
    nf4, awq = found.row("nf4"), found.row("awq")
    assert (nf4.verdict.verdict, awq.verdict.verdict) == ("reduced", "inconclusive")
    assert nf4.verdict.p_value < 0.05 < nf4.p_holm == pytest.approx(2 * nf4.verdict.p_value)
    assert nf4.holds_after_holm is False and awq.holds_after_holm is None
    assert found.markdown().count("but not after Holm's correction") == 1
    assert found.table_json()["nf4"]["holds_after_holm"] is False
    alone = compare.from_counts({"n": 1000, "base": {"full": 600, "nf4": 600}, "grpo": {"full": 800, "nf4": 749}})
    assert alone.row("nf4").holds_after_holm is True and "but not after Holm's correction" not in alone.markdown()


def test_the_t_test_and_the_bootstrap_stand_beside_the_closed_form(frame, comparison):
    wide = frame.pivot(index="question", columns=["variant", "scheme"], values="correct")
    entry = comparison.table_json()["nf4"]
    assert entry["p_delta"] == pytest.approx(
        scipy.stats.ttest_rel(wide["grpo", "nf4"], wide["base", "nf4"]).pvalue, rel=1e-9
    )
    for name in ("delta", "gain_survival"):
        assert entry["bootstrap"][name]["estimate"] == pytest.approx(entry[name]["estimate"])
        for end in ("low", "high"):
            assert entry["bootstrap"][name][end] == pytest.approx(entry[name][end], abs=0.15 * entry[name]["stderr"])
    said = re.search(
        r"A paired bootstrap over questions \(10,000 resamples, seeded\) .* more than (0\.\d+)\.", comparison.markdown()
    )
    ends = [
        abs(getattr(row.bootstrap[name], end) - getattr(getattr(row, name), end))
        for row in comparison.rows
        for name in row.bootstrap
        for end in ("low", "high")
    ]
    assert float(said[1]) == pytest.approx(max(*ends, 0.001), abs=6e-4)


def test_a_bootstrap_that_disagrees_with_an_interval_is_no_reassurance(frame):
    few = frame[frame["question"].isin(sorted(frame["question"].unique())[:12])].assign(correct=1)
    said = compare.from_questions(few).markdown()
    assert "more than" not in said.partition("A paired bootstrap")[2].partition("\n")[0]
    assert "Too few answers change for a bootstrap" in said


def test_metrics_have_the_agreed_names(comparison):
    metrics = comparison.metrics()
    names = [f"compare/delta_{scheme}" for scheme in ("full", "nf4", "awq")] + [
        f"compare/{name}_{scheme}" for name in ("gain_survival", "gain_kept") for scheme in ("nf4", "awq")
    ]
    changes = [f"compare/{way}_{scheme}" for way in ("right_to_wrong", "wrong_to_right") for scheme in ("nf4", "awq")]
    expected = {name + end for name in names for end in ("", "_stderr", "_low", "_high")}
    assert set(metrics) == expected | {name + of for name in changes for of in ("", "_base")}
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_no_difference_without_interval_and_no_rate_without_n(comparison):
    for line in comparison.markdown().splitlines():
        if line.startswith(("| full", "| nf4", "| awq")) and "±" in line:
            assert line.count("(n = 1000)") == 2
            assert line.count("[") == (1 if "reference" in line else 3)
    assert all("[" in line and "n = 1000" in line for line in comparison.sentence().splitlines())


def test_more_variants_and_labels_of_ones_own():
    rates = {(variant, scheme): 0.6 for variant in ("mine", "base", "grpo") for scheme in ("my 2-bit", "full", "int8")}
    found = compare.from_questions(questions(rates, n=100))
    assert found.variants == ("base", "grpo", "mine") and found.schemes == ("full", "int8", "my 2-bit")
    assert found.table_json()["int8"]["trained"] == "grpo"
    assert found.table_json()["int8"]["others"]["mine"]["delta"]["estimate"] == found.row("int8", "mine").delta.estimate
    assert "compare/gain_survival_int8_mine" in found.metrics()
    assert found.sentence().count("mine under ") == 2


def test_full_is_shown_with_the_dtype_it_was_computed_in_and_called_full_everywhere_else(frame, comparison):
    named = compare.from_questions(frame.assign(dtype="bfloat16"))
    table = named.table_json()
    assert list(table) == ["full", "nf4", "awq"] and named.metrics() == comparison.metrics()
    assert [entry["label"] for entry in table.values()] == ["full (bf16)", "nf4", "awq"]
    assert "| full (bf16) | 0." in named.markdown() and "| scheme − full (bf16) |" in named.markdown()
    assert "full (" not in comparison.markdown() and comparison.table_json()["full"]["label"] == "full"
    for mixed in (
        frame["variant"].map({"base": "float32", "grpo": "float16"}),
        frame["variant"].map({"base": "float32"}),
    ):
        assert compare.from_questions(frame.assign(dtype=mixed)).scheme_label("full") == "full"
    quantized = frame["scheme"].map({"full": "float32", "nf4": "float16", "awq": "float16"})
    assert compare.from_questions(frame.assign(dtype=quantized)).scheme_label("full") == "full (fp32)"


def test_gain_survival_is_a_difference_of_two_gains(comparison):
    cells = comparison.cells
    found = compare.gain_survival(
        lambda weights: sum(w * cells[cell].estimate for cell, w in weights.items()), "grpo", "nf4"
    )
    assert found == pytest.approx(comparison.row("nf4").gain_survival.estimate)
    assert found == pytest.approx(comparison.row("nf4").delta.estimate - comparison.row("full").delta.estimate)


def test_full_precision_alone_has_a_gain_but_no_survival():
    found = compare.from_counts({"n": 100, "base": {"full": 60}, "grpo": {"full": 80}})
    assert "gain survival is not defined" in found.sentence() and "[" in found.sentence()
    assert list(found.metrics()) == [f"compare/delta_full{end}" for end in ("", "_stderr", "_low", "_high")]
    assert "reference" in found.markdown()


def test_clusters_widen_what_repeats():
    frame = questions(n=200)
    copies = pd.concat(
        [frame.assign(question=frame["question"] + f"-{i}", cluster=frame["question"]) for i in range(4)]
    )
    once, naive, clustered = (compare.from_questions(f) for f in (frame, copies.drop(columns="cluster"), copies))
    assert naive.row("nf4").delta.stderr == pytest.approx(once.row("nf4").delta.stderr / 2, rel=0.01)
    assert clustered.row("nf4").delta.stderr == pytest.approx(once.row("nf4").delta.stderr)
    assert clustered.cells["base", "nf4"].high == pytest.approx(once.cells["base", "nf4"].high, rel=0.001)
    assert "clustered over 200 groups" in clustered.markdown()


def test_a_file_comes_back_as_it_went(frame, comparison, tmp_path):
    frame.to_parquet(tmp_path / "q.parquet")
    frame.to_csv(tmp_path / "q.csv", index=False)
    frame.to_json(tmp_path / "q.jsonl", orient="records", lines=True)
    for name in ("q.parquet", "q.csv", "q.jsonl"):
        assert compare.from_questions(compare.read_questions(tmp_path / name)).table_json() == comparison.table_json()
    (tmp_path / "c.json").write_text(json.dumps(SEED_000))
    assert compare.read_counts(tmp_path / "c.json") == SEED_000


def test_write_leaves_tables_and_figures_and_nothing_else(comparison, tmp_path):
    steps.write(comparison, tmp_path / "new" / "out")
    files = {
        str(path.relative_to(tmp_path / "new" / "out"))
        for path in (tmp_path / "new" / "out").rglob("*")
        if path.is_file()
    }
    assert files == {"table.md", "table.json", "changed_answers.json", "figures/matrix.png", "figures/survival.png"}
    assert json.loads((tmp_path / "new/out/table.json").read_text()) == comparison.table_json()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        steps.write(comparison, tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: f.drop(columns="correct"), "lacks 'correct'"),
        (lambda f: f.head(0), "is empty"),
        (lambda f: f.assign(correct=f["correct"] * 2), "'correct' is 2"),
        (lambda f: f.assign(correct=f["correct"] * 3), "must be 0 or 1, or a partial credit"),
        (lambda f: f.assign(correct=f["correct"] - 0.5), "-0.5 in .* must be 0 or 1"),
        (lambda f: f.assign(correct=["nan", *f["correct"][1:].astype(str)]), "'nan' in 1 row"),
        (lambda f: f.assign(correct=[float("inf"), *f["correct"][1:]]), "inf in 1 row"),
        (lambda f: f.assign(correct="yes"), "'correct' is 'yes'"),
        (lambda f: f.assign(correct=f["correct"].where(f.index > 0)), "'correct' has 1 empty"),
        (lambda f: pd.concat([f, f.head(1)]), "more than once"),
        (lambda f: f.iloc[1:], "lacks 1 of 20 questions, 'q0'"),
        (lambda f: f[f["scheme"] != "full"], "measured from 'full'"),
        (lambda f: f[f["variant"] == "base"], "only variant"),
        (lambda f: f[f["variant"] == "grpo"], "measured from 'base'"),
        (lambda f: f[(f["variant"] == "base") | (f["scheme"] != "awq")], "Cell grpo · awq is missing"),
        (lambda f: f[f["question"] == "q0"], "There is 1 question"),
        (lambda f: f.assign(scheme=f["scheme"].replace("awq", "a|q")), "'a|q' is not a valid label"),
        (lambda f: f.assign(scheme=f["scheme"].replace("awq", "a" * 201)), "200 at most"),
        (lambda f: f.assign(cluster=f.index % 3), "has no single cluster"),
        (lambda f: f.assign(cluster="all"), "All questions are in one cluster"),
        (lambda f: f.assign(cluster=[[1, 2]] * len(f)), "The column 'cluster' holds"),
        (lambda f: f.assign(sample=[np.array([0])] * len(f)), "The column 'sample' holds"),
        (lambda f: f.assign(question=[{"id": 1}] * len(f)), "The column 'question' holds"),
    ],
)
def test_outcomes_that_cannot_be_compared_are_refused_in_a_sentence(change, sentence):
    with pytest.raises(BadInput, match=sentence.replace("|", r"\|")) as error:
        compare.from_questions(change(questions(n=20)))
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ({}, "'n' is None"),
        ({"n": 1, "base": {"full": 1}, "grpo": {"full": 1}}, "at least 2"),
        ({"n": 10**400, "base": {"full": 1}, "grpo": {"full": 1}}, "at most"),
        ({"n": 100}, "name no cell"),
        ({"n": 100, "base": 68}, "must map schemes"),
        ({"n": 100, "base": {"full": 101}, "grpo": {"full": 1}}, "from 0 to n = 100"),
        ({"n": 100, "base": {"full": 0.68}, "grpo": {"full": 1}}, "whole number"),
        ({"n": 100, "base": {"full": 68}, "grpo": {"nf4": 1}}, "Cell base · nf4 is missing"),
    ],
)
def test_counts_that_cannot_be_compared_are_refused_in_a_sentence(counts, sentence):
    with pytest.raises(BadInput, match=sentence):
        compare.from_counts(counts)


def test_files_that_cannot_be_read_are_refused_in_a_sentence(tmp_path):
    (tmp_path / "q.parquet").write_bytes(b"not parquet")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "c.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "twice.json").write_text('{"n": 100, "base": {"full": 68, "full": 3}, "grpo": {"full": 72}}')
    with pytest.raises(BadInput, match=r"twice\.json is not valid JSON: 'full' is given twice"):
        compare.read_counts(tmp_path / "twice.json")
    for read, name in (
        (compare.read_questions, "q.parquet"),
        (compare.read_questions, "empty.csv"),
        (compare.read_questions, "no.csv"),
        (compare.read_questions, "q.xlsx"),
        (compare.read_counts, "c.json"),
        (compare.read_counts, "list.json"),
        (compare.read_counts, "no.json"),
    ):
        with pytest.raises(BadInput, match=name):
            read(tmp_path / name)


def test_margins_and_cells_out_of_range(comparison):
    with pytest.raises(BadInput, match="between 0 and 1"):
        compare.from_counts(SEED_000, margin=1.5)
    with pytest.raises(BadInput, match="There is no cell grpo · fp8"):
        comparison.difference(("grpo", "fp8"), ("grpo", "full"))


def test_groups_of_another_size_are_shown_with_their_scheme(frame):
    sizes = frame["scheme"].map({"awq": 64, "nf4": 128})
    shown = compare.from_questions(frame.assign(group_size=sizes))
    assert [shown.scheme_label(scheme) for scheme in shown.schemes] == ["full", "nf4", "awq (groups of 64)"]
    assert "| awq (groups of 64) |" in shown.markdown() and "nf4 (groups" not in shown.markdown()
    assert shown.table_json()["awq"]["label"] == "awq (groups of 64)"
    other = compare.from_questions(frame.assign(group_size=sizes.where(frame["question"] != "q0", 32)))
    assert other.scheme_label("awq") == "awq"  # of two sizes none is named
    assert compare.from_questions(frame).scheme_label("awq") == "awq"


def test_schemes_of_some_layers_are_shown_with_them(frame):
    layers = frame["scheme"].map({"awq": "mlp,-first:2"})
    sizes = frame["scheme"].map({"awq": 64})
    shown = compare.from_questions(frame.assign(layers=layers, group_size=sizes))
    label = "awq (groups of 64; layers mlp,-first:2)"
    assert [shown.scheme_label(scheme) for scheme in shown.schemes] == ["full", "nf4", label]
    assert f"| {label} |" in shown.markdown() and shown.table_json()["awq"]["label"] == label
    two = layers.where(frame["question"] != "q0", "attention")
    assert compare.from_questions(frame.assign(layers=two)).scheme_label("awq") == "awq"  # of two none is named


@pytest.mark.parametrize("margin", ["0.1", True, math.nan, 0, 1])
def test_a_margin_that_is_no_loss_of_accuracy_is_refused_in_a_sentence(frame, margin):
    with pytest.raises(BadInput, match=r"margin is .* but must be between 0 and 1"):
        compare.compare(frame, margin=margin)


def test_where_everything_changes_no_p_is_0_and_0_of_0_is_no_ratio():
    cells = {("base", "full"): 0, ("grpo", "full"): 1, ("base", "nf4"): 0, ("grpo", "nf4"): 0}
    rows = [
        {"variant": variant, "scheme": scheme, "question": question, "correct": correct}
        for (variant, scheme), correct in cells.items()
        for question in range(2000)
    ]
    found = compare.compare(pd.DataFrame(rows))
    table = found.markdown()
    assert "| 0 |" not in table and "−0," not in table and "−0]" not in table
    assert "below 1e-12" in table
    assert "nothing is left to compare" in table and found.table_json()["nf4"]["scales_agree"] is None
    assert min(found.table_json()["full"]["mcnemar"], found.table_json()["nf4"]["p_value"]) > 0
