"""The table of methods: each cell against base and against full precision, paired, whatever its scheme."""

import json

import mlflow
import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from qrl import cli, compare, figures, names, recipe, stats
from qrl.compare import answers, convergence, ranking
from qrl.errors import BadInput
from qrl.stats.text import interval
from qrl.study import arms as study
from qrl.tracking import contents

RATES = {("base", "full"): 0.3, ("grpo", "full"): 0.7, ("grpo", "nf4"): 0.6, ("qat-int4", "rtn-int4"): 0.8}


def frame(cells=RATES, n=400, seeds=("0",), seed=0):
    generator = np.random.default_rng(seed)
    rows = []
    for run in seeds:
        for (variant, scheme), rate in cells.items():
            for question, right in enumerate(generator.random(n) < rate):
                rows.append((variant, scheme, run, f"q{question}", int(right), f"{variant}{scheme}"))
    return pd.DataFrame(rows, columns=["variant", "scheme", "seed", "question", "correct", "settings_digest"])


def test_methods_need_no_common_scheme_and_stand_best_first_with_paired_intervals():
    found = frame()
    text = ranking.markdown(ranking.measure(found))
    ranked = text.partition("## Answers")[0]
    lines = [
        line for line in ranked.splitlines() if line.startswith("| ") and "---" not in line and "method" not in line
    ]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == ["qat-int4", "grpo", "grpo", "base"]
    cells = {
        cell: part.sort_values("question")["correct"].to_numpy() for cell, part in found.groupby(["variant", "scheme"])
    }
    for against in (("base", "full"), ("grpo", "full")):
        wanted = stats.contrast(np.stack([cells["qat-int4", "rtn-int4"], cells[against]]), (1, -1))
        assert interval(wanted) in lines[0]
    assert "n = 400 held-out questions, one training run each" in text


def test_full_is_shown_with_its_dtype_where_rows_name_one():
    text = ranking.markdown(ranking.measure(frame().assign(dtype="float32")))
    assert "| grpo | full (fp32) |" in text and "method − grpo · full (fp32)" in text and "| nf4 |" in text
    assert "full (" not in ranking.markdown(ranking.measure(frame()))


def test_several_training_runs_are_a_random_effect():
    one, three = (
        ranking.markdown(ranking.measure(frame())),
        ranking.markdown(ranking.measure(frame(seeds=("0", "1", "2")))),
    )
    assert "3 training runs" in three and one != three


def test_without_base_or_full_precision_there_is_nothing_to_measure_from():
    for cell in (("base", "full"), ("grpo", "full")):
        with pytest.raises(BadInput, match=f"Cell {cell[0]} · full is missing"):
            ranking.markdown(ranking.measure(frame({key: rate for key, rate in RATES.items() if key != cell})))


def test_a_table_without_its_columns_is_refused_in_a_sentence():
    with pytest.raises(BadInput, match="lacks 'variant'"):
        ranking.measure(frame().drop(columns="variant"))
    with pytest.raises(BadInput, match="'scheme' has 1600 empty values"):
        ranking.measure(frame().assign(scheme=None))


SMALL = RATES | {("base", "rtn-int4"): 0.3, ("grpo", "rtn-int4"): 0.5, ("qlora", "full"): 0.79}


def test_training_is_held_against_quantizing_afterwards_in_the_same_scheme():
    found = ranking.measure(frame(SMALL, n=1000))
    row = next(row for row in found.rows if row.variant == "qat-int4")
    right = {
        cell: part.sort_values("question")["correct"].to_numpy()
        for cell, part in frame(SMALL, n=1000).groupby(["variant", "scheme"])
    }
    for name, against in (("over_grpo", ("grpo", "rtn-int4")), ("over_base", ("base", "rtn-int4"))):
        wanted = stats.contrast(np.stack([right["qat-int4", "rtn-int4"], right[against]]), (1, -1))
        assert getattr(row, name) == wanted
    assert [row for row in found.rows if row.over_grpo] == [row]  # an adapter's merged model has no scheme to share
    text = ranking.findings(found)
    assert (
        text[0].startswith("Of 4 quantized methods qat-int4 · rtn-int4 scores highest")
        and "not significantly better than qlora · full" in text[0]
    )
    assert "significantly better than grpo · nf4, grpo · rtn-int4" in text[0]
    assert (
        text[1].startswith("qat-int4 is significantly better than grpo quantized to rtn-int4 after training: +0.")
        and "Holm-corrected p" in text[1]
    )


@pytest.mark.process
def test_the_best_is_called_ahead_only_where_all_pairs_asked_at_once_bear_it_out():
    """Of many equal methods, the best beats the worst often by its plain interval, and after Holm in at most 5 %."""
    equal = {("base", "full"): 0.5, ("grpo", "full"): 0.6} | {("grpo", f"scheme{k}"): 0.6 for k in range(12)}
    alone = together = 0
    for seed in range(20):
        data = frame(equal, n=300, seed=seed)
        found = ranking.measure(data)
        cells = [(row.variant, row.scheme) for row in found.rows if row.quantized]
        right = {
            cell: part.sort_values("question")["correct"].to_numpy()
            for cell, part in data.groupby(["variant", "scheme"])
        }
        alone += stats.contrast(np.stack([right[cells[0]], right[cells[-1]]]), (1, -1)).low > 0
        together += "; significantly better" in ranking.findings(found)[0]
    assert alone >= 10 and together <= 3  # P(more than 3 of 20 at 5 %) is 1.6 %, and the data are seeded


@pytest.mark.process
def test_several_seeds_are_seen_in_table_json_metrics_and_figure(tmp_path):
    found = ranking.measure(frame(SMALL, seeds=("0", "1", "2")))
    assert found.runs == 3 and all(row.error.runs.count == 3 for row in found.rows if row.error)
    document = ranking.as_json(found, failed=["qad-int4, seed 1: it failed."])
    assert document["runs"] == 3 and document["failed"] and len(document["methods"]) == len(SMALL)
    scores = ranking.metrics(found)
    assert (
        scores["methods/error_grpo_nf4_low"] < scores["methods/error_grpo_nf4"] < scores["methods/error_grpo_nf4_high"]
    )
    assert "methods/error_grpo_full" not in scores and "methods/accuracy_grpo_full" in scores
    figures.methods(found, ranking.findings(found)[0], tmp_path / "methods.png")
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")


def answered(seeds=("0", "1")) -> pd.DataFrame:
    """Return answers of methods with and without a cell of their own at full precision, all on the same questions."""
    draw, parts = np.random.default_rng(0), []
    cells = [(variant, scheme) for variant in ("base", "grpo", "sft") for scheme in ("full", "nf4")]
    for run in seeds:
        for variant, scheme in (*cells, ("qat-int4", "rtn-int4"), ("qlora", "full")):
            texts = {"completion": f"{variant} {scheme} {run}", "parsed": "5", "answer": "5"}
            labels = {"variant": variant, "scheme": scheme, "seed": run, "question": [f"q{i}" for i in range(200)]}
            right, tokens = (draw.random(200) < 0.7).astype(int), draw.integers(20, 40, 200)
            finish = np.where(draw.random(200) < 0.1, "length", "stop")
            reached = 1 - right
            rows = {"correct": right, "n_tokens": tokens, "finish_reason": finish, "reached": reached}
            parts.append(pd.DataFrame({**labels, **rows, **texts}))
    rows = pd.concat(parts, ignore_index=True)
    once = ~((rows["variant"] == "base") & (rows["seed"] != seeds[0]))  # one model under every seed
    return rows[once]


REFERENCES = {
    ("base", "full"): None,
    ("grpo", "full"): None,
    ("sft", "full"): None,
    ("base", "nf4"): ("base", "full"),
    ("grpo", "nf4"): ("grpo", "full"),
    ("sft", "nf4"): ("sft", "full"),
    ("qat-int4", "rtn-int4"): ("grpo", "full"),
    ("qlora", "full"): ("grpo", "full"),
}


@pytest.mark.process
@pytest.mark.parametrize(("cell", "reference"), REFERENCES.items())
def test_answers_are_paired_with_the_same_variant_at_full_precision_or_with_grpo_there(cell, reference):
    rows = answered()
    found = ranking.measure(rows)
    own = found.answers[cell]
    assert found.references[cell] == reference
    if reference is None:
        assert own.changes == {} and own.compared is None and own.means["tokens"].n == 200
        return
    wide = rows.pivot(index=["seed", "question"], columns=["variant", "scheme"], values=["n_tokens", "correct"]).dropna(
        subset=[("n_tokens", *cell), ("n_tokens", *reference)]
    )
    by_seed = (wide["n_tokens"][cell] - wide["n_tokens"][reference]).groupby("seed").mean()
    change = own.changes["tokens"]
    assert change.estimate == pytest.approx(by_seed.mean()) and change.low < change.estimate < change.high
    worse = ((wide["correct"][reference] == 1) & (wide["correct"][cell] == 0)).sum()
    better = ((wide["correct"][reference] == 0) & (wide["correct"][cell] == 1)).sum()
    assert (own.right_to_wrong, own.wrong_to_right, own.compared) == (worse, better, len(wide))
    changed = found.changed[(found.changed["variant"] == cell[0]) & (found.changed["scheme"] == cell[1])]
    assert len(changed) == worse + better
    seeds = changed["seed"] if cell[0] != "base" else pd.Series("0", index=changed.index)
    assert (changed["completion_full"] == [f"{' '.join(reference)} {seed}" for seed in seeds]).all()


def test_a_change_over_seeds_has_the_interval_of_seeds():
    """Its seeds differ by 2 tokens and its questions by nothing, so that the interval is that of two numbers."""
    rows = answered().assign(n_tokens=30)
    longer = (rows["variant"] == "qat-int4") & (rows["seed"] == "1")
    change = ranking.measure(rows.assign(n_tokens=30 + 2 * longer)).answers["qat-int4", "rtn-int4"].changes["tokens"]
    half = scipy_stats.t.ppf(0.975, 1) * np.std([0, 2], ddof=1) / np.sqrt(2)
    assert change.estimate == pytest.approx(1) and change.high - change.estimate == pytest.approx(
        min(half, 1), abs=0.01
    )


def test_the_base_under_a_scheme_is_one_model_under_every_seed_as_in_compare():
    rows = answered()
    both = rows[rows["variant"].isin(["base", "grpo"])]
    own = {row.cell: row for row in ranking.measure(rows).rows}
    assert own["base", "nf4"].accuracy == compare.from_questions(both).cells["base", "nf4"]


@pytest.mark.process
def test_the_answers_stand_in_table_json_metrics_and_figure(tmp_path):
    found = ranking.measure(answered())
    text = ranking.markdown(found)
    section = text.partition("## Answers")[2].partition("\n## ")[0]
    assert "| qlora · full | grpo · full |" in section and "| base · full |  |" in section
    counts = found.answers["qlora", "full"]
    assert f"| {counts.right_to_wrong} of 400 | {counts.wrong_to_right} of 400 |" in section
    rows = {(row["variant"], row["scheme"]): row for row in json.loads(json.dumps(ranking.as_json(found)))["methods"]}
    assert rows["sft", "nf4"]["reference"] == ["sft", "full"] and rows["grpo", "full"]["reference"] is None
    change = rows["qlora", "full"]["answers"]["unfinished"]["change"]
    assert change["low"] < change["estimate"] < change["high"]
    scores = ranking.metrics(found)
    assert scores["methods/unfinished_change_qlora_full_high"] == change["high"]
    assert scores["methods/wrong_to_right_qlora_full"] == counts.wrong_to_right
    figures.lengths(found, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert "## Answers" in ranking.markdown(ranking.measure(frame())), "counts are known without any measure"


@pytest.mark.process
def test_changed_answers_name_method_reference_and_seed_and_are_bounded():
    table = ranking.measure(answered()).changed_sample()
    assert list(table)[:6] == ["method", "scheme", "reference", "seed", "change", "question"]
    assert table.groupby(["method", "scheme", "change"]).size().max() == answers.SHOWN
    assert set(table.loc[table["method"] == "qlora", "reference"]) == {"grpo · full"}
    alike = answered().assign(correct=1)
    assert ranking.measure(alike).changed_sample().empty


@pytest.mark.parametrize(
    ("right", "values", "measure", "reason"),
    [
        ((0.5, 0.8), [0.4, 0.5, 0.6, 0.7], "reward", ""),
        ((0.5, 0.8), [0.7, 0.5, 0.6, 0.4], "reward", "the reward got worse"),
        ((0.5, 0.8), [0.7, 0.5, 0.6, 0.4], "loss", ""),
        ((0.5, 0.5), [0.4, 0.5, 0.6, 0.7], "reward", "no significant gain over base in the same scheme"),
        ((0.8, 0.5), [0.7, 0.5], "reward", "no significant gain over base in the same scheme and the reward got worse"),
    ],
)
def test_a_training_converged_by_the_rule_alone(right, values, measure, reason):
    base, own = ((np.random.default_rng(seed).random(2000) < rate).astype(float) for seed, rate in enumerate(right))
    found = convergence.judge(
        "qat-int4", "rtn-int4", stats.contrast(np.stack([own, base]), (1, -1)), [values, values], measure
    )
    assert found.converged == (not reason) and found.reason == reason
    assert found.row()[-1] == (f"no: {reason}" if reason else "yes")
    shown = found.row()[2].partition(", ")[2]
    assert shown.startswith(("+", "−")) and shown.endswith("]"), "the rule's means do not stand without an interval"


def test_quarters_are_of_at_least_one_step():
    assert convergence.quarters([1.0]) == ([1.0], [1.0])
    assert convergence.quarters([1.0, 2, 3, 4, 5, 6, 7, 8]) == ([1.0, 2], [7, 8])


def test_the_change_beside_the_verdict_has_the_interval_that_scipy_gives_over_seeds_and_over_steps():
    from scipy import stats as scipy

    draw = np.random.default_rng(0)
    histories = [list(draw.normal(0.7 + 0.01 * np.arange(16), 0.05)) for _ in range(5)]
    ends = [(np.mean(each[:4]), np.mean(each[-4:])) for each in histories]
    first, last = zip(*ends, strict=True)
    for found, wanted in (
        (convergence.change(histories), scipy.ttest_rel(last, first)),
        (convergence.change(histories[:1]), scipy.ttest_ind(histories[0][-4:], histories[0][:4], equal_var=False)),
    ):
        assert (found.low, found.high) == pytest.approx(tuple(wanted.confidence_interval(0.95)))
    assert convergence.change([[0.5, 0.6]]) is None and convergence.change([[0.5] * 16]).high == 0


def test_compare_methods_says_at_its_end_where_things_are(store, tmp_path, capsys):
    ids = []
    for _, rows in frame().groupby(["variant", "scheme"]):
        with mlflow.start_run() as run:
            rows.to_parquet(tmp_path / "questions.parquet")
            mlflow.log_artifact(str(tmp_path / "questions.parquet"))
        ids.append(run.info.run_id)

    def compare(*words: str) -> tuple[str, str]:
        cli.cli.main(["compare", "--rank", *words], standalone_mode=False)
        said = capsys.readouterr()
        return said.out, said.err.splitlines()[-1]

    text, last = compare("--cells", ",".join(ids))
    run = mlflow.MlflowClient().search_runs(["0"], max_results=1)[0]
    assert f"Logged to run {run.info.run_id}: methods.md" in last and run.info.status == "FINISHED"
    assert (
        contents.artifact(run.info.run_id, "methods.md").read_text() == text.removesuffix("\n")
        and run.data.metrics["methods/error_grpo_nf4"] < 0
    )
    listed = {"methods.md", "methods.json", names.CHANGED_JSON, "questions.parquet", "recipe.yaml", "figures"}
    assert {path.name for path in contents.artifact(run.info.run_id, ".").iterdir()} == listed
    _, last = compare("--cells", ",".join(ids), "--out", str(tmp_path / "out"))
    assert f"Written to {tmp_path}/out: methods.md, methods.json, figures/" in last
    assert {path.name for path in (tmp_path / "out").iterdir()} == listed - {"questions.parquet", "recipe.yaml"}
    with pytest.raises(BadInput, match="--questions needs --out"):
        compare("--questions", str(tmp_path / "questions.parquet"))
    count = len(mlflow.MlflowClient().search_runs(["0"]))
    for words, says in ((["--rank"], "grpo · full is missing"), ([], "is the only variant")):
        with pytest.raises(BadInput, match=says):
            cli.cli.main(["compare", *words, "--cells", ids[0]], standalone_mode=False)
    assert len(mlflow.MlflowClient().search_runs(["0"])) == count


def test_a_distilled_arms_control_is_shared_unless_trainings_differ(tmp_path):
    def controls(*arms):
        return study.controls(each for _, each, _ in study.load(study.FIRST, arms, {}, 0))

    assert controls("tiny-qlora", "qat-int4") == {}
    assert set(controls("qad-int4", "qad-nvfp4-a4").values()) == {"distilled"}
    plain, longer, sampled = (tmp_path / name for name in ("plain.yaml", "longer.yaml", "sampled.yaml"))
    distils = "teacher: qrl-tiny, generations: 2, learning_rate: 2.0e-5"
    plain.write_text(f"train: {{{distils}}}\n")
    longer.write_text(f"train: {{{distils}, qat: int8, steps: 7}}\n")
    sampled.write_text(f"train: {{{distils}, qat: fp8, qat_calibration_samples: 8}}\n")
    found = controls("qad-int4", str(longer), "qad-nvfp4-a4")
    assert found["qad-int4"] == found["qad-nvfp4-a4"] == "distilled-qad-int4+qad-nvfp4-a4"
    assert found["qad-int8"] == "distilled-qad-int8"
    found = controls(str(longer), "qad-int4", str(plain))  # the plain one is the control of those that train alike
    assert found == {"qad-int8": "distilled-qad-int8", "qad-int4": "distilled", "distilled": "distilled"}
    assert set(controls("qad-int4", str(sampled)).values()) == {"distilled"}  # texts for scales, which it does not have


@pytest.mark.parametrize(
    ("variant", "control"),
    [
        ("qad-int4", "distilled-qad-int4+qad-nvfp4-a4"),
        ("qad-int8", "distilled"),
        ("qad-a4", "distilled"),
        ("qat-int4", None),
    ],
)
def test_a_distilled_method_has_the_control_that_names_it_or_the_shared_one(variant, control):
    cells = [("grpo", "full"), ("distilled", "full"), ("distilled-qad-int4+qad-nvfp4-a4", "full"), (variant, "rtn-x")]
    wanted = (control, "full") if control else None
    assert ranking.control_of(cells[-1], cells) == wanted
    assert ranking.control_of(("qad-int8", "rtn-int8"), cells[2:]) is None
    assert not ranking.Method(*cells[2], *[None] * 5).quantized


def test_arms_are_recipes_that_meet_on_the_same_questions(tmp_path):
    given = {"evaluate.n": "50"}
    arms = study.load(study.FIRST, study.ARMS, given, seed=3)
    assert [study.label(each) for _, each, _ in arms] == ["grpo", "qlora", *study.ARMS[1:]]
    assert all(each.seed == 3 and each.evaluate.n == 50 for _, each, _ in arms)
    with pytest.raises(BadInput, match="tiny-qlora trains qlora, but methods are measured from GRPO in full precision"):
        study.load("tiny-qlora", (), {}, 0)
    with pytest.raises(BadInput, match="tiny-ptq and tiny both train grpo"):
        study.load(study.FIRST, ("tiny",), {}, 0)
    with pytest.raises(BadInput, match=r"tiny-ptq and .*other\.yaml differ in prompt"):
        other = tmp_path / "other.yaml"
        other.write_text("prompt: answer-line\ntrain: {qat: int4}\n")
        study.load(study.FIRST, (str(other),), {}, 0)


def test_an_arm_is_a_change_of_the_first_recipe_unless_it_shares_its_questions(tmp_path):
    first, small, own = (tmp_path / name for name in ("first.yaml", "small.yaml", "own.yaml"))
    first.write_text("extends: tiny\nprompt: answer-line\ntrain: {steps: 3, learning_rate: 1.0e-5}\n")
    small.write_text("train: {qat: int8}\n")
    own.write_text("extends: first.yaml\ntrain: {qat: nvfp4-a16, learning_rate: 2.0e-5}\n")
    arms = study.load(str(first), ("qat-int4", str(small), str(own), "qad-int4"), {"evaluate.n": "50"}, seed=1)
    assert [(study.label(each), each.train.learning_rate) for _, each, _ in arms[1:]] == [
        ("qat-int4", 1e-5),
        ("qat-int8", 1e-5),
        ("qat-nvfp4-a16", 2e-5),
        ("qad-int4", 2e-5),  # its own change; what qat-int4 and it extend, tiny, is left out
    ]
    assert all((each.prompt, each.train.steps, each.evaluate.n) == ("answer-line", 3, 50) for _, each, _ in arms)
    assert [typed["recipe"] for _, _, typed in arms] == [str(first)] * 3 + [str(own), str(first)]
    for _, each, typed in arms:  # what a step of it is launched with gives the same recipe
        words = {key: text for key, text in typed.items() if key != "recipe"}
        assert recipe.load(typed["recipe"], words) == each


def test_models_go_by_their_last_name_if_that_tells_them_apart():
    assert study.parse_models(["qrl-tiny", "Qwen/Qwen3-0.6B", "runs/big/"]) == {
        "qrl-tiny": "qrl-tiny",
        "Qwen3-0.6B": "Qwen/Qwen3-0.6B",
        "big": "runs/big/",
    }
    assert list(study.parse_models(["a/model", "b/model"])) == ["a/model", "b/model"]
    with pytest.raises(BadInput, match="repeats a model"):
        study.parse_models(["a", "a"])


@pytest.mark.parametrize(
    ("cell", "last"),
    [
        (("grpo", "awq"), "awq=grpo:awq"),
        (("grpo", "int8"), "ptq-int8=grpo:int8"),
        (("qlora", "full"), "qlora=qlora:full;made_from=base;loss_to=grpo"),
        (("qat-int4", "rtn-int4"), "int4=qat-int4:rtn-int4;made_from=base;loss_to=grpo"),
        (("qad-int4", "rtn-int4"), "distilled-int4=qad-int4:rtn-int4;made_from=grpo;loss_to=grpo"),
    ],
)
def test_the_best_cell_gets_a_stage_of_its_own_behind_base_and_grpo(cell, last):
    stages = study.stages_of(*cell)
    assert stages[2].typed == last
    declared = recipe.load("tiny", {"promote.stages": ",".join(stage.typed for stage in stages)}).promote.declared
    assert [stage.mlflow for stage in declared] == ["None", "Staging", "Production"]
    assert declared[2].cell == ":".join(cell) and declared[2].loss_to == "grpo" and declared[2].gain_over is None


def test_seeds_are_whole_numbers_each_once():
    assert study.parse_seeds("0, 2,1", None) == (0, 2, 1)
    for text in ("", "a", "1,1", "-1", "1.5"):
        with pytest.raises(BadInput, match="must be whole numbers by comma"):
            study.parse_seeds(text, None)
    with pytest.raises(BadInput, match="give the seed there"):
        study.parse_seeds("0", "3")


def test_study_002s_methods_load_on_its_recipe_for_any_model():
    formats = ("int8", "int8-attention", "int4", "nvfp4-a16", "nvfp4-a4")
    arms = ("qwen3-math-qlora", *(f"qat-{form}" for form in formats), "qad-int4")
    loaded = study.load("qwen3-math-ptq", arms, {"model": "Qwen/Qwen3-1.7B"}, seed=0)
    assert [each.train.qat for _, each, _ in loaded] == ["none", "none", *formats, "int4"]
    assert {(each.task, each.prompt, each.train.dtype) for _, each, _ in loaded[2:]} == {("math", "boxed", "bf16")}


def test_a_control_with_another_cache_is_no_training_in_a_scheme():
    rates = RATES | {("distilled", "full"): 0.7, ("distilled", "full+kv-fp8"): 0.7, ("grpo", "full+kv-fp8"): 0.7}
    text = ranking.markdown(ranking.measure(frame(rates)))
    assert "quantized to full+kv-fp8" not in text
