"""GRPO: one prompt renderer, rewards from the grader, resuming past broken checkpoints, exact merges."""

import json
import math
import shutil

import pytest
import scipy.special
import torch
from peft import get_peft_model
from safetensors.torch import save_file
from transformers import TrainingArguments

from qrl import checkpoint, quantize, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.evaluate import cells
from qrl.quantize import calibration
from qrl.recipe import Evaluate, Recipe, Train
from qrl.tasks import prompt
from qrl.train import Job, arguments, distill, grpo, loop, merge, policy, reward, save, sft

pytestmark = pytest.mark.process

QUESTIONS = tasks.load("arithmetic", "train", 32, 0)
FAST = Train(steps=2, prompts_per_step=4, generations=4, micro_batch=16, max_completion_tokens=48, save_every=1)


def job(folder, settings=FAST, **changes):
    data = {"base": tiny.PATH, "questions": QUESTIONS, "task": "arithmetic", "template": "plain", "seed": 0}
    folders = {"work": folder / "work", "out": folder / "model"}
    return Job(**{"settings": settings, "device": "cpu"} | data | folders | changes)


def distilled(job: Job):
    return distill.make_trainer(job, tiny.PATH)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    seen = []
    return folder, grpo.run(job(folder, log=lambda metrics, step: seen.append((step, metrics)))), seen


@pytest.mark.parametrize("make", [grpo.make_trainer, distilled, sft._make_trainer])
def test_a_process_that_sees_several_gpus_trains_on_one(make, tmp_path, monkeypatch):
    begin = TrainingArguments.__post_init__

    def of_two_gpus(self):
        begin(self)
        self._n_gpu = 2

    monkeypatch.setattr(TrainingArguments, "__post_init__", of_two_gpus)
    assert make(job(tmp_path)).args.n_gpu == 1


@pytest.mark.parametrize("template", prompt.TEMPLATES)
def test_training_calibration_and_evaluation_render_identical_ids(template):
    tokens = hf.tokenizer(tiny.PATH)
    calibrating = hf.plain_tokenizer(tiny.PATH)
    for question in QUESTIONS:
        evaluated = prompt.render(tokens, question.question, template)
        messages = prompt.messages(question.question, template)
        trained_on = tokens.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        text = prompt.training_text(calibrating, question, template)
        calibrated = calibrating(text, add_special_tokens=False)["input_ids"]
        assert evaluated == trained_on == calibrated[: len(evaluated)]
        assert calibrated[-1] == tokens.eos_token_id


def watch(model, seen: list):
    """Record what a model is fed: a list of token ids per row, without padding, for each call of several positions."""

    def note(module, args, inputs):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        if ids.shape[1] > 1:
            seen.append([row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)])

    model.register_forward_pre_hook(note, with_kwargs=True)
    return model


@pytest.mark.parametrize("template", prompt.TEMPLATES)
def test_rollouts_cells_and_calibration_feed_the_weights_the_same_ids(template, tmp_path, monkeypatch):
    questions, rolled_out, evaluated = QUESTIONS[:4], [], []
    load_policy, load = policy.load, hf.load

    def watched_load(*args):
        model, tokens = load(*args)
        return watch(model, evaluated), tokens

    monkeypatch.setattr(policy, "load", lambda *args: watch(load_policy(*args), rolled_out))
    monkeypatch.setattr(hf, "load", watched_load)
    settings = FAST.model_copy(update={"steps": 1, "max_completion_tokens": 4})
    grpo.run(job(tmp_path, settings, questions=questions, template=template))  # TRL's data set, renderer and rollout
    cell = cells.Cell("base", "full", tiny.PATH)
    short = Recipe(task="arithmetic", prompt=template, evaluate=Evaluate(max_new_tokens=1, batch_size=4))
    cells.answer_questions(cell, questions, short, "cpu")
    texts = [prompt.training_text(hf.plain_tokenizer(tiny.PATH), question, template) for question in questions]
    calibrated = calibration.rows(quantize.token_ids(tiny.PATH, texts), 512)

    prompts = sorted({tuple(row) for row in rolled_out[0]})
    assert len(prompts) == 4 and len(rolled_out[0]) == settings.prompts_per_step * settings.generations
    assert sorted(map(tuple, evaluated[0])) == prompts
    rendered = [prompt.render(hf.tokenizer(tiny.PATH), question.question, template) for question in questions]
    assert sorted(map(tuple, rendered)) == prompts
    assert sorted(tuple(row[: len(ids)]) for row, ids in zip(calibrated, rendered, strict=True)) == prompts


def test_the_reward_is_the_graders_strict_verdict():
    (correct,) = reward.functions("arithmetic")
    texts = ["#### 7", "7", "#### 7\n#### 8", ""]
    conversations = [[{"role": "assistant", "content": text}] for text in texts]
    wanted = [float(tasks.grade("arithmetic", text, "7").strict) for text in texts]
    assert correct(texts, ["7"] * 4) == correct(conversations, ["7"] * 4) == wanted == [1, 0, 0, 0]


def test_every_logged_step_is_in_the_history_with_its_speed(trained):
    _, done, seen = trained
    assert done.history["step"].tolist() == [step for step, _ in seen] == [1, 2]
    assert done.history["completions_per_s"].tolist() == [metrics["train/completions_per_s"] for _, metrics in seen]


def test_training_leaves_a_checkpoint_in_the_bases_dtype_with_its_tokenizer(trained):
    _, done, _ = trained
    written = checkpoint.check(done.path)
    assert written.dtype == checkpoint.check(tiny.PATH).dtype and written.quantization is None
    assert checkpoint.config(done.path) == checkpoint.config(tiny.PATH)  # a cache turned off would slow every user down
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (done.path / name).read_bytes() == (tiny.PATH / name).read_bytes()


def test_weights_gathered_from_several_processes_are_written_as_those_of_one(tmp_path):
    model = policy.load(tiny.PATH, Train(), "cpu")
    gathered = {name: weight.clone() for name, weight in model.state_dict().items()}
    save.write(model, tiny.PATH, tmp_path / "gathered", dtype="bfloat16", state=gathered)
    save.write(model, tiny.PATH, tmp_path / "whole", dtype="bfloat16")
    assert checkpoint.digest(tmp_path / "gathered") == checkpoint.digest(tmp_path / "whole")


def test_the_share_of_weights_that_moved_is_that_of_the_masters_and_of_what_is_stored(trained):
    _, done, _ = trained
    before, after = dict(checkpoint.tensors(tiny.PATH)), dict(checkpoint.tensors(done.path))
    differ = sum(int((after[name] != weight).sum()) for name, weight in before.items())
    assert done.kept.moved_stored == differ / sum(weight.numel() for weight in before.values())
    assert 0 < done.kept.moved_stored < done.kept.moved <= 1 and done.kept.stored_in == "bfloat16"


def test_a_step_below_the_spacing_of_bf16_shows_in_the_masters_alone():
    model = policy.load(tiny.PATH, Train(), "cpu")
    base = checkpoint.check(tiny.PATH)
    still = save.update(model, base, "bfloat16").kept
    assert still.metrics() == {"moved_share": 0, "moved_share_stored": 0} and math.isnan(still.share)
    assert still.sentence() == "Training changed no weight." and still.warning("x") == ""
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data[0, 0] *= 1 + 2**-12
    weight.data[0, 1] *= 1 + 2**-4
    total = sum(entry.numel for entry in checkpoint.entries(tiny.PATH).values())
    before = dict(checkpoint.tensors(tiny.PATH))["model.layers.0.mlp.up_proj.weight"][0].float()
    delta, stored = (each[0] - before for each in (weight.data, weight.data.bfloat16().float()))
    for state in (None, model.state_dict()):
        found = save.update(model, base, "bfloat16", state)
        assert (found.kept.moved, found.kept.moved_stored) == (2 / total, 1 / total)
        assert found.kept.share == pytest.approx(
            float(delta.double() @ stored.double() / delta.double().square().sum())
        )
        assert found.residual == pytest.approx(float((stored - delta).norm() / delta.norm()))
        whole = save.update(model, base, "float32", state).kept
        assert (whole.share, whole.moved_stored) == (1, 2 / total)


def test_metrics_come_live_step_by_step(trained):
    _, done, seen = trained
    assert [step for step, _ in seen] == [1, 2] == list(done.history["step"])
    assert {
        "train/reward",
        "train/reward_std",
        "train/frac_reward_zero_std",
        "train/entropy",
        "train/completions_per_s",
    } <= set(seen[0][1])
    assert seen[0][1]["train/grader_timeout_rate"] == seen[0][1]["train/grader_error_rate"] == 0
    assert (
        len(done.completions) == 2 * FAST.completions_logged and done.completions["completion"].map(type).eq(str).all()
    )


def test_the_same_seed_trains_the_same_weights_and_resuming_changes_none(trained, tmp_path):
    folder, done, _ = trained
    shutil.copytree(folder / "work", tmp_path / "work")
    shutil.rmtree(tmp_path / "work" / "checkpoint-2")
    again = grpo.run(job(tmp_path))
    assert again.resumed_from == 1
    assert checkpoint.digest(again.path) == checkpoint.digest(done.path)


def test_bf16_copies_of_weights_are_dropped_after_use_and_no_gradient_changes(tmp_path, monkeypatch):
    settings, ids = FAST.model_copy(update={"dtype": "bf16"}), torch.arange(3, 35)[None]

    def gradients() -> tuple[bool, dict]:
        trainer = grpo.make_trainer(job(tmp_path, settings))
        model, kept = trainer.accelerator.prepare_model(trainer.model), []
        model.model.layers[0].register_forward_pre_hook(lambda *_: kept.append(torch.is_autocast_cache_enabled()))
        model(input_ids=ids, labels=ids).loss.backward()
        return kept[0], {name: weight.grad for name, weight in model.named_parameters()}

    kept, ours = gradients()
    monkeypatch.setattr(policy, "free_casts", lambda trainer: None)
    kept_by_itself, without = gradients()
    assert kept_by_itself and not kept
    assert all(ours[name].equal(without[name]) and ours[name].any() for name in without)


def test_a_broken_checkpoint_is_skipped_for_the_one_before_it(trained, tmp_path):
    shutil.copytree(trained[0] / "work", tmp_path / "work")
    assert loop.latest(tmp_path / "work").name == "checkpoint-2"
    weights = tmp_path / "work" / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="checkpoint-2 is broken"):
        assert loop.latest(tmp_path / "work").name == "checkpoint-1"
    (tmp_path / "work" / "checkpoint-1" / "trainer_state.json").unlink()
    with pytest.warns(UserWarning):
        assert loop.latest(tmp_path / "work") is None


def test_an_adapter_without_weights_is_neither_written_nor_gone_on_with(trained, tmp_path):
    settings = Train(method="lora", lora_rank=2)
    with pytest.raises(QrlError, match="without any weight"):
        save.write(
            get_peft_model(policy.load(tiny.PATH, settings, "cpu"), policy.adapter(settings)),
            tiny.PATH,
            tmp_path / "adapter",
            dtype=None,
            state={},
        )
    assert not (tmp_path / "adapter").exists()
    shutil.copytree(trained[0] / "work", tmp_path / "work")
    save_file({}, tmp_path / "work" / "checkpoint-2" / "model.safetensors")
    with pytest.warns(UserWarning, match=r"checkpoint-2 is broken \(model\.safetensors holds no weights\)"):
        assert loop.latest(tmp_path / "work").name == "checkpoint-1"


def test_an_adapter_is_written_alike_by_every_process(tmp_path):
    """PEFT keeps the names of the matrices in a set, with another order in every interpreter."""
    settings = Train(method="lora", lora_rank=2)
    save.write(
        get_peft_model(policy.load(tiny.PATH, settings, "cpu"), policy.adapter(settings)),
        tiny.PATH,
        tmp_path / "adapter",
        dtype=None,
    )
    matrices = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert len(matrices) == 7 and matrices == sorted(matrices)


def test_a_checkpoint_of_fsdp_is_whole_with_the_optimizer_that_fsdp_writes(trained, tmp_path, monkeypatch):
    work = shutil.copytree(trained[0] / "work", tmp_path / "work")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.warns(UserWarning, match=r"optimizer\.bin"):
        assert loop.latest(work) is None
    (work / "checkpoint-2" / "optimizer.pt").rename(work / "checkpoint-2" / "optimizer.bin")
    assert loop.latest(work).name == "checkpoint-2"


def test_batches_that_do_not_divide_are_refused_before_any_weight_is_loaded(tmp_path):
    with pytest.raises(BadInput, match="choose a divisor, such as 4"):
        arguments.check(Train(prompts_per_step=4, generations=4, micro_batch=5), 100)
    with pytest.raises(BadInput, match="training questions"):
        arguments.check(Train(prompts_per_step=64), 63)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Return a low-rank adapter of one GRPO run at a large learning rate."""
    folder = tmp_path_factory.mktemp("adapter")
    settings = FAST.model_copy(update={"method": "lora", "lora_rank": 4, "learning_rate": 1e-2})
    return grpo.run(job(folder, settings)).path


def prompts():
    tokens = hf.tokenizer(tiny.PATH)
    return [prompt.render(tokens, question.question, "plain") for question in QUESTIONS[:4]]


def test_a_merged_model_answers_as_the_adapter_on_model(adapter, tmp_path):
    before = checkpoint.digest(tiny.PATH)
    merged = merge.run(tiny.PATH, adapter, tmp_path / "merged", prompts(), max_kl=5.0)
    assert checkpoint.digest(tiny.PATH) == before != checkpoint.digest(merged.path)
    assert 0 < merged.kl < 0.01 and 0 < merged.max_logit_diff < 5 and 0 < merged.merge_residual < 1
    model, _ = hf.load(merged.path, "cpu", torch.float32)
    assert model(torch.tensor([prompts()[0]])).logits.isfinite().all()


def test_the_distance_of_a_merge_is_kl_in_its_direction():
    first, second = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]), torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    p, q = scipy.special.softmax(first.numpy(), axis=-1), scipy.special.softmax(second.numpy(), axis=-1)
    assert merge._kl([first], [second]) == pytest.approx(scipy.special.rel_entr(p, q).sum() / 2, rel=1e-6)
    assert merge._kl([first[:1], first[1:]], [second[:1], second[1:]]) == merge._kl([first], [second])
    assert merge._kl([first], [second]) != pytest.approx(merge._kl([second], [first]))


def test_a_merge_that_loses_too_much_is_refused(adapter, tmp_path):
    with pytest.raises(QrlError, match=r"merge\.max_kl"):
        merge.run(tiny.PATH, adapter, tmp_path / "merged", prompts(), max_kl=1e-9)
    assert not (tmp_path / "merged").exists()


def test_an_adapter_never_merges_into_codes(adapter, tmp_path):
    quantized = tmp_path / "quantized"
    shutil.copytree(tiny.PATH, quantized)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    with pytest.raises(BadInput, match="full precision only"):
        merge.run(quantized, adapter, tmp_path / "merged", prompts(), max_kl=1.0)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"adapter_config\.json is missing"):
        merge.run(tiny.PATH, tmp_path, tmp_path / "merged", [], max_kl=1.0)
