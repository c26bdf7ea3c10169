"""Losses by model size: each against its definition, the trend against least squares, and how often it covers."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from qrl import figures, stats
from qrl.compare import sizes
from qrl.errors import BadInput

PARAMETERS = {"large": 80_000_000, "small": 2_500_000, "middle": 20_000_000}
X = np.log10([2_500_000, 20_000_000, 80_000_000])


def answers(losses, n=400, seeds=("0",), seed=0, scheme="nf4", reward=False) -> dict[str, pd.DataFrame]:
    """Return a table per model: base, grpo, and grpo under a scheme, which loses that share of grpo's right answers."""
    draw, frames = np.random.default_rng(seed), {}
    for model, loss in zip(("small", "middle", "large"), losses, strict=True):
        rows = []
        for run in seeds:
            full = draw.random(n) < 0.7
            cells = {("base", "full"): draw.random(n) < 0.4, ("grpo", "full"): full}
            cells["grpo", scheme] = full & ~(draw.random(n) < loss / 0.7)
            for (variant, stored), right in cells.items():
                labels = {"variant": variant, "scheme": stored, "seed": run, "settings_digest": f"{model}{stored}"}
                rows.append(
                    pd.DataFrame({"question": [f"q{i}" for i in range(n)], "correct": right.astype(int), **labels})
                )
        frames[model] = pd.concat(rows, ignore_index=True)
        if reward:
            frames[model]["reward"] = frames[model]["correct"] * 2.0 - 0.5
    return frames


def right(frame: pd.DataFrame, scheme: str) -> np.ndarray:
    own = frame[(frame["variant"] == "grpo") & (frame["scheme"] == scheme)]
    return own.sort_values("question")["correct"].to_numpy(float)


def test_losses_are_paired_and_the_trend_is_least_squares():
    frames = answers((0.05, 0.10, 0.20))
    found = sizes.measure(frames, PARAMETERS)
    assert list(found.parameters) == ["small", "middle", "large"] and found.n == 400
    full, nf4 = found.methods
    assert full.loss == {} and full.trend is None and (nf4.variant, nf4.scheme) == ("grpo", "nf4")
    for model, frame in frames.items():
        assert nf4.loss[model] == stats.contrast(np.stack([right(frame, "full"), right(frame, "nf4")]), (1, -1))
    losses = [nf4.loss[model].estimate for model in found.parameters]
    assert nf4.trend.estimate == pytest.approx(np.polyfit(X, losses, 1)[0])
    assert nf4.answer == "grows" and "grpo · nf4 grows with size: +0." in sizes.findings(found)[0]


def test_two_models_give_the_difference_per_decade_and_one_size_gives_no_trend():
    frames = {model: frame for model, frame in answers((0.05, 0.1, 0.2)).items() if model != "middle"}
    found = sizes.measure(frames, PARAMETERS).methods[1]
    difference = found.loss["large"].estimate - found.loss["small"].estimate
    assert found.trend.estimate == pytest.approx(difference / (X[2] - X[0]))
    alike = sizes.measure(frames, dict.fromkeys(frames, 1_000_000))
    assert alike.methods[1].trend is None and not alike.holm and sizes.findings(alike) == []


def test_without_a_slope_it_cannot_be_told_and_a_falling_loss_shrinks():
    found = sizes.measure(answers((0.05, 0.05, 0.05)), PARAMETERS)
    assert found.methods[1].answer == "cannot tell"
    assert sizes.findings(found) == ["Whether the loss in points grows with size cannot be told for grpo · nf4."]
    assert sizes.measure(answers((0.3, 0.1, 0.02)), PARAMETERS).methods[1].answer == "shrinks"


def test_a_method_that_one_model_lacks_is_measured_on_the_others():
    frames = answers((0.05, 0.1, 0.2))
    frames["middle"] = frames["middle"][frames["middle"]["scheme"] == "full"]
    found = sizes.measure(frames, PARAMETERS)
    assert list(found.methods[1].loss) == ["small", "large"] and found.methods[1].trend is not None
    frames["middle"] = frames["middle"][frames["middle"]["variant"] == "base"]
    with pytest.raises(BadInput, match="grpo · full of middle is missing"):
        sizes.measure(frames, PARAMETERS)
    with pytest.raises(BadInput, match="at least two"):
        sizes.measure({"small": frames["small"]}, PARAMETERS)


def test_the_table_the_document_and_the_figure_hold_every_model(tmp_path):
    found = sizes.measure(answers((0.05, 0.1, 0.2), seeds=("0", "1", "2")), PARAMETERS)
    text = sizes.markdown(found, failed=["tall: it failed."])
    assert "| grpo · nf4 | large | 80 M |" in text and "2.5 M" in text and "tall: it failed." in text
    assert "over 3 training runs and the questions" in text and "The mean reward is the accuracy" in text
    one = sizes.markdown(sizes.measure(answers((0.05, 0.1, 0.2)), PARAMETERS))
    assert "over the questions, since there is one training run each" in one
    document = sizes.as_json(found)
    assert set(document["methods"][1]["loss"]) == set(PARAMETERS) and document["methods"][1]["trend"]["low"] > 0
    assert set(sizes.metrics(found)) == {f"sizes/trend_grpo_nf4{end}" for end in ("", "_low", "_high")}
    figures.sizes(found, sizes.findings(found)[0], tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


def test_the_mean_reward_stands_beside_accuracy_with_its_own_interval():
    found = sizes.measure(answers((0.05, 0.1, 0.2), reward=True), PARAMETERS)
    method = found.methods[1]
    for model, loss in method.loss.items():  # a reward of −0.5 or 1.5: twice the accuracy, minus a half
        assert method.reward[model].estimate == pytest.approx(2 * method.accuracy[model].estimate - 0.5)
        of_reward = method.reward_loss[model]
        assert (of_reward.low, of_reward.high) == pytest.approx((2 * loss.low, 2 * loss.high))
    text = sizes.markdown(found, rewards=("correct", "format"))
    assert "| mean reward | loss of reward |" in text and "Training rewards: correct, format." in text


@pytest.mark.parametrize(("seeds", "least"), [(("0",), 0.93), (("0", "1", "2"), 0.93)])
def test_the_trends_interval_covers_the_true_slope(seeds, least):
    losses = (0.05, 0.07, 0.12)
    true = np.polyfit(X, losses, 1)[0]
    draw, studies, covered = np.random.default_rng(1), 300, 0
    weights = sizes.slope(sorted(PARAMETERS.values()))
    signs = [sign * weight for weight in weights.values() for sign in (1, -1)]
    for _ in range(studies):
        runs = []
        for _ in seeds:
            full = draw.random((3, 300)) < 0.7
            kept = full & ~(draw.random((3, 300)) < np.array(losses)[:, None] / 0.7)
            runs.append(np.concatenate([np.stack(pair) for pair in zip(full, kept, strict=True)]).astype(float))
        if len(runs) == 1:
            found = stats.contrast(runs[0], signs)
        else:
            groups = [np.arange(300)] * len(runs)
            found = stats.contrast_over_runs(runs, signs, groups, seeds, 300)
        covered += found.low <= true <= found.high
    assert covered / studies >= least


def test_places_of_weight_zero_are_left_out():
    weights = sizes.slope([1_000, 10_000, 100_000])
    assert list(weights) == [0, 2] and weights[2] == pytest.approx(0.5) == -weights[0]


def test_a_control_is_no_method():
    from qrl.compare import ranking

    row = ranking.Method("distilled", "full", *[None] * 5)
    assert not row.quantized and dataclasses.replace(row, variant="qlora").quantized


def test_a_distilled_method_is_held_against_its_control():
    from qrl.compare import ranking

    frame = answers((0.05, 0.1, 0.2))["small"]
    full = frame[(frame["variant"] == "grpo") & (frame["scheme"] == "full")].assign(variant="distilled")
    stored = frame[frame["scheme"] == "nf4"].assign(variant="qad-int4", scheme="rtn-int4")
    found = ranking.measure(pd.concat([frame, full, stored]))
    rows = {(row.variant, row.scheme): row for row in found.rows}
    assert rows["qad-int4", "rtn-int4"].over_control == rows["grpo", "nf4"].error
    assert any("qad-int4 · rtn-int4 − its control, distilled · full" in text for text in ranking.findings(found))
    assert found.best.variant != "distilled" and rows["grpo", "nf4"].over_control is None
