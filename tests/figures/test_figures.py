"""Figures: whole PNGs, titles that state the finding, nothing left behind."""

import base64
import gzip
import json
import warnings
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
import scipy.stats

from qrl import compare, figures, plan
from qrl.benchmark.summary import Line
from qrl.figures import canvas, cards, comparison, heatmaps, rewards
from qrl.figures import divergence as of_behaviour
from qrl.figures import weights as of_weights
from qrl.stats import Estimate
from qrl.steps import compare as steps_compare

pytestmark = pytest.mark.process

COUNTS = {
    "n": 10000,
    "base": {"full": 6800, "nf4": 6500, "awq": 5800},
    "grpo": {"full": 8200, "nf4": 7950, "awq": 6000},
}


def is_picture(path):
    """Return whether a PNG can be read, is of a legible size, and has ink on it."""
    pixels = matplotlib.image.imread(path)
    return pixels.shape[0] > 300 and pixels.shape[1] > 800 and 0.005 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.9


def weights(change=1.0):
    names = [
        f"model.layers.{layer}.{part}.weight" for layer in range(12) for part in ("self_attn.q_proj", "mlp.up_proj")
    ]
    names += ["model.embed_tokens.weight", "lm_head.weight"]
    return pd.DataFrame(
        {
            "variant": variant,
            "tensor": name,
            "numel": 1000 + i,
            "w4_relative_mse": 0.015 * (change if variant == "grpo" else 1),
        }
        for variant in ("base", "grpo")
        for i, name in enumerate(names)
    )


def measured(layers=4, flips=0.02):
    """Return weights as `diagnose` measures them, with known numbers."""
    sizes = {
        "median_abs": 0.01,
        "abs_q99": 0.04,
        "abs_q999": 0.05,
        "abs_q9999": 0.07,
        "max_abs": 0.2,
        "abs_outlier_frac": 3e-6,
    }
    rows = [
        {
            "variant": variant,
            "tensor": f"model.layers.{layer}.{part}.weight",
            "layer": layer,
            "projection": part.rpartition(".")[2],
            "numel": 1000,
            "w4_relative_mse": 0.015 + 0.001 * layer,
            "relative_change": 0.01,
            "code_flip_rate": flips * (layer == 2),
            **sizes,
        }
        for variant in ("base", "grpo")
        for layer in range(layers)
        for part in ("self_attn.q_proj", "mlp.up_proj")
    ]
    head = {"tensor": "lm_head.weight", "layer": -1, "projection": "lm_head"}
    return pd.DataFrame([*rows, *(rows[i] | head | {"code_flip_rate": 0.0} for i in (0, -1))])


def stored():
    frame = measured().query("layer >= 0").assign(relative_mse=0.01, energy=1.0, update_survival=2.0, update_cosine=0.4)
    return pd.concat([frame.assign(scheme="nf4"), frame.assign(scheme="awq", relative_mse=0.02)])


def test_maps_and_spreads_are_drawn(tmp_path):
    figures.movement(measured(), tmp_path / "movement.png")
    figures.movement(measured(48).query("variant == 'base'"), tmp_path / "base.png")
    figures.schemes(stored(), tmp_path / "schemes.png")
    figures.schemes(
        pd.concat([stored().assign(scheme=f"s{i}", relative_mse=10.0**-i) for i in range(6)]), tmp_path / "many.png"
    )
    figures.spread(measured(), tmp_path / "spread.png")
    assert all(is_picture(tmp_path / f"{name}.png") for name in ("movement", "base", "schemes", "many", "spread"))


def test_titles_of_maps_state_the_finding():
    title = heatmaps.movement_finding(measured())
    assert "0.44 % of the 4-bit codes" in title and "q_proj of layer 2 (2 %)" in title
    assert "no 4-bit code" in heatmaps.movement_finding(measured(flips=0))
    assert "of the 8-bit codes" in heatmaps.movement_finding(measured().assign(proxy_bits=8))
    title = heatmaps.schemes_finding(stored())
    assert "nf4 1 % (base) and 1 % (grpo); awq 2 % (base) and 2 % (grpo)" in title
    many = pd.concat([stored().assign(scheme=f"s{i}", relative_mse=10.0**-i) for i in range(1, 7)])
    title = heatmaps.schemes_finding(many)
    assert "Of 6 schemes" in title and title.index("s6") < title.index("0.0001 %") < title.index("s1") < title.index(
        "10 %"
    )
    table = heatmaps.grid(measured().query("variant == 'base'"), "w4_relative_mse")
    assert table.shape == (2, 4)
    assert table.loc["up_proj", 3] == pytest.approx(0.018)


def test_the_proxys_error_is_read_by_either_name(tmp_path):
    other = measured().rename(columns={"w4_relative_mse": "rtn_relative_mse"}).assign(proxy_bits=3)
    figures.layer_error(other, tmp_path / "error.png")
    figures.movement(other, tmp_path / "movement.png")
    figures.weights_page(other, pd.DataFrame(), pd.DataFrame(), tmp_path / "weights.html")
    plots, _, _ = unpacked(tmp_path / "weights.html")
    assert plots["figure0"]["title"].startswith("3-bit error") and plots["figure0"]["data"][0]["z"][0][0] == 1.5
    assert "3 bits" in of_weights.error_finding(other, ["base", "grpo"])


def divergences(layers=4):
    """Return next-token divergences as `diagnose` measures them, with known numbers."""
    sizes = {"n": 200, "positions": 18000, "top1_agreement": 0.97, "top1_agreement_stderr": 0.001}
    rows = [
        {"variant": variant, "scheme": scheme, "layer": -1, "kl": kl, "kl_stderr": kl / 10}
        for variant in ("base", "grpo")
        for scheme, kl in (("nf4", 5e-4), ("awq", 7e-4))
    ]
    rows += [
        {"variant": variant, "scheme": "w4", "layer": layer, "kl": 1e-4 * (layer + 1), "kl_stderr": 2e-4}
        for variant in ("base", "grpo")
        for layer in range(layers)
    ]
    return pd.DataFrame([row | sizes for row in rows])


def unpacked(path):
    """Return a page's figures by name, its text, and the library embedded in it."""
    text = path.read_text()
    plots = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    packed = text.partition('type="text/plain">')[2].partition("</script>")[0]
    return plots, text.replace(packed, ""), gzip.decompress(base64.b64decode(packed)).decode()


def test_the_page_needs_nothing_else_and_holds_the_numbers(tmp_path):
    figures.weights_page(measured(), stored(), pd.DataFrame(), tmp_path / "weights.html")
    plots, text, library = unpacked(tmp_path / "weights.html")
    assert len(library) > 1e6 and "newPlot" in library
    assert "src=" not in text and "<link" not in text and "http" not in text
    assert len(plots) == 4 + 1 + 1 + 6 and all(f'<div id="{name}" data-figure' in text for name in plots)
    titles = [figure["title"] for figure in plots.values()]
    assert "nf4: codes that changed, %" in titles
    assert "model.layers.2.mlp.up_proj.weight" in plots["figure4"]["data"][0]["text"]
    assert [path.name for path in tmp_path.iterdir()] == ["weights.html"]


def test_a_name_ends_no_script_of_the_page(tmp_path):
    name = "<!--<script>model</script>"
    figures.weights_page(measured().assign(tensor=name), stored(), pd.DataFrame(), tmp_path / "weights.html")
    plots, text, _ = unpacked(tmp_path / "weights.html")
    assert "<!--" not in text and text.count("<script") == text.count("</script>") == 3
    assert name in plots["figure4"]["data"][0]["text"]


@pytest.fixture
def table(tmp_path):
    """table.json of two trained variants under three schemes."""
    steps_compare.write(compare.from_counts(COUNTS | {"my own": COUNTS["grpo"]}), tmp_path / "table")
    return json.loads((tmp_path / "table" / "table.json").read_text())


def test_the_report_of_a_study_holds_all_of_it(tmp_path, table):
    history = pd.DataFrame({"step": range(1, 17), "reward": np.linspace(0.5, 0.9, 16), "entropy": 0.5, "kl": np.nan})
    sizes = {"grpo:full": 4_000_000, "grpo:nf4": 1_000_000}
    gates = [
        figures.Gate("base", "7", "base · full", "passed", "Healthy."),
        figures.Gate("awq", "", "", "refused", "Lost."),
    ]
    tables = {"history": history, "weights": measured(), "stored": stored(), "behaviour": divergences()}
    notes = ["Warning: grpo: Storing in bf16 rounds <96 %> of the update away.", "And more."]
    study = figures.Study(table, {"Model": "<b>mine</b>", "Commit": ""}, sizes, gates, **tables, notes=notes)
    figures.report(study, tmp_path / "report.html")
    plots, text, _ = unpacked(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 2.5e6
    assert "<li>Warning: grpo: Storing in bf16 rounds &lt;96 %&gt; of the update away.</li>" in text
    parts = (
        "Verdicts",
        "What the answers rest on",
        "Cells",
        "Gates and versions",
        "Training",
        "Weights",
        "Schemes",
        "Next-token distributions",
    )
    assert all(f">{part}</h2>" in text for part in parts)
    assert text.count("<details") == 5 and text.index("Gates and versions</h2>") < text.index("<details")
    assert "<h1>" in text and "&lt;b&gt;mine&lt;/b&gt;" in text and "Commit" not in text
    assert "75 % saved" in text and "version 7, base · full" in text and "refused awq" in text
    assert text.count('<article class="card') == 4 + 2  # two variants under two quantized schemes, two gates
    assert len(plots) == 2 + 2 + 5 + 7 + 4
    cell = table["nf4"]["cells"]["grpo"]
    dots = next(trace for trace in plots["figure1"]["data"] if trace["name"] == "grpo")
    assert dots["y"][dots["x"].index("nf4")] == cell["accuracy"]
    assert dots["error_y"]["array"][dots["x"].index("nf4")] == pytest.approx(cell["high"] - cell["accuracy"])
    survival = table["awq"]["gain_survival"]
    row = next(trace for trace in plots["figure0"]["data"] if trace["y"] == ["grpo · awq"])
    assert (
        row["x"] == [survival["estimate"]]
        and row["text"][0].startswith("lost: ")
        and "gain survival −0.120 [" in row["text"][0]
    )
    assert plots["figure0"]["layout"]["shapes"][-1]["x0"] == -table["awq"]["others"]["my own"]["margin"]


def test_a_report_leaves_out_what_is_missing(tmp_path, table):
    figures.report(figures.Study({"full": table["full"]}), tmp_path / "small.html")
    plots, text, _ = unpacked(tmp_path / "small.html")
    assert "What the answers rest on" not in text
    assert len(plots) == 1 and "no quantized scheme" in text and "Gates" not in text
    figures.report(figures.Study(table, weights=measured()), tmp_path / "weights.html")
    assert len(unpacked(tmp_path / "weights.html")[0]) == 2 + 5


def test_a_table_from_before_the_renaming_is_reported(tmp_path, table):
    table["fp16"] = table.pop("full")
    figures.report(figures.Study(table), tmp_path / "old.html")
    text = unpacked(tmp_path / "old.html")[1]
    assert "<td>grpo · full</td>" in text and "fp16" not in text and "raises held-out accuracy" in text


@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ({"full": 8200, "nf4": 7950, "awq": 6000}, ("gain survives nf4", "is lost under awq")),
        ({"full": 8200, "nf4": 7950, "awq": 6800}, ("gain survives nf4", "is reduced under awq")),
        ({"full": 6840, "nf4": 6600, "awq": 5900}, ("nf4 and awq is inconclusive",)),
        ({"full": 6800}, ("changes by 0.000 [",)),
    ],
)
def test_the_headline_states_the_verdicts(tmp_path, counts, parts):
    before = {scheme: COUNTS["base"][scheme] for scheme in counts}
    steps_compare.write(compare.from_counts(COUNTS | {"base": before, "grpo": counts}), tmp_path)
    title = cards.headline(json.loads((tmp_path / "table.json").read_text()))
    assert all(part in title for part in parts)


FOUR_WORDS = {
    "n": 10000,
    "base": {"full": 4000, "int8": 4000, "nf4": 3900, "awq": 3700, "gptq": 3900, "gptq-int3": 300},
    "grpo": {"full": 6000, "int8": 6000, "nf4": 5300, "awq": 4300, "gptq": 3900, "gptq-int3": 2200},
}


def written_table(tmp_path, counts=FOUR_WORDS):
    """Return table.json of counts."""
    steps_compare.write(compare.from_counts(counts), tmp_path / "made")
    return json.loads((tmp_path / "made" / "table.json").read_text())


def test_the_page_says_what_happened_to_the_gain_in_four_words_on_two_scales(tmp_path):
    table = written_table(tmp_path)
    words = {scheme: entry["verdict"] for scheme, entry in table.items() if entry["verdict"]}
    assert words == {"int8": "survives", "nf4": "reduced", "awq": "lost", "gptq": "lost", "gptq-int3": "inconclusive"}
    figures.report(figures.Study(table), tmp_path / "report.html")
    text = unpacked(tmp_path / "report.html")[1]
    by_scheme = {part.partition("</span>")[0]: part for part in text.split("<h3><span>")[1:]}
    for scheme, meaning in (
        ("int8", "keeps what training gave"),
        ("nf4", "costs a part of the gain"),
        ("nf4", "More than half of the gain is shown to be kept"),
        ("awq", "costs more than half of the gain"),
        ("gptq", "costs all of the gain"),
        ("gptq", '<span class="verdict">lost, all of it</span>'),
        ("gptq-int3", "cannot decide"),
        ("gptq-int3", "Remark: base · gptq-int3 is at the floor"),
    ):
        assert meaning in by_scheme[scheme], scheme
    assert '<p class="number">70 % <small>[' in by_scheme["nf4"] and "gain survival −0.060 [" in by_scheme["nf4"]
    assert "<th>gain kept</th>" in text and ">Does quantization cost grpo more than base?</h2>" in text
    assert table["awq"]["scales"] in text and "<td>92 % [" in text  # of the base's accuracy, 3,700 of 4,000


def test_the_forest_on_the_page_shows_the_bounds_that_decide(tmp_path):
    table = written_table(tmp_path, FOUR_WORDS | {"mine": FOUR_WORDS["base"]})
    figures.report(figures.Study(table), tmp_path / "report.html")
    forest = unpacked(tmp_path / "report.html")[0]["figure0"]
    thick = {trace["y"][0]: trace["x"] for trace in forest["data"] if trace["mode"] == "lines"}
    bounds = table["nf4"]["gain_survival_bounds"]
    assert thick["grpo · nf4"] == bounds and len(thick) == 10
    assert table["nf4"]["gain_survival"]["low"] < bounds[0] < bounds[1] < table["nf4"]["gain_survival"]["high"]
    halves = [shape["x0"] for shape in forest["layout"]["shapes"] if shape["line"].get("dash") == "dot"]
    assert halves == pytest.approx([-0.1] * 5)  # `mine` gains nothing that could be halved
    assert any("reduced: 70 % [" in note["text"] for note in forest["layout"]["annotations"])


def test_each_seeds_own_value_is_a_stroke(tmp_path):
    draw = np.random.default_rng(0)
    rates = {("base", "full"): 0.4, ("base", "nf4"): 0.4, ("grpo", "full"): 0.7, ("grpo", "nf4"): 0.5}
    frame = pd.DataFrame(
        [
            (variant, scheme, seed, question, int(draw.random() < rate))
            for (variant, scheme), rate in rates.items()
            for seed in range(3)
            for question in range(200)
        ],
        columns=["variant", "scheme", "seed", "question", "correct"],
    )
    steps_compare.write(compare.from_questions(frame), tmp_path)
    table = json.loads((tmp_path / "table.json").read_text())
    figures.report(figures.Study(table), tmp_path / "report.html")
    traces = unpacked(tmp_path / "report.html")[0]["figure0"]["data"]
    strokes = next(trace for trace in traces if trace.get("marker", {}).get("symbol") == "line-ns")
    survivals = [seed["gain_survival"]["estimate"] for seed in table["nf4"]["per_seed"].values()]
    assert strokes["x"] == survivals and len(survivals) == 3 and strokes["text"][2].startswith("seed 2: ")


def test_where_both_models_answer_nothing_right_there_is_no_ratio(tmp_path):
    counts = {
        "n": 10000,
        "base": {"full": 4000, "int8": 0, "nf4": 10},
        "grpo": {"full": 6000, "int8": 0, "nf4": 0},
        "mine": {"full": 5000, "int8": 100, "nf4": 10},
    }
    table = written_table(tmp_path, counts)
    figures.report(figures.Study(table), tmp_path / "report.html")
    text = unpacked(tmp_path / "report.html")[1]
    rows = text.partition("<th>difference in log-odds</th>")[2].partition("</table>")[0].split("<tr>")
    defined = {
        row.partition("<td>")[2].partition("</td>")[0]: "not defined" not in row for row in rows if "<td>" in row
    }
    assert defined == {"grpo · nf4": True, "mine · nf4": True, "grpo · int8": False, "mine · int8": True}
    assert next(row for row in rows if "grpo · int8" in row).count("<td>not defined</td>") == 2


NEW_KEYS = ("headline", "gain_kept", "gain_survival_bounds", "remarks", "all_lost", "more_than_half_kept")
NEW_KEYS += ("accuracy_kept", "accuracy_kept_ratio", "log_odds_difference", "scales_agree", "scales")


def test_an_older_table_is_shown_with_its_own_meaning_of_lost(tmp_path):
    table = written_table(tmp_path)
    older = {name: {key: value for key, value in entry.items() if key not in NEW_KEYS} for name, entry in table.items()}
    older["nf4"] |= {"verdict": "lost", "margin": 0.02}
    figures.report(figures.Study(older), tmp_path / "older.html")
    text = unpacked(tmp_path / "older.html")[1]
    assert "costs more of the gain than the margin, 0.020" in text and "of an older version" in text
    assert "Does quantization cost" not in text and "of the gain is kept" not in text
    figures.report(figures.Study(table), tmp_path / "present.html")
    assert "of an older version" not in unpacked(tmp_path / "present.html")[1]


def drawn_survival(tmp_path, monkeypatch, counts):
    """Return the panel of survival.png."""
    saved_figures = []
    finish = comparison.finish
    monkeypatch.setattr(
        comparison, "finish", lambda figure, *rest: (finish(figure, *rest), saved_figures.append(figure))
    )
    figures.survival(compare.from_counts(counts), tmp_path / "survival.png")
    return saved_figures[0].axes[0]


def test_the_forest_plot_shades_what_a_gain_survival_means(tmp_path, monkeypatch):
    panel = drawn_survival(tmp_path, monkeypatch, FOUR_WORDS)
    texts = [text.get_text() for text in panel.texts]
    assert any(text.startswith("reduced: 70 % [") and "\n−0.060 [" in text for text in texts)
    assert any(text.startswith("lost, all of it: 0 % [") for text in texts)
    assert {"half of the gain is lost", "−margin"} <= set(texts)
    lost, reduced, survives = (shade.get_paths()[0].get_extents() for shade in panel.collections[:3])
    left, right = panel.get_xlim()
    ends = [lost.x0, lost.x1, reduced.x0, reduced.x1, survives.x0, survives.x1]
    assert ends == pytest.approx([left, -0.1, -0.1, -0.02, -0.02, right])
    found = compare.from_counts(FOUR_WORDS).row("nf4").gain_survival
    thick = [line.get_xdata() for line in panel.lines if line.get_linewidth() == 7]
    assert [found.lower, found.upper] in [list(ends) for ends in thick]


def test_where_no_gain_is_shown_there_is_no_line_at_half_of_it(tmp_path, monkeypatch):
    counts = {"n": 100, "base": {"full": 50, "nf4": 50}, "grpo": {"full": 51, "nf4": 50}}
    panel = drawn_survival(tmp_path, monkeypatch, counts)
    assert not panel.collections and [text.get_text().partition("\n")[0] for text in panel.texts] == ["inconclusive"]


def test_the_headline_counts_verdicts_of_several_variants(table):
    assert cards.headline(table).endswith("survives in 2, lost in 2")


def test_divergence_is_drawn_with_its_intervals(tmp_path):
    figures.behaviour(divergences(), tmp_path / "behaviour.png")
    figures.behaviour(divergences(28).query("layer >= 0"), tmp_path / "layers.png")
    figures.behaviour(divergences(0), tmp_path / "schemes.png")
    assert all(is_picture(tmp_path / f"{name}.png") for name in ("behaviour", "layers", "schemes"))
    reach = scipy.stats.t.ppf(0.975, 199) * 7e-5
    value, low, high = of_behaviour.interval(next(divergences().query("scheme == 'awq'").itertuples()), "kl")
    assert (value, low, high) == (7e-4, pytest.approx(7e-4 - reach), pytest.approx(7e-4 + reach))
    assert of_behaviour.interval(next(divergences().query("layer == 0").itertuples()), "kl")[1] == 0
    title = of_behaviour.behaviour_finding(divergences())
    assert "base under awq" in title and "KL 0.0007 [0.00056, 0.00084]" in title and "rounding layer 3" in title


def test_a_comparison_is_drawn(tmp_path):
    found = compare.from_counts(COUNTS)
    figures.matrix(found, tmp_path / "new" / "matrix.png")
    figures.survival(found, tmp_path / "new" / "survival.png")
    assert is_picture(tmp_path / "new/matrix.png") and is_picture(tmp_path / "new/survival.png")
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_many_variants_and_schemes_are_drawn(tmp_path):
    found = compare.from_counts(COUNTS | {"a long label of my own": COUNTS["grpo"]})
    figures.matrix(found, tmp_path / "matrix.png")
    figures.survival(found, tmp_path / "survival.png")
    assert is_picture(tmp_path / "matrix.png") and is_picture(tmp_path / "survival.png")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, *(pytest.param(more, marks=pytest.mark.long) for more in ({"n": 1000}, {"effect": 0.05}))]
)
def test_a_plan_is_drawn(tmp_path, options):
    planned = plan.make(plan.Assumptions(gain=0.1), **options)
    figures.chances(planned, tmp_path / "plan.png")
    assert is_picture(tmp_path / "plan.png")


@pytest.mark.slow
def test_a_plan_of_several_runs_is_drawn(tmp_path):
    planned = plan.make(plan.Assumptions(gain=0.1, between_gain=0.01, between_survival=0.01), effect=0.05)
    figures.chances(planned, tmp_path / "plan.png")
    assert is_picture(tmp_path / "plan.png")


def test_survival_needs_a_quantized_scheme(tmp_path):
    with pytest.raises(ValueError, match="not defined"):
        figures.survival(compare.from_counts({"n": 9, "base": {"full": 4}, "grpo": {"full": 6}}), tmp_path / "s.png")


def test_layers_are_drawn_with_and_without_a_trained_variant(tmp_path):
    figures.layer_error(weights(1.001), tmp_path / "both.png")
    figures.layer_error(weights().query("variant == 'base'"), tmp_path / "base.png")
    assert is_picture(tmp_path / "both.png") and is_picture(tmp_path / "base.png")


@pytest.mark.parametrize("steps", [1, 3, 250])
def test_training_is_drawn_with_whatever_was_logged(tmp_path, steps):
    history = pd.DataFrame(
        {"step": range(1, steps + 1), "reward": np.linspace(0.6, 0.7, steps), "entropy": 0.5, "kl": np.nan}
    )
    figures.training(history, tmp_path / "training.png")
    assert is_picture(tmp_path / "training.png")


def test_probes_are_drawn_over_steps_with_their_intervals(tmp_path, monkeypatch):
    saved_figures = []
    finish = rewards.finish
    monkeypatch.setattr(rewards, "finish", lambda figure, *rest: (finish(figure, *rest), saved_figures.append(figure)))
    history = pd.DataFrame({"step": range(1, 21), "reward": np.linspace(0.6, 0.7, 20)})
    probes = pd.DataFrame(
        {"step": [0, 10, 20], "accuracy": [0.5, 0.6, 0.7], "low": [0.4, 0.5, 0.6], "high": [0.6, 0.7, 0.8], "n": 96}
    )
    figures.training(history, tmp_path / "with.png", probes=probes)
    figures.training(history, tmp_path / "without.png", probes=probes.head(0))
    titles = [[axes.get_title(loc="left") for axes in figure.axes] for figure in saved_figures]
    assert titles == [["mean reward", "held-out accuracy (n = 96 probe questions; bars: 95 %)"], ["mean reward"]]
    points, (caps, bars) = saved_figures[0].axes[1].containers[0][0], saved_figures[0].axes[1].containers[0][1:]
    assert points.get_ydata().tolist() == [0.5, 0.6, 0.7] and len(caps) == 2 and len(bars[0].get_segments()) == 3


def test_training_without_rewards_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'reward' with values"):
        figures.training(pd.DataFrame({"step": [1], "loss": [0.1]}), tmp_path / "training.png")


def test_a_long_title_stays_above_the_maps(tmp_path, monkeypatch):
    saved_figures = []
    finish = heatmaps.finish
    monkeypatch.setattr(heatmaps, "finish", lambda figure, *rest: (finish(figure, *rest), saved_figures.append(figure)))
    figures.schemes(
        pd.concat([stored(), stored().query("scheme == 'nf4'").assign(scheme="gptq", relative_mse=0.0271)]),
        tmp_path / "three.png",
    )
    title, below = saved_figures[0]._suptitle.get_window_extent(), saved_figures[0].axes[0].title.get_window_extent()
    assert saved_figures[0]._suptitle.get_text().count("\n") == 2 and title.y0 > below.y1


@pytest.mark.slow
def test_a_label_of_two_hundred_characters_leaves_space_for_the_panel(tmp_path):
    variant = f"{'v' * 197}-1"
    scheme = f"{'s' * 198}-2"
    counts = {
        "n": 10000,
        "base": {"full": 6800, scheme: 6500},
        variant: {"full": 8200, scheme: 7950},
        f"{variant}b": {"full": 8200, scheme: 7950},
    }
    found = compare.from_counts(counts)
    renamed = {"variant": {"grpo": variant}, "scheme": {"nf4": scheme}}
    value = Estimate(0.1, 0.01, 0.08, 0.12, 100)
    lines = [Line(name, scheme, "vllm 9.9", 4, 8, value, value, value, value, 1) for name in ("base", variant)]
    row = SimpleNamespace(cell=(variant, scheme), accuracy=value, error=value)
    ranked = SimpleNamespace(rows=[row, row], runs=1, cell_label=" · ".join)
    methods = [SimpleNamespace(name=f"{i}{variant}", loss={scheme: value}) for i in range(3)]
    by_size = SimpleNamespace(methods=methods, parameters={scheme: 10**6}, n=100, over="questions")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # matplotlib warns if labels leave no space for a panel
        figures.matrix(found, tmp_path / "matrix.png")
        figures.survival(found, tmp_path / "survival.png")
        figures.layer_error(weights().replace(renamed), tmp_path / "error.png")
        figures.spread(measured().replace(renamed), tmp_path / "spread.png")
        figures.movement(measured().replace(renamed), tmp_path / "movement.png")
        figures.schemes(stored().replace(renamed), tmp_path / "schemes.png")
        figures.behaviour(divergences().replace(renamed), tmp_path / "behaviour.png")
        figures.speeds(lines, tmp_path / "speeds.png")
        figures.methods(ranked, "A title", tmp_path / "methods.png")
        figures.sizes(by_size, "A title", tmp_path / "sizes.png")
    assert all(is_picture(path) for path in tmp_path.iterdir()) and len(list(tmp_path.iterdir())) == 10


def test_a_shortened_label_keeps_both_of_its_ends():
    assert canvas.shortened("grpo · awq") == "grpo · awq"
    labels = [canvas.shortened(f"{'a-long-name-' * 20}{number}") for number in (1, 2)]
    assert labels[0] != labels[1] and {len(label) for label in labels} == {canvas.LABEL_CHARACTERS}
    assert labels[0].startswith("a-long-name-") and "…" in labels[0] and labels[0].endswith("1")


def test_an_interval_is_never_broken_across_lines():
    title = canvas.wrapped("grpo: no gain shown at full precision, +0.040 [−0.087, +0.167]", 6.4)
    assert title.splitlines()[1:] == ["[−0.087,\u00a0+0.167]"]


def test_titles_say_what_the_numbers_say():
    found = compare.from_counts(COUNTS)
    assert [comparison._listed(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == [
        "a",
        "a and b",
        "a, b and c",
    ]
    verdicts = [(row.scheme, verdict.verdict) for row, verdict, _ in found.judged()]
    assert comparison.survival_finding(verdicts, False, "Gain") == "The gain survives nf4; it is lost under awq"
    assert comparison._gain_title("grpo", found.row("full").delta).startswith("grpo gains +0.140 [")
    assert (
        "loses 1.575 % of the weights' energy after training, 5 % more than before (1.5 %)"
        in of_weights.error_finding(weights(1.05), ["base", "grpo"])
    )
    assert "2 % less than before" in of_weights.error_finding(weights(0.98), ["base", "grpo"])
    assert "as much as before" in of_weights.error_finding(weights(1.0001), ["base", "grpo"])
    few = pd.DataFrame({"step": [1, 2, 3], "reward": [0.8, 0.45, 0.81]})
    assert rewards.reward_finding(few) == "Training reward over 3 steps: too few for an interval"
    noise = np.tile([0.4, 0.6], 8)
    for shift, verb in (
        (0.5, "rises: +0.500 [+0.3"),
        (-0.5, "falls: −0.500 [−0.6"),
        (0.0, "does not change significantly: 0.000 [−0.1"),
    ):
        moved = pd.DataFrame({"step": range(1, 17), "reward": noise + shift * np.repeat([0, 1], 8)})
        assert rewards.reward_finding(moved).startswith(f"Training reward {verb}")
    level = pd.DataFrame({"step": range(1, 17), "reward": 0.5})
    assert "does not change significantly" in rewards.reward_finding(level)
