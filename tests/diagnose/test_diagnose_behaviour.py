"""Next-token distributions before and after quantization, against their definitions one text at a time."""

import pandas as pd
import pytest
import torch

from qrl import quantize, recipe
from qrl.diagnose import behaviour, words
from qrl.engine import hf
from qrl.recipe.sections import Diagnose
from qrl.steps import diagnose as step

pytestmark = pytest.mark.process

TEXTS = [[5, 9, 3, 7, 11, 2], [8, 8, 4], [6, 1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return hf.load(tiny_checkpoint, "cpu", torch.float32)[0]


def test_a_model_agrees_with_itself(model):
    measured = behaviour.against(model, model, TEXTS)
    assert measured.kl == pytest.approx(0, abs=1e-6)
    assert (measured.top1_agreement, measured.n, measured.positions) == (1, 3, 19)


def test_batches_change_nothing(model, monkeypatch):
    whole = behaviour.sensitivity(model, TEXTS)[1]
    monkeypatch.setattr(behaviour, "POSITIONS", 6)
    alone = behaviour.sensitivity(model, TEXTS)[1]
    assert (alone.kl, alone.top1_agreement) == (pytest.approx(whole.kl, rel=1e-3), whole.top1_agreement)


def test_divergence_follows_its_definition(model, tiny_checkpoint, tmp_path):
    path = quantize.run("nf4", tiny_checkpoint, tmp_path / "nf4").path
    quantized = hf.load(path, "cpu", torch.float32)[0]
    measured = behaviour.against(model, quantized, TEXTS)
    divergences, agreements = [], []
    for text in TEXTS:
        with torch.inference_mode():
            p, q = (each(torch.tensor([text])).logits[0].double().softmax(-1) for each in (model, quantized))
        divergences.append((p * (p / q).log()).sum(-1))
        agreements.append((p.argmax(-1) == q.argmax(-1)).double())
    assert measured.kl == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-3)
    assert measured.top1_agreement == pytest.approx(torch.cat(agreements).mean().item())
    assert 0 < measured.kl_stderr < measured.kl


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "in_metric"), [("nf4", "nf4"), ("nf4+kv-fp8", "nf4_kv-fp8")])
def test_the_step_compares_and_draws_next_token_distributions(scheme, in_metric, tiny_checkpoint, tmp_path, capsys):
    path = quantize.run("nf4", tiny_checkpoint, tmp_path / "nf4").path
    settings = recipe.load("tiny", {"diagnose.behaviour": "3", "device": "cpu"})
    step.diagnose(
        settings,
        str(tiny_checkpoint),
        str(tiny_checkpoint),
        quantized=f"base:{scheme}={path},grpo:{scheme}={path}",
        out=str(tmp_path / "out"),
    )
    rows = pd.read_parquet(tmp_path / "out" / "behaviour.parquet")
    assert sorted(zip(rows["variant"], rows["scheme"], rows["layer"], strict=True)) == sorted(
        (variant, *row) for variant in ("base", "grpo") for row in ((scheme, -1), ("w4", 0), ("w4", 1))
    )
    assert (rows["kl"] > 0).all() and (rows["n"] == 3).all()
    assert (tmp_path / "out" / "figures" / "behaviour.png").stat().st_size > 10_000
    assert "Next-token distributions" in (tmp_path / "out" / "figures" / "weights.html").read_text()
    wanted = {f"behaviour/kl_{in_metric}_base", f"behaviour/top1_agreement_{in_metric}"}
    printed = capsys.readouterr().out
    assert wanted | {f"weights/code_flip_rate_{in_metric}"} <= set(printed.split())
    metrics = [line.split()[0] for line in printed.splitlines() if line.startswith(("weights/", "behaviour/"))]
    explained = {words.meaning(metric) for metric in metrics}  # fails for one that has no sentence
    assert all(f"\n{measure}: {sentence}." in printed for measure, sentence in explained) and len(metrics) > 20


def test_each_layer_alone_matters_less_than_all_and_is_put_back(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured = behaviour.sensitivity(model, TEXTS, Diagnose(bits=3))
    assert sorted(measured) == [0, 1] and all(each.kl > 1e-6 for each in measured.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert max(each.kl for each in behaviour.sensitivity(model, TEXTS, Diagnose(bits=8)).values()) < min(
        each.kl for each in measured.values()
    )


def test_one_text_has_no_standard_error(model):
    with pytest.raises(ValueError, match="two texts"):
        behaviour.against(model, model, TEXTS[:1])
