"""The tables of `tests/benchmarks/answer/real` from an export that is made with known losses."""

import importlib.util
import itertools
import json
import math
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qrl import checkpoint, names, quantize, stats, tiny
from qrl import recipe as recipes
from qrl.diagnose import movement
from qrl.errors import BadInput, QrlError
from qrl.formats import stored
from qrl.stats import Estimate

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "answer"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "answer" / "real"))

import collect
import evidence
import figure
import layers
import summary
import tables
from commands import Commands, Slots
from evidence import Evidence
from real import page
from study import Study

pytestmark = pytest.mark.process

_SPEC = importlib.util.spec_from_file_location("run_real", Path(summary.__file__).with_name("run.py"))
run = importlib.util.module_from_spec(_SPEC)  # the first answer has a module `run`, too
_SPEC.loader.exec_module(run)

SEEDS, N, HELDOUT = (2, 3, 4, 5), 200, 260
ACCURACY = {  # variant, scheme → accuracy under each of SEEDS
    ("base", "full"): (0.20, 0.20, 0.20, 0.20),
    ("base", "nf4"): (0.10, 0.10, 0.11, 0.09),
    ("base", "gptq"): (0.16, 0.17, 0.15, 0.16),
    ("base", "gptq-int2"): (0.0, 0.0, 0.0, 0.0),
    ("grpo", "full"): (0.80, 0.80, 0.81, 0.79),
    ("grpo", "nf4"): (0.60, 0.60, 0.62, 0.58),
    ("grpo", "gptq"): (0.76, 0.76, 0.77, 0.75),
    ("grpo", "gptq-int2"): (0.10, 0.10, 0.10, 0.10),
    ("sft", "full"): (0.70, 0.70, 0.70, 0.70),
    ("sft", "nf4"): (0.60, 0.60, 0.60, 0.60),
    ("grpo", "rtn-int4"): (0.70, 0.70, 0.70, 0.71),
    ("base-c100", "gptq"): (0.12, 0.13, 0.12, 0.12),
    ("base-c101", "gptq"): (0.17, 0.17, 0.17, 0.17),
    ("base-hf", "nf4"): (0.11, 0.10, 0.11, 0.10),
    ("grpo-keep-none", "full"): (0.60, 0.60, 0.62, 0.58),
    ("grpo-keep-q_proj", "full"): (0.65, 0.66, 0.67, 0.62),
}


Rates = dict[tuple[str, str], tuple[float, ...]]


def answers_of(accuracies: Rates, seeds: tuple[int, ...] = SEEDS, task: str = "sums") -> pd.DataFrame:
    """Return answers whose accuracies are exact; each seed draws its own questions of the same held-out ones."""
    parts = []
    for ((variant, scheme), rates), (place, seed) in itertools.product(accuracies.items(), enumerate(seeds)):
        drawn = np.random.default_rng(seed).permutation(HELDOUT)[:N]
        right = np.arange(N) < round(N * rates[place])
        labels = {"size": task, "seed": seed, "variant": variant, "scheme": scheme}
        parts.append(pd.DataFrame({"question": [f"q{number}" for number in drawn], "correct": right, **labels}))
    return pd.concat(parts, ignore_index=True).astype({"correct": "int8"})


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return answers_of(ACCURACY)


@pytest.fixture(scope="module")
def held(frame) -> Evidence:
    return Evidence(frame)


def mean(cell: tuple[str, str]) -> float:
    return float(np.mean(ACCURACY[cell]))


def test_a_loss_is_compared_in_points_as_a_share_and_in_log_odds(held):
    found = evidence.compare(held, "grpo", "base", "nf4")
    cells = [("grpo", "nf4"), ("grpo", "full"), ("base", "nf4"), ("base", "full")]
    kept, full, base_kept, base_full = map(mean, cells)
    assert found.seeds == SEEDS
    assert found.points.estimate == pytest.approx((kept - full) - (base_kept - base_full))
    assert found.ratio.estimate == pytest.approx((kept / full) / (base_kept / base_full))
    odds = [math.log(rate / (1 - rate)) for rate in (kept, full, base_kept, base_full)]
    assert found.log_odds.estimate == pytest.approx(odds[0] - odds[1] - odds[2] + odds[3])
    assert found.points.runs.labels == ("2", "3", "4", "5")


@pytest.mark.parametrize("scheme", ["nf4", "gptq"])
def test_the_p_value_of_a_ratio_agrees_with_its_interval(held, scheme):
    found = evidence.compare(held, "grpo", "base", scheme)
    low, high = math.exp(found.log_ratio.low), math.exp(found.log_ratio.high)
    assert (low, high) == pytest.approx((found.ratio.low, found.ratio.high))
    assert (found.p_ratio < 0.05) == (low > 1 or high < 1)


def test_each_seed_has_its_own_outcomes(held):
    found = evidence.compare(held, "grpo", "base", "nf4")
    points, ratio, log_odds = evidence.of_one_seed(held, found, 4)
    assert points == pytest.approx((0.62 - 0.81) - (0.11 - 0.20))
    assert ratio == pytest.approx((0.62 / 0.81) / (0.11 / 0.20))
    logits = {rate: math.log(rate / (1 - rate)) for rate in (0.62, 0.81, 0.11, 0.20)}
    assert log_odds == pytest.approx(logits[0.62] - logits[0.81] - logits[0.11] + logits[0.20])


def test_shares_that_are_kept_are_ratios_of_accuracies_and_of_gains(held):
    kept = evidence.accuracy_kept(held, "grpo", "nf4")
    assert kept.estimate == pytest.approx(mean(("grpo", "nf4")) / mean(("grpo", "full")))
    gain = evidence.gain_kept(held, "grpo", "gptq")
    assert gain.estimate == pytest.approx((0.76 - 0.16) / 0.60)
    assert gain.low < gain.estimate < gain.high
    assert evidence.gain_kept(held, "grpo", "awq-ct") is None


def test_seeds_that_were_seen_before_the_design_are_in_no_contrast(frame, held):
    seen = frame[frame["seed"] == 2].assign(seed=0, correct=0)
    assert Evidence(pd.concat([frame, seen])).contrast({("grpo", "full"): 1.0}) == held.contrast(
        {("grpo", "full"): 1.0}
    )


def test_a_contrast_uses_the_seeds_that_its_own_cells_share(frame):
    fewer = frame[~((frame["variant"] == "sft") & (frame["seed"] > 3))]
    own = Evidence(fewer)
    assert evidence.compare(own, "grpo", "sft", "nf4").seeds == (2, 3)
    assert evidence.compare(own, "grpo", "base", "nf4").seeds == SEEDS
    assert own.contrast({("sft", "gptq"): 1.0}) is None


def test_the_base_varies_between_seeds_only_where_a_seed_draws_its_calibration_set(held):
    assert held.contrast({("base", "full"): 1.0, ("base", "nf4"): -1.0}).runs is None
    assert held.contrast({("base", "full"): 1.0, ("base", "gptq"): -1.0}).runs is not None


def test_tests_that_were_not_made_count_in_the_correction(held):
    alone = summary.family(held, "grpo", "base", ("nf4",))["nf4"]
    among = summary.family(held, "grpo", "base", ("nf4", "awq-ct", "fp8"))["nf4"]
    smallest = min(alone.value.p_points, alone.value.p_ratio)
    assert min(alone.p_points, alone.p_ratio) == pytest.approx(min(1, 2 * smallest))
    assert min(among.p_points, among.p_ratio) == pytest.approx(min(1, 6 * smallest))


def test_a_ratio_is_not_tested_where_the_other_variant_keeps_almost_nothing(held):
    tested = summary.family(held, "grpo", "base", ("nf4", "gptq-int2"))["gptq-int2"]
    assert tested.p_ratio is None and math.isfinite(tested.value.ratio.estimate)
    assert summary.direction(tested.value.ratio, tested.p_ratio, 1.0) == 0


def estimate(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, (high - low) / 4, low, high, N)


@pytest.mark.parametrize(
    ("points", "ratio", "p", "said"),
    [
        ((-0.3, -0.1), (0.5, 0.8), 0.01, "grpo quantizes less cleanly than base, on both scales"),
        ((0.1, 0.3), (1.2, 1.8), 0.01, "grpo quantizes more cleanly than base, on both scales"),
        ((-0.3, -0.1), (1.2, 1.8), 0.01, "it depends on the scale: grpo loses more points and keeps a larger share"),
        ((0.1, 0.3), (0.5, 0.8), 0.01, "it depends on the scale: grpo loses fewer points and keeps a smaller share"),
        ((-0.3, -0.1), (0.9, 1.8), 0.01, "grpo quantizes less cleanly than base in points; as a share it is open"),
        ((-0.1, 0.3), (1.1, 1.8), 0.01, "grpo quantizes more cleanly than base as a share; in points it is open"),
        ((-0.04, 0.04), (0.95, 1.05), 0.9, "grpo and base differ by less than the margin, on both scales"),
        ((-0.3, 0.1), (0.9, 1.8), 0.9, "inconclusive"),
        ((-0.3, -0.1), (1.2, 1.8), 0.06, "inconclusive"),  # after Holm's correction
    ],
)
def test_what_counts_as_an_answer(points, ratio, p, said):
    own = estimate(*points), estimate(*ratio), estimate(*ratio), estimate(-1, 1)
    value = evidence.Comparison("grpo", "base", "nf4", SEEDS, *own, least=0.1)
    assert summary.answer(summary.Tested(value, p, p)) == said


def test_one_command_makes_all_tables_of_an_export(frame, tmp_path):
    cells = pd.DataFrame(
        [
            {"size": "sums", "seed": seed, "variant": "base", "scheme": "nf4", "truncated": 0.2, "parsed": 0.99}
            for seed in SEEDS
        ]
    )
    measured = {"table": "quantized", "projection": "all", "layer_error": 0.5}
    measures = pd.DataFrame(
        [
            {"size": "sums", "seed": seed, "variant": variant, "scheme": scheme, **measured}
            for seed, variant, scheme in itertools.product(SEEDS, ("base", "grpo"), ("nf4", "gptq"))
        ]
    )
    early, late = frame["seed"] < 4, frame["seed"] >= 4
    for lease, own in {"a": early, "b": late}.items():  # each lease exports its seeds
        tables.write(tmp_path / lease, frame[own], cells=cells[cells["seed"].isin(frame[own]["seed"])])
    tables.write(tmp_path / "b", measures=measures)
    text = summary.write(f"{tmp_path / 'a'},{tmp_path / 'b'}")
    assert "Sums: seeds 2, 3, 4, 5." in text
    primary = next(line for line in text.splitlines() if line.startswith("| nf4 | 4 |"))
    assert "+0.500" in primary and "loses more points and keeps a larger share" in primary
    assert "| grpo and base | nf4 | 4 | −0.100 | 1.39 |" in text
    assert "| gptq | 3 | 0.170 | 0.130 | 0.170 | 0.040 | 0.023 |" in text  # the three calibration sets
    assert "| q_proj | not evaluated | +0.050" in text
    assert "| base | nf4 | 0.100 [" in text and "| +0.005 [" in text  # transformers beside vLLM
    assert "| sums | base | nf4 | 2, 3, 4, 5 | 0.200 | 0.990 |" in text
    assert "| nf4 | base | +0.100" in text and "| 0.5 |" in text
    assert "nan" not in text


def test_an_export_of_other_seeds_or_none_is_refused_in_a_sentence(frame, tmp_path):
    with pytest.raises(BadInput, match=r"holds no correct\.parquet: give a folder that"):
        summary.write(str(tmp_path))
    tables.write(tmp_path, frame[frame["seed"] == 2].assign(seed=0))
    with pytest.raises(BadInput, match="no sums under a seed of the study"):
        summary.write(str(tmp_path))


def test_measures_of_matrices_are_means_by_their_size():
    matrices = pd.DataFrame(
        {
            "variant": "grpo",
            "scheme": "nf4",
            "layer": [0, 1, -1],
            "projection": ["q_proj", "q_proj", "lm_head"],
            "tensor": ["a", "b", "c"],
            "numel": [100, 300, 900],
            "relative_mse": [0.1, 0.2, 9.0],
            "code_flip_rate": [0.5, math.nan, 9.0],
        }
    )
    by_kind = collect._of_diagnosis(matrices, "stored").set_index("projection")
    assert set(by_kind.index) == {"q_proj", "all"}
    assert by_kind.loc["all", "relative_mse"] == pytest.approx(0.175)
    assert by_kind.loc["q_proj", "code_flip_rate"] == 0.5


def test_the_base_has_no_change_by_training(tmp_path):
    """`diagnose` writes the measures of training beside both models; they are those of the trained one."""
    changes = movement.Change(numel=1).result()
    assert set(changes) - {"numel"} <= set(collect.OF_TRAINING)
    columns = {"tensor": "a", "layer": 0, "projection": "q_proj", "kurtosis": 4.0, **changes, "numel": 8}
    both = pd.DataFrame([{"variant": variant, **columns, "relative_change": 0.25} for variant in ("base", "grpo")])
    (tmp_path / "weights" / "2").mkdir(parents=True)
    both.to_parquet(tmp_path / "weights" / "2" / names.WEIGHTS)
    measured = collect.measures(f"sqlite:///{tmp_path}/store.db", tmp_path / "weights", "sums")
    whole = measured[measured["projection"] == "all"].set_index("variant")
    assert whole.loc["grpo", "relative_change"] == 0.25 and whole.loc["base", "kurtosis"] == 4.0
    assert whole.loc["base", list(changes.keys() - {"numel"})].isna().all()
    table = summary._of_weights(measured[measured["projection"] == "all"])
    assert "| base | 2 | 4 |  |  |" in table and "| grpo | 2 | 4 | 0.25 | 0 |" in table


def test_the_committed_measures_have_no_change_of_the_base():
    stored = tables.measures([Path(summary.__file__).with_name("export")], "measures")
    assert stored.equals(collect.without_training_of_base(stored))


def test_a_mixture_keeps_what_it_is_told_to_and_has_the_values_of_the_codes_elsewhere(tmp_path):
    quantize.run(names.NF4, tiny.PATH, tmp_path / "nf4")
    folders = layers.write(tiny.PATH, tmp_path / "nf4", tmp_path / "mixed")
    assert {"none", "q_proj", "down_proj", "ends"} < set(folders)
    full = dict(checkpoint.tensors(tiny.PATH))
    values = {name: matrix.values for name, matrix in stored.matrices(tmp_path / "nf4", stored.names(tmp_path / "nf4"))}
    for label, folder in folders.items():
        assert checkpoint.check(folder).quantization is None
        mixed = dict(checkpoint.tensors(folder))
        assert set(mixed) == set(full)
        for name, tensor in mixed.items():
            kept = name not in values or label == "ends" or label in name  # tiny has four layers: all are ends
            expected = full[name] if kept else values[name].to(tensor.dtype)
            assert tensor.equal(expected), (label, name)


def test_work_of_a_lower_rank_begins_first():
    slots, order, holding = Slots(1), [], threading.Event()

    def work(rank: int) -> None:
        with slots.take(rank):
            order.append(rank)

    def hold() -> None:
        with slots.take(0):
            holding.set()
            time.sleep(0.3)

    first = threading.Thread(target=hold)
    first.start()
    holding.wait()
    others = [threading.Thread(target=work, args=(rank,)) for rank in (2, 0, 1)]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join()
    assert order == [0, 1, 2]


def test_a_command_runs_once_and_one_that_fails_is_told(tmp_path, capsys):
    commands = Commands(tmp_path, 1)
    assert commands.run("recipes", "listing") == ""
    written = commands.path("listing.out").stat().st_mtime_ns
    assert commands.run("recipes", "listing") == "" and commands.path("listing.out").stat().st_mtime_ns == written
    assert commands.run("recipes", "wrong", "--no-such-option") is None
    assert commands.failed == ["wrong"] and not commands.whole
    assert "wrong: FAILED with 2" in capsys.readouterr().out
    late = Commands(tmp_path, {"recipes": 1}, stop_after_s=-1)
    assert late.run("recipes", "another") is None and late.left == ["another"] and not late.failed
    assert late.run("recipes", "listing") == ""  # was done before


def test_the_address_that_a_step_prints_is_its_result(tmp_path):
    commands = Commands(tmp_path, 1)
    following = "Next, with the same settings:\nqrl …"
    both = "base:nf4=models:/m-3,base:gptq=models:/m-4"
    printed = {
        "train": (f"Model loading took 1 s\nModel   models:/m-1, grpo in full precision\n{following}", "models:/m-1"),
        "lora": (f"Adapter runs:/2/adapter\n{following}", "runs:/2/adapter"),
        "quantize": (f"Models  {both}\n{following}", both),
    }
    for name, (text, address) in printed.items():
        commands.path(f"{name}.out").write_text(text)
        commands.path(f"{name}.done").touch()
        assert commands.run("train", name) == address
    commands.path("silent.out").write_text("Done.\n")
    commands.path("silent.done").touch()
    with pytest.raises(QrlError, match=r"silent ended well, but .* does not say what it made"):
        commands.run("train", "silent")
    assert commands.run("evaluate", "silent") == ""


def test_the_ratio_is_that_of_the_library(held):
    found = evidence.compare(held, "grpo", "base", "gptq")
    cells = [("grpo", "gptq"), ("grpo", "full"), ("base", "gptq"), ("base", "full")]
    direct = stats.ratio_of_shares(
        [mean(cell) for cell in cells], lambda w: held.contrast(dict(zip(cells, w, strict=True))), found.points.n
    )
    assert (found.ratio.estimate, found.ratio.low, found.ratio.high) == pytest.approx(
        (direct.estimate, direct.low, direct.high)
    )


class Planned(Commands):
    """Commands that are noted and not run; each prints the address that its step would."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1)
        self.words: dict[str, tuple[str, ...]] = {}

    def folder_of(self, address: str) -> Path:
        return Path(address.replace("models:/m-", "/store/"))

    def _run(self, step: str, name: str, words: tuple[str, ...], rank: int) -> bool:
        assert name not in self.words
        self.words[name] = (step, *words)
        options = dict(zip(words[::2], words[1::2], strict=True))
        label = options.get("--models", "").partition("=")[0]
        stored = ",".join(f"{label}:{scheme}=models:/m-{name}" for scheme in options.get("--scheme", "").split(","))
        printed = {"quantize": f"Models  {stored}", "evaluate": "", "diagnose": ""}
        self.path(f"{name}.out").write_text(printed.get(step, f"Model   models:/m-{name}, as it is"))
        return True


def planned(
    folder: Path, variants: list[str], task: str = "sums", data: str | None = None
) -> dict[str, dict[str, str]]:
    """Return the options of every command of seed 2, by name."""
    commands = Planned(folder)
    recipe = folder / "all.yaml"
    recipe.write_text(json.dumps({"extends": "tiny", "quantize": {"schemes": list(summary.SCHEMES)}}))
    study = run.Study(commands, task, recipe, str(tiny.PATH), data=data, rate="3e-5")
    for job in run.jobs_of(study, 2, variants, ["calibration", "weights", "elsewhere"]):
        job()
    return {
        name: {"step": words[0], **dict(zip(words[1::2], words[2::2], strict=True))}
        for name, words in commands.words.items()
    }


def test_a_seed_of_sums_is_trained_quantized_and_evaluated_as_the_design_says(tmp_path):
    commands = planned(tmp_path, ["grpo", "sft", "base", "lora", "qat-int4", "qad-int4"])
    for options in commands.values():
        dotted = [option.removeprefix("--") for option in options if "." in option]
        assert set(dotted) <= set(recipes.fields()) and options["--seed"] == "2"
    assert commands["train-sft-2"]["--train.learning_rate"] == "3e-5"
    assert commands["merge-2"]["--adapter"] == "models:/m-train-lora-2"
    distilled = commands["train-qad-int4-2"]
    assert distilled["--model"] == "/store/train-grpo-2" and distilled["--train.teacher"] == "models:/m-train-grpo-2"
    cells = {
        cell.partition("=")[0]
        for options in commands.values()
        if options["step"] == "evaluate"
        for cell in options["--cells"].split(",")
    }
    for variant in ("base", "grpo", "sft", "lora"):
        assert {f"{variant}:{scheme}" for scheme in ("full", *summary.SCHEMES)} < cells
    assert {cell for cell in cells if cell.startswith("qa")} == {
        f"{variant}:{scheme}" for variant in ("qat-int4", "qad-int4") for scheme in ("full", "rtn-int4")
    }
    for scheme in ("awq-ct", "gptq", "gptq-int3"):  # three calibration sets of the base
        assert {f"base:{scheme}", f"base-c100:{scheme}", f"base-c101:{scheme}"} < cells
    assert {"grpo-own:gptq", "grpo-g32:rtn-int4", "base-hf:nf4", "grpo-hf:full"} < cells
    (measured,) = [options for options in commands.values() if options["step"] == "diagnose"]
    assert len(measured["--quantized"].split(",")) == 2 * len(summary.SCHEMES)


def test_rl_on_gsm8k_begins_with_the_model_after_sft(tmp_path):
    commands = planned(tmp_path, ["grpo", "base"], "gsm8k", "DATA")
    assert commands["train-base-2"]["--train.algorithm"] == "sft" and commands["train-base-2"]["--train.steps"] == "350"
    assert commands["train-grpo-2"]["--model"] == "/store/train-base-2"  # `--model` takes a folder
    assert "base:full=models:/m-train-base-2" in commands["evaluate-base-2"]["--cells"]
    assert f"pretrained:full={tiny.PATH}" in commands["evaluate-base-2"]["--cells"]
    assert {options["--data"] for options in commands.values()} == {"DATA"}


def test_the_recipes_have_the_settings_of_the_design():
    folder = Path(run.__file__).parent
    sums, gsm8k = (recipes.load(str(folder / f"{task}.yaml")) for task in ("sums", "gsm8k"))
    assert tuple(sums.quantize.schemes) == summary.SCHEMES == tuple(gsm8k.quantize.schemes)
    assert (sums.train.steps, sums.train.prompts_per_step, sums.train.generations) == (100, 32, 16)
    assert (sums.train.learning_rate, sums.train.max_completion_tokens, sums.train.beta) == (1e-5, 96, 0.0)
    assert (gsm8k.train.steps, gsm8k.train.prompts_per_step, gsm8k.train.generations) == (120, 32, 8)
    assert (gsm8k.train.learning_rate, gsm8k.train.max_completion_tokens, gsm8k.task) == (5e-6, 300, "gsm8k")
    for recipe, n in ((sums, 2000), (gsm8k, 1319)):
        assert recipe.evaluate.n == n and recipe.evaluate.engine == "vllm" and recipe.evaluate.unpacked
        assert recipe.quantize.group_size == 64 and recipe.quantize.calibration_samples == 128
        assert recipe.train.dtype == "bf16" and recipe.train.store_dtype == "auto"


def told(study: Study) -> str:
    """Return the page in one line."""
    return " ".join(page.write(study).split())


def same(rate: float) -> tuple[float, ...]:
    return (rate,) * len(SEEDS)


def study_of(grpo_nf4: tuple[float, ...], base_nf4: tuple[float, ...] = same(0.10), **of_sft: float) -> Study:
    """Return a study of base 0.20 and GRPO 0.80 at full precision, with SFT's accuracies where they are given."""
    rates = {
        ("base", "full"): same(0.20),
        ("base", "nf4"): base_nf4,
        ("grpo", "full"): same(0.80),
        ("grpo", "nf4"): grpo_nf4,
    }
    return Study(answers_of(rates | {("sft", scheme): same(rate) for scheme, rate in of_sft.items()}))


@pytest.mark.parametrize(
    ("nf4", "base_nf4", "said"),
    [
        (
            same(0.60),
            same(0.10),
            "**Under `nf4` it depends on the scale: after RL this model loses more accuracy in points, but keeps a "
            "larger share of it.**",
        ),
        (same(0.20), same(0.10), "**After RL this model quantizes less cleanly, on both scales.**"),
        (same(0.80), same(0.10), "**After RL this model quantizes more cleanly, on both scales.**"),
        (
            same(0.80),
            same(0.20),
            "**RL changes what quantization costs this model by less than the margin, on both scales.**",
        ),
        (
            (0.80, 0.55, 0.75, 0.60),
            (0.14, 0.14, 0.14, 0.14),
            "**Inconclusive: neither a change by RL nor its absence is shown.**",
        ),
        (
            same(0.40),
            (0.16, 0.08, 0.06, 0.14),
            "**After RL this model loses more accuracy in points; as a share the answer is open.**",
        ),
        (
            (0.72, 0.80, 0.74, 0.79),
            same(0.14),
            "**After RL this model keeps a larger share of its accuracy; in points the answer is open.**",
        ),
    ],
    ids=["depends", "less", "more", "within", "inconclusive", "points", "share"],
)
def test_the_page_answers_as_the_design_says(nf4, base_nf4, said):
    study = study_of(nf4, base_nf4)
    text = told(study)
    assert said in text
    loss = 0.80 - np.mean(nf4)
    shown = f"GRPO's model loses {loss:.3f} [" if study.cost("grpo", "nf4").low > 0 else "GRPO's model loses "
    assert shown in text and f"accuracy falls from 0.800 to {np.mean(nf4):.3f} after GRPO" in text
    assert "SFT was not evaluated under `nf4`" in text and "nan" not in text and "None" not in text


@pytest.mark.parametrize(
    ("full", "nf4", "said"),
    [
        (0.80, 0.79, "**Not any training costs as much: after SFT the same scheme costs less, on both scales.**"),
        (0.80, 0.20, "**After SFT the same scheme costs more than after RL, on both scales.**"),
        (0.80, 0.60, "**Not specific to RL: after SFT the same scheme costs as much, within the margin.**"),
    ],
)
def test_the_page_says_whether_supervised_fine_tuning_costs_as_much(full, nf4, said):
    text = told(study_of(same(0.60), full=full, nf4=nf4))
    assert said in text and f"SFT's model keeps {100 * nf4 / full:.0f} % [" in text and "GRPO's 75 % [" in text


def test_the_figure_states_the_finding_and_shows_every_scheme(frame, tmp_path):
    study = Study(frame)
    assert page.title(study).startswith("Under nf4, after RL this model loses more accuracy in points, but keeps a")
    figure.draw(study, page.title(study), tmp_path / "real.png")
    assert (tmp_path / "real.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_draws_every_seed_and_no_mean_outside_of_its_axes(frame):
    from matplotlib.figure import Figure

    study = Study(frame)
    panel = figure.Panel("points", study.cost, lambda full, kept: full - kept, (-1.0, 1.0), 0.0)
    axis = Figure().subplots()
    figure._draw(axis, panel, study, {"nf4": 0.0, "gptq-int2": 1.0})
    ticks = [line.get_xdata() for line in axis.lines if line.get_marker() == "|"]
    assert {len(single) for single in ticks} == {len(SEEDS)} and len(ticks) == 5  # SFT has no cell of gptq-int2
    low, high = axis.get_xlim()
    means = [line.get_xdata()[0] for line in axis.lines if line.get_marker() in figure.MARKERS.values()]
    assert max(means) == pytest.approx(0.70) and all(low < mean < high for mean in means)


def test_the_page_tells_seeds_schemes_layers_and_what_was_not_had(frame):
    study = Study(frame)
    text = told(study)
    assert "| 4 | 0.200 | 0.110 | 0.810 | 0.620 | 0.700 | 0.600 | −0.100 | 1.39 |" in text
    assert "`gptq` by 0.040 to 0.050 (4 seeds)" in text  # three calibration sets
    assert "| q_proj | +0.050" in text and "`q_proj` gives most of it back" in text
    assert "differs most from vLLM's is that of base under `nf4`: +0.005" in text
    absent = text[text.index("**Not had**") :]
    assert "`base:awq-ct`" in absent and "`qad-int4:rtn-int4`" in absent and "GSM8K" in absent
    assert "`base:nf4`" not in absent


def test_gsm8k_and_a_further_seed_are_told_where_they_were_had(frame):
    words = {("base", "full"): (0.08, 0.09), ("base", "nf4"): (0.06, 0.06), ("grpo", "full"): (0.1, 0.1)}
    words |= {("grpo", "nf4"): (0.07, 0.07)}
    six = answers_of({cell: rates[:1] for cell, rates in ACCURACY.items()}, (6,))
    text = told(Study(pd.concat([frame, six, answers_of(words, (2, 3), "gsm8k")])))
    assert "**GSM8K** (exploratory)." in text
    assert "Five seeds" in text and "GSM8K" not in text[text.index("**Not had**") :]


@pytest.mark.parametrize(
    ("sft_nf4", "same_rate_nf4", "said"),
    [
        (
            0.79,
            0.55,
            "**At the same learning rate SFT's model loses no less: under no scheme is it found to lose less than",
        ),
        (0.79, 0.78, "**Not any training costs as much: after SFT the same scheme costs less, also at GRPO's learning"),
        (0.60, 0.60, "**Not specific to RL: after SFT the same scheme costs as much, within the margin.**"),
    ],
)
def test_sft_at_the_learning_rate_of_rl_tells_the_rate_from_the_algorithm(sft_nf4, same_rate_nf4, said):
    cells = {
        ("sft", "full"): 0.80,
        ("sft", "nf4"): sft_nf4,
        ("sft-1e-5", "full"): 0.80,
        ("sft-1e-5", "nf4"): same_rate_nf4,
    }
    answers = answers_of({cell: same(rate) for cell, rate in cells.items()})
    study = Study(pd.concat([study_of(same(0.60)).frame, answers]))
    text = told(study)
    assert said in text
    assert f"keeps {100 * same_rate_nf4 / 0.80:.0f} % [" in text and "GRPO at that rate was not run." in text
    is_of_the_rate = "loses no less" in said
    assert is_of_the_rate == ("does no better, at ten times that rate far better" in page.title(study))
    assert "| nf4 | " in text[text.index("**SFT at GRPO's learning rate** (4 seeds)") :]


def runs_of(rates: dict[str, str], moved: dict[str, float]) -> pd.DataFrame:
    """Return MLflow's runs of trainings, as an export has them."""
    rows = []
    for variant, seed in itertools.product(rates, SEEDS):
        values = {names.TAG_STEP: "train", names.TAG_VARIANT: variant, names.TAG_TASK: "sums-1", "seed": str(seed)}
        values |= {"train.learning_rate": rates[variant], "train.steps": "100", "train.method": "full"}
        values |= {"train/moved_share_stored": str(moved[variant])}
        rows += [
            {"run": f"{variant}{seed}", "kind": "param", "key": key, "value": value} for key, value in values.items()
        ]
    return pd.DataFrame(rows)


@pytest.mark.slow
def test_a_control_of_another_learning_rate_is_told(frame):
    runs = runs_of({"sft": "0.0001", "grpo": "1e-05"}, {"sft": 0.58, "grpo": 0.2})
    text = told(Study(frame, runs=runs))
    assert "SFT's learning rate was 1e-4, GRPO's 1e-5, and SFT moved 58 % of the stored weights, GRPO 20 %." in text
    assert "after 100 steps of GRPO 0.800" in text
    assert "**Not separated yet**" not in told(
        Study(frame, runs=runs_of({"sft": "1e-5", "grpo": "1e-05"}, {"sft": 1, "grpo": 1}))
    )


@pytest.mark.slow
def test_a_measure_that_orders_the_losses_is_told_from_those_that_do_not():
    """Three schemes cost GRPO's model 0.1, 0.2, 0.3; the error after the last layer rises, that of weights falls."""
    rates = {("base", "full"): same(0.20), ("grpo", "full"): same(0.80), ("sft", "full"): same(0.80)}
    costs = {"nf4": 0.1, "awq-ct": 0.2, "gptq": 0.3}
    rows = []
    for scheme, cost in costs.items():
        rates |= {("base", scheme): same(0.15), ("grpo", scheme): same(0.80 - cost), ("sft", scheme): same(0.75)}
        for variant, seed in itertools.product(("sft", "grpo"), SEEDS):
            cell = {"size": "sums", "seed": seed, "variant": variant, "scheme": scheme, "projection": "all"}
            error = cost if variant == "grpo" else cost / 2
            rows.append(cell | {"layer_error": error + seed / 1000, "relative_mse": 1 if scheme == "awq-ct" else cost})
    ordered = told(Study(answers_of(rates), measures=pd.DataFrame(rows)))
    assert "ranks the schemes; statistics of the weights do so less** (exploratory). Over 3 schemes" in ordered
    assert (
        "of GRPO's model is +1.00 (+1.00 to +1.00 in single seeds). Of the statistics of the weights the best"
        in ordered
    )
    assert "the error is 0.10 for GRPO's weights and 0.05 for SFT's, a difference of +0.050" in ordered
    turned = pd.DataFrame(rows).assign(layer_error=lambda held: -held["layer_error"])
    text = told(Study(answers_of(rates), measures=turned))
    assert "The error after the last layer does not rank the schemes" in text


def test_a_real_export_without_the_primary_outcome_is_refused_in_a_sentence(frame, tmp_path):
    with pytest.raises(BadInput, match=r"holds no correct\.parquet: give a folder that real/collect\.py wrote"):
        Study.read(str(tmp_path))
    tables.write(tmp_path, frame[frame["scheme"] == "gptq"])
    with pytest.raises(BadInput, match=r"no seed of the study .* with the primary outcome: base and grpo, in full"):
        Study.read(str(tmp_path))
