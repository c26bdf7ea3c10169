"""The tables of `tests/benchmarks/answer` from a sweep that is drawn with known losses."""

import itertools
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "answer"))

import contrasts
import correlations
import export
import page
import report
import run
import tables
import why
from findings import Findings

from qrl import recipe as recipes
from qrl.errors import BadInput
from qrl.study import arms

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SIZES, SEEDS, N = ("m3", "m25"), (0, 1, 2, 3), 400
LOSS = {("base", "gptq"): 0.05, ("grpo", "gptq"): 0.10, ("sft", "gptq"): 0.05}  # of accuracy; w8a16 costs nothing
ACCURACY = {"base": 0.6, "grpo": 0.9, "sft": 0.7}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """Answers whose loss by scheme is exact in every size and seed: the first ones are right."""
    parts = []
    for size, seed, (variant, accuracy) in itertools.product(SIZES, SEEDS, ACCURACY.items()):
        questions = [f"{seed}-{number}" for number in range(N)]  # each seed draws its own
        for scheme in ("full", "gptq", "w8a16"):
            right = round(N * (accuracy - LOSS.get((variant, scheme), 0.0)))
            labels = {"size": size, "seed": seed, "variant": variant, "scheme": scheme}
            parts.append(pd.DataFrame({"question": questions, "correct": np.arange(N) < right, **labels}))
    return pd.concat(parts, ignore_index=True).astype({"correct": "int8"})


def test_the_primary_outcome_is_the_difference_of_two_losses_over_sizes_and_seeds(frame):
    answers = contrasts.Answers(frame)
    value = answers.contrast(contrasts.excess(answers.sizes, "gptq", "base"))
    assert value.estimate == pytest.approx(0.05) and value.low > 0
    assert contrasts.answer(value).startswith("In four bits (gptq) RL makes these models quantize less cleanly")
    same = answers.contrast(contrasts.excess(answers.sizes, "w8a16", "base"))
    assert same.estimate == pytest.approx(0) and "less than 0.02" in contrasts.answer(same)
    assert answers.contrast(contrasts.excess(answers.sizes, "gptq", "pretrained")) is None  # was not evaluated


def test_an_excess_of_shares_is_what_is_lost_over_what_there_was(frame):
    answers = contrasts.Answers(frame)
    value = contrasts.relative_excess(answers, "gptq", "base")
    assert value.estimate == pytest.approx(0.10 / 0.9 - 0.05 / 0.6)
    plain = answers.contrast(contrasts.excess(answers.sizes, "gptq", "base"))
    assert value.low < value.estimate < value.high and value.high - value.low < 2 * (plain.high - plain.low)
    assert contrasts.relative_excess(answers, "gptq", "pretrained") is None


def findings(frame: pd.DataFrame, *more) -> Findings:
    answers = contrasts.Answers(frame)
    return Findings(answers, answers, *more)


def told(found: Findings, why: pd.DataFrame | None = None) -> str:
    """Return the page in one line."""
    return page.write(found, why).replace("\n", " ")


def test_trainings_of_several_sizes_can_be_counted_apart(frame):
    """Equal spreads at two sizes: half the variance of one size's mean, and twice its degrees of freedom."""
    random, noisy = np.random.default_rng(0), frame.copy()
    for size, seed in itertools.product(SIZES, SEEDS):
        own = (noisy["size"] == size) & (noisy["seed"] == seed) & (noisy["variant"] == "grpo")
        worse = noisy["question"].isin([f"{seed}-{number}" for number in range(random.integers(10, 60))])
        noisy.loc[own & worse & (noisy["scheme"] == "gptq"), "correct"] = 0
    each = findings(noisy).excesses["base"]["gptq"]
    assert each.apart.estimate == pytest.approx(each.value.estimate)
    errors = [value.stderr for value in each.by_size.values()]
    assert each.apart.stderr == pytest.approx(np.hypot(*errors) / 2) and 3 <= each.apart.df <= 6


def document(frame: pd.DataFrame, why: pd.DataFrame | None = None, trained: pd.DataFrame | None = None) -> str:
    answers = contrasts.Answers(frame)
    compared = answers if trained is None else report.with_own_runs(frame, trained)
    return report.document(Findings(answers, compared), why)


def test_the_tables_have_every_question_that_the_cells_can_answer(frame):
    answers, text = contrasts.Answers(frame), document(frame)
    assert answers.sizes == list(SIZES) and len(answers.evidence.runs) == 4
    for number in range(1, 6):
        assert f"## {number}. " in text
    assert "| sft | gptq | +0.050" in text
    assert "None" not in text and "nan" not in text


def test_a_cell_that_lacks_a_seed_is_left_out_and_named(frame):
    partial = (frame["size"] == "m3") & (frame["variant"] == "sft") & (frame["scheme"] == "gptq") & (frame["seed"] == 1)
    text = document(frame[~partial])
    assert "not evaluated under all seeds: m3 sft gptq." in text
    assert "| sft | w8a16 |" in text and "| sft | gptq |" not in text
    few = (frame["scheme"] == "gptq") & (frame["seed"] == 1) & (frame["size"] == "m25") & (frame["variant"] == "base")
    begun = findings(frame[~few])
    assert begun.answers.sizes == ["m3"] and begun.answers.begun == ["m25"]
    assert "since m10, m25 and m200 have not been run under all seeds" in told(begun)
    assert "One size has no trend" in page.write(begun)
    with pytest.raises(BadInput, match="under all seeds"):
        findings(frame[frame["seed"] != frame["size"].map({"m3": 0, "m25": 1})])


def test_methods_are_compared_with_the_grpo_of_their_own_runs(frame):
    own = frame[(frame["size"] == "m3") & frame["variant"].isin(["base", "grpo"])].copy()
    grpo = (own["variant"] == "grpo") & (own["scheme"] == "gptq")
    own.loc[grpo, "correct"] = 0
    qlora = own[grpo].assign(variant="qlora", scheme="full", correct=1)
    text = document(frame, None, pd.concat([own, qlora]))
    assert "| qlora:full | m3 | +1.000" in text and "| sft | gptq | +0.050" in text
    assert "| accuracy of | size | minus grpo:gptq |" in text
    rows = [own, own[own["scheme"] == "gptq"].assign(scheme="rtn-int4"), qlora]
    rows.append(qlora.assign(variant="qat-int4", scheme="rtn-int4"))
    found = Findings(contrasts.Answers(frame), contrasts.Answers(pd.concat(rows)))
    said = page.write(found)
    words = " ".join(said.split())
    assert "minus that of GRPO's weights quantized afterwards, by size." in words and "|  | m3 |" in said
    both = "`qlora:full` at m3 and `qat-int4:rtn-int4` at m3"
    assert f"The intervals of {both} lie above `grpo:gptq`, none lies below." in words
    assert f"Holm's correction over these 2 comparisons (5 %, exploratory) leaves {both}." in words
    turned = pd.concat(rows).assign(correct=lambda held: 1 - held["correct"])
    words = told(Findings(contrasts.Answers(frame), contrasts.Answers(turned)))
    assert f"No method's interval lies above `grpo:gptq`, those of {both} lie below." in words
    fp8 = pd.concat([own, own[grpo].assign(variant="grpo-fp8")])
    words = told(Findings(contrasts.Answers(frame), contrasts.Answers(fp8)))
    assert "**Methods in four bits.** Accuracy minus that of GRPO's" in words and "Holm's correction over" not in words
    for method in ("qlora:full", "qat-int4:rtn-int4"):
        for scheme in ("gptq", "rtn-int4"):
            assert re.search(rf"^\| `{method}` − `grpo:{scheme}` \| \+1\.000 \[\S+ \S+\] \|$", said, re.MULTILINE)
    assert "grpo-fp8" not in said


def test_what_moved_is_averaged_over_matrices_by_their_weights(frame):
    rows = [
        {"size": "m3", "variant": "grpo", "seed": seed, "tensor": name, "numel": numel, "moved": share}
        for seed, shares in enumerate(((0.1, 0.5), (0.3, 0.7)))
        for name, numel, share in (("a", 300, shares[0]), ("b", 100, shares[1]))
    ]
    keys = ("moved_fp32", "again", "again_lift", "principal", "principal_by_size", "rotation_deg", "spectrum_shift")
    moved = pd.DataFrame(rows).assign(other=np.nan, **dict.fromkeys((*keys, *MX), np.nan))
    text = document(frame, moved)
    assert "| m3 | grpo |  | 0.3 (0.2 to 0.4) |" in text


MX = ("mx_error", "mx_scale", "mx_dead", "mx_grid")


@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
def test_the_leading_directions_are_those_of_an_svd(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrix)
    vectors, values = why.leading(matrix)
    assert torch.allclose(values, s, atol=1e-5) and vectors.shape == (shape[0], 4)
    assert torch.allclose((vectors.T @ u[:, :4]).abs(), torch.eye(4), atol=1e-4)
    mask, *_ = why.principal(matrix)
    sizes = ((u[:, :4] * s[:4]) @ v[:4]).abs()
    assert mask.sum() == 240 and sizes[mask].min() >= sizes[~mask].max() - 1e-5


def test_the_weights_of_all_matrices_are_measured_side_by_side(tmp_path):
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(0)
    base = {name: torch.randn(32, 64, generator=random).bfloat16() for name in "abc"}
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        changed = {name: matrix.clone() for name, matrix in base.items()}
        changed["b"][seed] += 1
        save_file(changed, tmp_path / str(seed) / "model.safetensors")
    threads = torch.get_num_threads()
    rows = pd.DataFrame(why.measure(base, {("grpo", seed): tmp_path / str(seed) for seed in (0, 1)}))
    assert torch.get_num_threads() == threads
    moved = rows.dropna(subset=["moved"]).groupby("tensor")["moved"].unique()
    assert dict(moved.map(list)) == {"a": [0], "b": [1 / 32], "c": [0]}
    assert rows["again"].max() == 0 and len(rows) == 3 * (1 + 2 + 1)


def test_a_base_is_quantized_once_for_all_seeds(tmp_path, monkeypatch):
    work, asked = run.Work(tmp_path, {}, ("sft",), fp8=False), []
    monkeypatch.setattr(work, "qrl", lambda name, *words, **_: asked.append(name))
    for seed in (0, 1):
        work.untrained("m3", "", seed, [])
        work.untrained("m3", "-pretrained", seed, [])
        work.cells("grpo-fp8", "models:/m-1", str(tmp_path / "models" / "m3"), seed, [])
    assert set(asked) == {
        *("quantize-base-m3", "quantize-pretrained-m3-pretrained", "quantize-grpo-fp8-m3-0", "quantize-grpo-fp8-m3-1")
    }


def test_the_parts_of_mxfp4s_error():
    block = torch.tensor([[6.0, 4, 3, 2, 1.5, 1, 0.5, 0] * 4])
    assert why.mxfp4(block) == dict.fromkeys(MX, 0)  # all on the grid, and 6 · 2⁰ needs no rounded scale
    dead = why.mxfp4(torch.cat((block[:, :-1], torch.tensor([[0.2]])), 1))
    assert dead["mx_dead"] == dead["mx_error"] == pytest.approx(0.04 / float(block.square().sum() + 0.04))
    assert dead["mx_grid"] == dead["mx_scale"] == 0
    assert why.mxfp4(block * 1.1)["mx_scale"] > 0  # no power of two is 1.1


def test_a_weights_size_explains_what_bf16_hides():
    """Where all large weights stay, and all small ones move, principal weights move as their sizes say."""
    before = torch.full((4, 8), 0.01)
    before[:, 0] = 2.0
    mask = torch.zeros(4, 8, dtype=torch.bool)
    mask[:, :2] = True
    found = why._among_principal(before < 1, mask, before)
    assert found["principal"] == pytest.approx(0.5 / (7 / 8)) and found["principal_by_size"] == pytest.approx(1)


def test_a_training_with_fp8_rollouts_has_a_name_of_its_own(tmp_path):
    from mlflow import MlflowClient

    client, of = MlflowClient(store := f"sqlite:///{tmp_path}/store.db"), {"model": "models/m3", "seed": "2"}
    parent = client.create_run("0")
    for name, value in of.items():
        client.log_param(parent.info.run_id, name, value)
    for quantization, own in (("none", {}), ("fp8", of)):
        beneath = {} if own else {"mlflow.parentRunId": parent.info.run_id}
        made = client.create_run("0", tags={"qrl.step": "train", "qrl.variant": "grpo"} | beneath).info.run_id
        for name, value in (own | {"rollout.quantization": quantization}).items():
            client.log_param(made, name, value)
        client.log_metric(made, "train/moved_share", 0.5)
        client.set_terminated(made)
    rows = why.masters(store)
    assert {(row["variant"], row["size"], row["seed"]) for row in rows} == {("grpo", "m3", 2), ("grpo-fp8", "m3", 2)}


def test_a_base_of_another_accuracy_is_made_once_more_even_if_that_was_interrupted(tmp_path, monkeypatch):
    work, made = run.Work(tmp_path, {}, ("sft",), fp8=False), []

    def qrl(name: str, *words: str, module: str) -> bool:
        done, model = tmp_path / "logs" / f"{name}.done", tmp_path / "models" / "m3"
        if not done.exists():
            made.append((name, words[words.index("--steps") + 1]))
            if made.count(made[-1]) == 1 and "longer" in name:
                return False  # interrupted
            model.mkdir(parents=True)
            (model / run.RECORD).write_text(json.dumps({"scores": [{"prompt": "plain", "accuracy": 0.5}]}))
            done.touch()
        return True

    monkeypatch.setattr(work, "qrl", qrl)
    tried = [work.make("m3", run.SIZES["m3"], device="cpu", slip=0.7, suffix="") for _ in range(3)]
    assert tried == [False, True, True]
    assert made == [("make-m3", "1000"), ("make-m3-longer", "2000"), ("make-m3-longer", "2000")]


def test_a_measure_that_orders_the_losses_has_a_correlation_of_one(frame):
    rows = [
        {"size": size, "seed": seed, "scheme": scheme, "variant": "grpo", "table": "schemes", "tensor": "a"}
        | {"relative_mse": error}
        for size, seed in itertools.product(SIZES, SEEDS)
        for scheme, error in (("gptq", 0.1), ("w8a16", 0.01))
    ]
    weights = pd.DataFrame(rows).assign(numel=1)
    (rank,) = correlations.correlations(correlations.points(frame, weights), draws=50)
    assert (rank.rho, rank.low, rank.high) == pytest.approx((1, 1, 1))
    assert (rank.cells, rank.schemes, rank.trainings) == (16, 2, 8)
    base = frame.copy()
    base.loc[(frame["variant"] == "base") & (frame["scheme"] == "gptq"), "correct"] = 0  # loses more than grpo, 0.60
    points = correlations.points(base, weights)
    assert points[correlations.OF_GAIN].xs("gptq", level="scheme").to_numpy() == pytest.approx(0.10 - 0.60)
    (of_gain,) = correlations.correlations(points, draws=50, outcome=correlations.OF_GAIN)
    assert of_gain.rho == pytest.approx(-1)
    worse = frame.copy()
    first = (frame["variant"] == "grpo") & (frame["scheme"] == "w8a16") & (frame["seed"] == 1)
    worse.loc[first & frame["question"].isin(["1-0", "1-1"]), "correct"] = 0  # else all of these cells lose the same
    points = correlations.points(worse, weights.assign(relative_mse=range(16)))
    (near,) = correlations.correlations(points, most=0.02)
    assert near.cells == 8 and "nan" not in str(near)  # one scheme gives no interval
    assert not correlations.correlations(correlations.points(frame, weights), most=0.02)  # all lose the same


def test_a_drawn_correlation_is_that_of_the_repeated_rows():
    from scipy.stats import spearmanr

    random = np.random.default_rng(0)
    values, often = random.integers(0, 6, (40, 2)).astype(float), random.integers(0, 3, (5, 40))
    expected = [spearmanr(values.repeat(row, axis=0)).statistic for row in often]
    assert correlations._spearman(values, often) == pytest.approx(expected)
    assert np.isnan(correlations._spearman(np.c_[np.ones(5), np.arange(5)], np.ones((1, 5)))).all()


def test_what_a_base_loses_has_no_spread_over_seeds(frame):
    """It is one model, whose seeds differ by their questions alone."""
    answers = contrasts.Answers(frame)
    base, grpo = (answers.contrast(contrasts.loss("m3", variant, "gptq")) for variant in ("base", "grpo"))
    assert base.runs is None and grpo.runs.count == len(SEEDS)


def test_the_runs_of_a_store_are_exported_without_what_names_the_machine(tmp_path):
    from mlflow import MlflowClient

    client = MlflowClient(store := f"sqlite:///{tmp_path}/store.db")
    run_id = client.create_run("0", tags={"qrl.step": "train", "mlflow.user": "ada", "qrl.pid": "host:1:2"}).info.run_id
    client.log_param(run_id, "model", f"{tmp_path}/models/m3")
    client.log_metric(run_id, "train/reward", 0.5)
    client.set_terminated(run_id)
    rows = export.runs(store)
    held = {(row.kind, row.key): row.value for row in rows.itertuples()}
    assert held["param", "model"] == "WORK/models/m3" and held["metric", "train/reward"] == "0.5"
    assert held["attribute", "status"] == "FINISHED" and held["tag", "qrl.step"] == "train"
    assert not {"mlflow.user", "qrl.pid"} & set(rows["key"])
    tables.write(tmp_path / "export", runs=rows)
    assert len(tables.measures([tmp_path / "export"] * 2, "runs")) == len(rows)


def test_the_words_of_the_page_follow_from_the_answers(frame):
    sizes = [frame[frame["size"] == "m3"].assign(size=size) for size in contrasts.PARAMETERS]
    text = told(findings(pd.concat(sizes)))
    assert "**In four bits (gptq) RL makes these models quantize less cleanly**: the loss, accuracy at full" in text
    assert "under 1 of 2 schemes (`gptq`) GRPO's loss is shown to be larger" in text and "so far" not in text
    control = [each[each["variant"] == "sft"].assign(variant="pretrained") for each in sizes]
    assert "Without m3, 1 of these differences remains." in told(findings(pd.concat(sizes + control)))
    same = sizes[0][sizes[0]["variant"] == "grpo"]
    control = [control[0], *(same.assign(size=size, variant="pretrained") for size in list(contrasts.PARAMETERS)[1:])]
    found = findings(pd.concat(sizes + control))
    assert found.controls["pretrained", "gptq"].value.estimate == pytest.approx(0.05 / 4)
    assert "Without m3, none of these differences remains." in told(found)
    text = told(findings(pd.concat(sizes[:3])))
    assert (
        "**No answer yet, since m200 has not been run under all seeds**" in text and "Over 3 of 4 sizes so far." in text
    )
    few = pd.concat(sizes)
    assert "**No answer yet, with 3 of 4 seeds**" in told(findings(few[few["seed"] > 0]))
    equal = pd.concat(sizes)
    equal["correct"] = equal.groupby(["size", "variant", "seed", "question"])["correct"].transform("min")
    found = findings(equal)
    text = told(found)
    assert "**In four bits (gptq) RL changes what quantization costs by less than 0.02**" in text
    assert "under none of 2 schemes is GRPO's loss shown to differ" in text
    assert page.title(found).startswith(
        "In four bits (gptq) RL changes what quantization costs by less than 0.02\nCompared with SFT"
    )
    assert page.about_training(found).startswith("Compared with SFT, under none of 2 schemes")


def test_a_difference_that_turns_without_the_smallest_size_is_told(frame):
    """At m3 the control loses nothing, GRPO 0.10; at the other sizes the control loses 0.0125 more than GRPO."""
    parts = []
    for size in contrasts.PARAMETERS:
        own = frame[frame["size"] == "m3"].assign(size=size)
        control = own[own["variant"] == "grpo"].assign(variant="pretrained")
        right = 360 if size == "m3" else 315  # of 400; GRPO's are 320
        control["correct"] = np.where(
            control["scheme"] == "gptq",
            control["question"].str.split("-").str[1].astype(int) < right,
            control["correct"],
        )
        parts += [own, control]
    found = findings(pd.concat(parts).astype({"correct": "int8"}))
    assert found.controls["pretrained", "gptq"].value.estimate == pytest.approx((0.10 - 3 * 0.0125) / 4)
    assert "Without m3, none of these differences remains, and the sign turns under `gptq`: −0.01" in told(found)


def test_a_control_as_accurate_as_grpo_is_told_apart_from_others(frame):
    """At m3 the control is less accurate than GRPO, at m25 as accurate; there, its loss under gptq is that of GRPO."""
    control = frame[frame["variant"] == np.where(frame["size"] == "m3", "sft", "grpo")]
    text = told(findings(pd.concat([frame, control.assign(variant="pretrained")])))
    assert "one model per size, less accurate than GRPO at m3: it does not isolate RL." in text
    assert (
        "At m25, where both are equally accurate (0.900), the largest of 2 differences is" in text
        and "At m3, where" not in text
    )


def test_the_page_tells_widths_and_what_moved(frame):
    """A loss of 0.10 after GRPO and 0.05 before, in four bits: the cliff moves, which is tested."""
    eight = frame[frame["scheme"] == "gptq"]
    rows = pd.concat([frame, *(eight.assign(scheme=scheme) for scheme in ("gptq-int3", "gptq-int2"))])
    shares = {"base": np.nan, "sft": 0.5, "grpo": 0.25}
    same = {"size": "m3", "seed": 0, "tensor": "a", "numel": 1, **dict.fromkeys(MX, 0.01)}
    why = pd.DataFrame([{"variant": variant, "moved": share, **same} for variant, share in shares.items()])
    text = told(findings(rows), why)
    assert "change GPTQ's loss in 4 bits at m3 and m25, 3 bits at m3 and m25 and 2 bits" in text
    assert "at m3 it is none before GRPO and 4 bits after" in text and "m3 base in 4 bits" in text
    assert "GRPO moves 25 % (SFT: 50 %) of the weights" in text
    assert "In fp32" not in text and "nan" not in text and "times" not in text


@pytest.mark.slow
def test_the_page_is_what_the_export_says(tmp_path):
    """The page beside the export is written by the command that it names."""
    command = [sys.executable, *page.COMMAND.replace("DIR", str(tmp_path)).split()[1:]]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for name in ("page.md", "tables.md", "real.md"):
        assert (ROOT / "tests" / "benchmarks" / "answer" / "found" / name).read_text() == (tmp_path / name).read_text()


def exported(frame: pd.DataFrame, folder: Path, **counts: float) -> str:
    """Write an export of answers, with the parameters of these sizes."""
    cells = frame[tables.CELL].drop_duplicates().assign(parameters=frame["size"].map(counts), truncated=0.0, parsed=1.0)
    tables.write(folder, frame, cells=cells)
    return str(folder)


def test_other_models_are_told_by_their_own_names_and_sizes(frame, tmp_path):
    named = frame.replace({"size": {"m3": "Qwen3-1.7B", "m25": "Qwen3-0.6B"}})
    folder = exported(named, tmp_path / "export", **{"Qwen3-1.7B": 1.7e9, "Qwen3-0.6B": 6e8})
    said = " ".join(report.write(folder, None, tmp_path / "out").split())
    assert "**In four bits (gptq) RL makes these models quantize less cleanly**" in said and "so far" not in said
    assert "over Qwen3-0.6B and Qwen3-1.7B (600 M and 1.7e+03 M parameters)" in said
    assert "Nothing follows for other models, tasks and settings. **RL" in said and "../README.md" not in said
    assert f"Made by `python tests/benchmarks/answer/report.py {folder} --out DIR`." in said
    shown = (tmp_path / "out" / "tables.md").read_text()
    assert shown.index("| Qwen3-0.6B | base |") < shown.index("| Qwen3-1.7B | base |")
    assert (tmp_path / "out" / "bits.png").is_file()
    with pytest.raises(BadInput, match=r"number of parameters of Qwen3-1\.7B: run export\.py again where"):
        report.write(exported(named, tmp_path / "gone", **{"Qwen3-0.6B": 6e8}), None, tmp_path / "out")


def test_one_seed_has_a_report(frame, tmp_path):
    one = frame[frame["seed"] == 0]
    folder = exported(one, tmp_path / "export")
    same = {"seed": 0, "tensor": "a", "numel": 1, "moved": 0.5, **dict.fromkeys((*MX, "moved_fp32"), 0.01)}
    same |= dict.fromkeys(("principal", "principal_by_size", "rotation_deg", "spectrum_shift"), 1.0)
    tables.write(tmp_path / "export", why=pd.DataFrame([{"size": "m3", "variant": v, **same} for v in ("grpo", "sft")]))
    assert "one seed" in report.write(folder, None, tmp_path / "out")
    assert (
        "| m3 | grpo | 0.01 (0.01 to 0.01) | 0.5 (0.5 to 0.5) |  |  |" in (tmp_path / "out" / "tables.md").read_text()
    )


def test_what_is_no_export_is_refused(frame, tmp_path):
    folder = exported(frame, tmp_path / "export")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    for other in ("missing", "empty"):
        with pytest.raises(BadInput, match=f"{other} is no export: run\\.py or export\\.py writes one"):
            report.write(f"{folder},{tmp_path / other}", None, out)
    few = exported(frame[(frame["size"] == "m3")].assign(seed=lambda rows: rows["seed"] + 9), tmp_path / "few")
    with pytest.raises(BadInput, match="share no seed"):
        report.write(folder, few, out)
    whole = (tmp_path / "export" / "correct.parquet").read_bytes()
    (tmp_path / "export" / "correct.parquet").write_bytes(whole[:900])
    with pytest.raises(BadInput, match=r"correct\.parquet cannot be read as a table"):
        report.write(folder, None, out)
    frame[["size", "seed"]].to_parquet(tmp_path / "export" / "correct.parquet")
    with pytest.raises(BadInput, match=r"correct\.parquet has no column question"):
        report.write(folder, None, out)
    assert not out.exists()


def test_models_are_named_by_their_folders_and_controls_by_their_bases():
    named = export.sizes(["/a/m3", "/a/m3-pretrained", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"])
    assert list(named.values()) == ["m3", "m3", "Qwen3-0.6B", "Qwen3-1.7B"]
    with pytest.raises(BadInput, match="/a/m3 and /b/m3 have the same name"):
        export.sizes(["/a/m3", "/b/m3"])
    assert export.parameters("qrl-tiny") == pytest.approx(2.5e6, rel=0.01)
    assert np.isnan(export.parameters("/a/m3"))


def test_the_recipe_for_qwen3_has_the_schemes_of_the_sweep_and_takes_its_arms():
    folder = ROOT / "tests" / "benchmarks" / "answer"
    methods = ("sft", "qwen3-math-qlora", "qat-int4", "qad-int4")
    first, *others = arms.load(str(folder / "qwen3.yaml"), methods, {"model": "Qwen/Qwen3-0.6B"}, 0)
    own = recipes.load(str(folder / "sweep.yaml"))
    assert first.recipe.quantize.schemes == own.quantize.schemes and [each.name for each in others] == list(methods)
    for key in ("calibration_samples", "calibration_seed"):
        assert getattr(first.recipe.quantize, key) == getattr(own.quantize, key)
    limits = [key for key in type(own.evaluate).model_fields if key.startswith(("min_", "max_")) and "rate" in key]
    assert {key: getattr(first.recipe.evaluate, key) for key in limits} == {
        key: getattr(own.evaluate, key) for key in limits
    }
    assert first.recipe.task == "math" and first.recipe.evaluate.unpacked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "m7"], "--sizes has 'm7': expected some of m3, m10, m25, m200"),
        (["--seeds", "x"], "--seeds has 'x': expected whole numbers"),
        (["--arms", "nosuch"], "--arms: .*nosuch"),
    ],
)
def test_a_run_that_names_what_is_not_there_ends_before_it_begins(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", str(tmp_path / "work"), *words])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2 and re.search(said, capsys.readouterr().err)


def test_exports_of_several_sessions_are_joined_once(frame, tmp_path):
    for name, seeds in (("first", (0, 1, 3)), ("second", (1, 2))):
        tables.write(tmp_path / name, frame[frame["seed"].isin(seeds)])
    last = frame[frame["seed"] == 2].assign(correct=1, scheme="w8a16", variant="qlora").astype({"correct": "int8"})
    last = last.drop_duplicates(tables.ROW)
    tables.write(tmp_path / "third", last)
    joined = tables.answers([tmp_path / name for name in ("first", "second", "third")])
    keys = [*tables.ROW, "variant", "scheme"]
    whole = pd.concat([frame, last]).sort_values(keys).reset_index(drop=True)
    assert joined.sort_values(keys).reset_index(drop=True)[whole.columns].astype(str).equals(whole.astype(str))
    assert tables.measures([tmp_path / "first"], "weights") is None


def test_a_cell_that_two_exports_hold_comes_whole_from_the_last(frame, tmp_path):
    gptq = frame[(frame["size"] == "m3") & (frame["scheme"] == "gptq")]
    tables.write(tmp_path / "first", gptq.assign(correct=0))
    cell = gptq[(gptq["variant"] == "grpo") & (gptq["seed"] == 1)].head(40)
    tables.write(tmp_path / "second", cell.assign(correct=1))
    joined = tables.answers([tmp_path / "first", tmp_path / "second"])
    assert joined["correct"].sum() == 40 and len(joined) == len(gptq) - N + 40


def test_no_more_trainings_than_asked_run_at_once(tmp_path, monkeypatch):
    work, running, most = (
        run.Work(tmp_path, {}, ["tiny-qlora", "qat-int4"], fp8=True, weights=False, trainings=2),
        [],
        [],
    )
    monkeypatch.setattr(run.export, "trained", lambda *_, **__: "models:/m")
    monkeypatch.setattr(run.export, "quantized", lambda *_: {})

    def qrl(name: str, *_words: str) -> bool:
        if name.startswith(("train", "arm")):
            running.append(name)
            most.append(len(running))
            time.sleep(0.05)
            running.remove(name)
        return True

    monkeypatch.setattr(work, "qrl", qrl)
    with ThreadPoolExecutor(3) as lanes:
        list(lanes.map(lambda seed: work.unit("m3", run.SIZES["m3"], seed, []), range(3)))
    assert max(most) == 2 and len(most) >= 12


def test_what_arms_begin_with_is_trained_once_and_failures_are_not_lost(tmp_path, monkeypatch):
    work, done = run.Work(tmp_path, {}, ["sft", "qat-int4"], fp8=False), []
    monkeypatch.setattr(run.export, "trained", lambda *_, **__: "models:/m")
    monkeypatch.setattr(run.export, "quantized", lambda *_: {})

    def qrl(name, *_words, **_more):
        if name not in done:
            done.append(name)
        return not name.startswith("quantize")

    monkeypatch.setattr(work, "qrl", qrl)
    work.unit("m3", run.SIZES["m3"], 0, [""])
    assert done.index("train-grpo-m3-0") < done.index("arm-qat-int4-m3-0") < done.index("sweep-m3-0")
    assert not any(name.startswith(("diagnose", "evaluate")) for name in done), "nothing was stored"
    assert recipes.load(str(tmp_path / "m3.yaml"), {}).train.learning_rate == run.SIZES["m3"].learning_rate
    (first, arm) = arms.load(str(tmp_path / "m3.yaml"), ("tiny-qlora",), {}, 0)
    assert arm.recipe.train.learning_rate == 1e-3 and arm.recipe.train.micro_batch == first.recipe.train.micro_batch
    monkeypatch.setattr(work, "quantize", lambda *_: {"sft:nf4": "models:/n"})
    monkeypatch.setattr(work, "qrl", lambda name, *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        work.cells("sft", "models:/m", "m3", 0, [])


@pytest.mark.slow
def test_the_page_begins_with_the_real_model_and_says_where_the_first_answer_disagrees(frame, tmp_path):
    """Models made here whose losses are the same; on the real one GRPO loses 0.20 where the base loses 0.10."""
    sizes = [frame[frame["size"] == "m3"].assign(size=size) for size in contrasts.PARAMETERS]
    equal = pd.concat(sizes, ignore_index=True)
    equal["correct"] = equal.groupby(["size", "variant", "seed", "question"])["correct"].transform("min")
    rates = {("base", "full"): 0.2, ("base", "nf4"): 0.1, ("grpo", "full"): 0.8, ("grpo", "nf4"): 0.6}
    rates |= {
        ("sft", "full"): 0.8,
        ("sft", "nf4"): 0.8,
        ("base", "gptq"): 0.2,
        ("grpo", "gptq"): 0.8,
        ("sft", "gptq"): 0.8,
    }
    parts = []
    for ((variant, scheme), rate), seed in itertools.product(rates.items(), (2, 3, 4, 5)):
        labels = {"size": "sums", "seed": seed, "variant": variant, "scheme": scheme}
        parts.append(pd.DataFrame({"question": np.arange(N).astype(str), "correct": np.arange(N) < N * rate, **labels}))
    real = exported(pd.concat(parts, ignore_index=True).astype({"correct": "int8"}), tmp_path / "real")
    folder, out = exported(equal, tmp_path / "export"), tmp_path / "out"
    text = report.write(folder, None, out, real)
    words = " ".join(text.split())
    assert text.startswith("# Does RL change how cleanly a model quantizes?") and text.count("\n# ") == 0
    assert words.index("it depends on the scale") < words.index(f"## {page.CONTRAST}")
    anchor = page.CONTRAST.lower().replace(":", "").replace(" ", "-")
    assert f"**This differs from the first answer**, given on [models made here](#{anchor})" in words
    assert "“In four bits (gptq) RL changes what quantization costs by less than 0.02”" in words
    assert "Under `gptq` the answer on SmolLM2-135M-Instruct is: grpo and base differ by less than the margin" in words
    assert "shown to differ from SFT's under none of 2 schemes; on SmolLM2-135M-Instruct (SFT at the" in words
    assert "planned rate) under 1 of 2." in words
    assert f"Made by `python tests/benchmarks/answer/report.py {folder} --real {real} --out DIR`." in words
    assert {path.name for path in out.iterdir()} == {
        *("page.md", "tables.md", "real.md", "excess.png", "bits.png", "real.png")
    }


def test_the_real_model_is_on_top_of_this_repositorys_own_export_alone(tmp_path):
    own = ROOT / "tests" / "benchmarks" / "answer"
    assert report.default_real(str(own / "export")) == str(own / "real" / "export")
    assert report.default_real(str(tmp_path)) == "" == report.default_real(f"{own / 'export'},{tmp_path}")


def test_every_interval_of_the_readmes_answer_is_one_of_the_page():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    answer = text[: text.index("## What it does")]
    found = ROOT / "tests" / "benchmarks" / "answer" / "found"
    told = "".join((found / name).read_text(encoding="utf-8") for name in ("page.md", "real.md"))
    intervals = re.findall(r"\S+(?: %)? \[[−+\d., ]+\]", answer)
    assert len(intervals) >= 4
    flat = " ".join(told.split())
    assert [each for each in intervals if each.lstrip("(") not in flat] == []
