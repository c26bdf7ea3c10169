"""GRPO with quantized linears: rollouts and loss see Q(W), masters move, the outcome is exported bit for bit."""

import json
import math
import shutil

import pytest
import torch

pytest.importorskip("compressed_tensors")

from qrl import checkpoint, names, quantize, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.formats.fakequant import linears, presets
from qrl.quantize import settings as choices
from qrl.recipe import Quantize, Train, rules
from qrl.tasks import prompt
from qrl.train import Job, grpo, sharded
from qrl.train.qat import linear as qat
from qrl.train.qat import prepare

pytestmark = pytest.mark.process

QUESTIONS = tasks.load("arithmetic", "train", 16, 0)
FAST = Train(
    steps=2,
    prompts_per_step=4,
    generations=4,
    micro_batch=16,
    max_completion_tokens=64,
    save_every=1,
    qat_calibration_samples=8,
)


def job(folder, settings, **changes):
    data = {"base": tiny.PATH, "questions": QUESTIONS, "task": "arithmetic", "template": "plain", "seed": 0}
    return Job(settings=settings, device="cpu", work=folder / "work", out=folder / "model", **data, **changes)


def train(folder, name="int4", **changes):
    seen = []
    settings = FAST.model_copy(update={"qat": name} | changes)
    return grpo.run(job(folder, settings, log=lambda metrics, step: seen.append((step, metrics)))), seen


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train once in the format that calibrates activations."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, *train(folder, "nvfp4-a4")


def test_masters_come_out_in_fp32_with_the_bases_keys_and_have_moved(trained):
    _, done, _ = trained
    assert checkpoint.check(done.path).dtype == "float32"
    before, after = dict(checkpoint.tensors(tiny.PATH)), dict(checkpoint.tensors(done.path))
    assert list(before) == list(after)
    assert all(not torch.equal(before[key].float(), after[key]) for key in before if "mlp" in key)


def test_the_gap_to_the_unquantized_model_is_logged_before_the_first_step(trained):
    _, _, seen = trained
    step, gap = seen[0]
    assert step == 0 and 0 < gap[prepare.GAP] < gap[prepare.GAP_LARGEST] < math.inf
    assert [step for step, _ in seen] == [0, 1, 2]


def test_the_stored_model_keeps_the_scales_that_were_calibrated(trained, tmp_path):
    pytest.importorskip("llmcompressor")
    folder, done, _ = trained
    scales = linears.read_activation_scales(done.path)
    assert scales == linears.read_activation_scales(folder / "work") and len(scales) == 4 * 7
    settings = choices.settings_of("rtn-nvfp4-a4", Quantize(), 0)
    texts = [
        f"{question.question}\n#### {question.answer}" for question in QUESTIONS
    ]  # which a study gives, and nobody looks at
    quantize.run("rtn-nvfp4-a4", done.path, tmp_path / "codes", settings=settings, calibration=texts)
    stored = dict(checkpoint.tensors(tmp_path / "codes"))
    assert {path: float(stored[f"{path}.input_global_scale"]) for path in scales} == scales


def test_rollouts_and_loss_compute_with_the_same_q(tmp_path, monkeypatch):
    """Between two optimizer steps, every forward pass of a linear uses the same matrix object."""
    used = {}
    plain = qat.Fold.straight_through

    def noted(fold, linear):
        weight = plain(fold, linear)
        used.setdefault(id(linear), []).append((torch.is_grad_enabled(), weight.data_ptr(), weight))
        return weight

    monkeypatch.setattr(qat.Fold, "straight_through", noted)
    train(tmp_path, "int4", steps=1)
    for calls in used.values():
        assert {place for grad, place, _ in calls if not grad} == {place for grad, place, _ in calls if grad}
        assert {grad for grad, _, _ in calls} == {True, False} and len({id(weight) for _, _, weight in calls}) == 1
    assert len(used) == 4 * 7


@pytest.mark.slow
def test_the_same_seed_trains_the_same_masters_and_resuming_changes_none(trained, tmp_path):
    folder, done, _ = trained
    shutil.copytree(folder / "work", tmp_path / "work")
    shutil.rmtree(tmp_path / "work" / "checkpoint-2")
    again, _ = train(tmp_path, "nvfp4-a4")
    assert again.resumed_from == 1
    assert checkpoint.digest(again.path) == checkpoint.digest(done.path)


def test_the_reference_policy_stays_in_full_precision(tmp_path, monkeypatch):
    attached = []
    begin = prepare.begin

    def watched(trainer, job):
        begin(trainer, job)
        attached.append((len(qat.folds(trainer.model)), len(qat.folds(trainer.ref_model))))

    monkeypatch.setattr(prepare, "begin", watched)
    done, _ = train(tmp_path, "int4", steps=1, beta=0.05)
    assert attached == [(4 * 4, 0)]
    assert done.history["kl"][0] > 0  # rounding alone sets the policy apart from it


def test_calibration_texts_are_the_renderers_own_and_long_ones_are_refused(tmp_path):
    batches = prepare.texts(job(tmp_path, FAST.model_copy(update={"qat_calibration_batch": 3})))
    rows = [ids[mask.bool()].tolist() for batch in batches for ids, mask in zip(*batch.values(), strict=True)]
    tokens = hf.tokenizer(tiny.PATH)
    expected = [prompt.training_text(tokens, question, "plain") for question in QUESTIONS[:8]]
    assert rows == [tokens(text, add_special_tokens=False)["input_ids"] for text in expected]
    with pytest.raises(BadInput, match=r"above train\.qat_calibration_max_tokens = 5"):
        prepare.texts(job(tmp_path, FAST.model_copy(update={"qat_calibration_max_tokens": 5})))


def test_calibration_texts_of_a_file_are_used_as_they_are_and_bad_ones_are_refused_before_any_weight(tmp_path):
    file, tokens = tmp_path / "texts.jsonl", hf.tokenizer(tiny.PATH)
    texts = [f"<|im_start|>user\nTom has {n} pens.<|im_end|>\n" for n in range(9)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = FAST.model_copy(update={"qat": "nvfp4-a4", "qat_calibration": str(file)})
    prepare.check(settings, tiny.PATH)
    batches = prepare.texts(job(tmp_path, settings))
    rows = [ids[mask.bool()].tolist() for batch in batches for ids, mask in zip(*batch.values(), strict=True)]
    assert rows == [tokens(text, add_special_tokens=False)["input_ids"] for text in texts[:8]]
    for changes, sentence in (
        ({"qat_calibration_samples": 10}, r"9 calibration texts, but train\.qat_calibration_samples is 10"),
        ({"qat_calibration": str(tmp_path / "none.jsonl")}, r"train\.qat_calibration cannot be read"),
        ({"qat": "none"}, r"train\.qat_calibration calibrates train\.qat, which is none"),
    ):
        with pytest.raises(BadInput, match=sentence):
            rules.check_training(settings.model_copy(update=changes))
            prepare.check(settings.model_copy(update=changes), tiny.PATH)


def test_an_adapter_is_refused_before_any_weight_is_loaded():
    with pytest.raises(BadInput, match=r"train\.qat = int8 trains all weights, but train\.method = lora"):
        rules.check_training(Train(qat="int8", method="lora"))


@pytest.mark.parametrize(("key", "value"), [("qat", "int8"), ("teacher", "m")])
def test_fsdp_1_launched_by_hand_is_refused_before_any_weight_is_loaded(key, value, monkeypatch):
    sharded.check(Train(**{key: value}), "cpu")  # nothing is sharded
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(BadInput, match=rf"train\.{key} needs FSDP 2, .* with FSDP 1: set train\.parallel = fsdp2"):
        sharded.check(Train(**{key: value}), "cuda")
    sharded.check(Train(), "cuda")
    monkeypatch.setenv("FSDP_VERSION", "2")
    sharded.check(Train(**{key: value}), "cuda")


def test_a_model_that_the_format_cannot_hold_is_refused_before_any_weight_is_loaded(tmp_path):
    config = json.loads((tiny.PATH / "config.json").read_text())
    for changes, says in (
        ({"model_type": "qwen2_moe"}, "mixture of experts"),
        ({"intermediate_size": 576}, r"mlp\.down_proj .*576"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(BadInput, match=says):
            prepare.check(Train(qat="int4"), tmp_path)  # there are no weights to load


def test_the_recipe_knows_every_format():
    assert tuple(presets.PRESETS) == names.FORMATS
