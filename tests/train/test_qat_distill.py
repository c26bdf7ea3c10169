"""On-policy distillation: the divergence is what it says, the student learns, what does not fit is refused."""

import json
import shutil

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

pytest.importorskip("compressed_tensors")

from dataclasses import replace

from qrl import checkpoint, tasks, tiny
from qrl.errors import BadInput
from qrl.formats.fakequant import linears
from qrl.recipe import Rollout, Train, Watch, rules
from qrl.train import Job, distill, policy, rollout
from qrl.train.job import Machine
from qrl.train.teacher import Likeliest, local

pytestmark = pytest.mark.process

QUESTIONS = tasks.load("arithmetic", "train", 16, 0)
FAST = Train(
    steps=5,
    prompts_per_step=8,
    generations=2,
    micro_batch=16,
    max_completion_tokens=32,
    save_every=5,
    learning_rate=4e-5,
    qat="int8",
)


def job(folder, settings=FAST, **changes):
    data = {"base": tiny.PATH, "questions": QUESTIONS, "task": "arithmetic", "template": "plain", "seed": 0}
    folders = {"work": folder / "work", "out": folder / "model"}
    return Job(**{"settings": settings, "device": "cpu"} | data | folders | changes)


def likeliest(logits, count):
    return Likeliest(*logits.topk(count, dim=-1))


def test_the_divergence_over_all_tokens_is_the_plain_kl_and_mixes_linearly():
    student, teacher = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    forward = kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)
    backward = kl_div(theirs, ours, log_target=True, reduction="none").sum(-1)
    for weight in (0.0, 0.3, 1.0):
        mixed = distill.divergence(student, likeliest(teacher, 40), reverse=weight)
        assert torch.allclose(mixed, (1 - weight) * forward + weight * backward, atol=1e-5)
    hot = distill.divergence(3 * student, local.likeliest(3 * teacher, 40, 3.0), reverse=1.0, temperature=3.0)
    assert torch.allclose(hot, backward, atol=1e-5)


def test_only_the_teachers_likeliest_tokens_count_and_an_equal_student_is_at_zero():
    student, teacher = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
    unlikely = teacher.argsort(-1)[:, :36]  # all but the four likeliest
    changed = student.scatter_add(-1, unlikely, torch.full_like(student, 5.0))
    of_student, of_changed, of_equal = (
        distill.divergence(logits, likeliest(teacher, 4), reverse=0.5) for logits in (student, changed, teacher + 3)
    )
    assert torch.allclose(of_student, of_changed) and (of_student > 0).all() and of_equal.abs().max() < 1e-6


@pytest.mark.parametrize("tied", [True, False])
def test_a_teacher_whose_linears_are_stored_in_bf16_scores_as_one_that_autocast_rounds_bit_for_bit(tied, tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=200, num_key_value_heads=2, tie_word_embeddings=tied, **size)
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(config)
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    made.save_pretrained(tmp_path)
    ids = torch.randint(200, (3, 12))
    mask, valid = torch.ones_like(ids), torch.ones(3, 12, dtype=torch.bool)

    def score(model):
        return model(input_ids=ids).logits[valid]

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        teacher = local.Local(tmp_path, FAST.model_copy(update={"dtype": "bf16"}), "cpu")
        whole = policy.load(tmp_path, FAST, "cpu").eval()
        assert torch.equal(score(teacher.model), score(whole))
        scores, tokens = teacher(score, ids, mask, valid)
        assert scores.equal(score(whole).float().gather(-1, tokens)) and scores.dtype == torch.float32
    stored = {name: weight.dtype for name, weight in teacher.model.named_parameters()}
    assert stored["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert stored["model.embed_tokens.weight"] == stored["model.norm.weight"] == torch.float32
    assert ("lm_head.weight" in stored) != tied and (tied or stored["lm_head.weight"] == torch.bfloat16)


@pytest.mark.slow
def test_a_quantized_student_comes_closer_to_its_teacher(tmp_path, away):
    seen = []
    student = job(tmp_path, base=away, log=lambda metrics, step: seen.append((step, metrics)))
    done = distill.run(replace(student, teacher=tiny.PATH))
    assert checkpoint.check(done.path).dtype == "float32"
    assert list(done.completions) == ["step", "prompt", "completion"]
    assert done.completions["step"].value_counts().to_dict() == dict.fromkeys(range(1, 6), FAST.completions_logged)
    assert done.completions["completion"].str.len().max() > 0
    losses = done.history["loss"].tolist()
    assert {"train/loss", "train/completion_tokens", "train/truncation_rate"} <= set(seen[-1][1])
    assert [step for step, _ in seen] == [0, 1, 2, 3, 4, 5] and len(losses) == 5
    assert 0 < min(losses[1:]) < losses[0]  # the teacher is what the student was before its weights were shaken


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("int8", marks=pytest.mark.long), "nvfp4-a4"])
def test_a_distillation_that_was_killed_goes_on_bit_for_bit(name, tmp_path):
    settings = FAST.model_copy(
        update={
            "qat": name,
            "steps": 3,
            "save_every": 1,
            "temperature": 1.5,
            "prompts_per_step": 4,
            "micro_batch": 8,
            "qat_calibration_samples": 4,
        }
    )
    whole = distill.run(replace(job(tmp_path, settings), teacher=tiny.PATH))
    shutil.copytree(tmp_path / "work", tmp_path / "again" / "work")
    shutil.rmtree(tmp_path / "again" / "work" / "checkpoint-3")
    again = distill.run(replace(job(tmp_path / "again", settings), teacher=tiny.PATH))
    assert (whole.resumed_from, again.resumed_from) == (0, 2)
    assert checkpoint.digest(again.path) == checkpoint.digest(whole.path)
    assert again.history["loss"].iloc[-1] == whole.history["loss"].iloc[-1] != 0


def test_activation_scales_are_part_of_what_a_checkpoints_digest_names(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny.PATH, folder)
    digests = [checkpoint.digest(folder)]
    for scale in (1.0, 2.0):
        linears.write_activation_scales(folder, {"model.layers.0.mlp.up_proj": scale})
        digests.append(checkpoint.digest(folder))
    assert len(set(digests)) == 3


def test_what_cannot_be_distilled_is_refused(tmp_path):
    def check(teacher=tiny.PATH, settings=FAST, **changes):
        started = replace(job(tmp_path, settings, **changes), teacher=teacher)
        rules.check_training(settings.model_copy(update={"teacher": str(teacher)}), started.rollout, started.watch)
        distill.check(started, Machine("cpu"))

    other = tmp_path / "other"
    shutil.copytree(tiny.PATH, other)
    wider = AutoModelForCausalLM.from_pretrained(tiny.PATH)
    wider.resize_token_embeddings(999, mean_resizing=False)
    wider.save_pretrained(other)
    with pytest.raises(BadInput, match="a vocabulary of 999"):
        check(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(BadInput, match=r"teacher .* is stored in awq"):
        check(other)
    with pytest.raises(BadInput, match="trains an adapter"):
        check(settings=Train(method="lora"))
    with pytest.raises(BadInput, match=r"train\.base_storage = nf4"):
        check(settings=Train(base_storage="nf4"))
    with pytest.raises(BadInput, match="does not divide"):
        check(settings=Train(prompts_per_step=4, generations=4, micro_batch=5))
    with pytest.raises(BadInput, match="There are 7 training questions"):
        check(questions=QUESTIONS[:7])
    rollout.check(Rollout(engine="vllm"), "cuda", Train(teacher="qrl-tiny"))
    with pytest.raises(BadInput, match="needs a GPU"):
        rollout.check(Rollout(engine="vllm"), "cpu", Train(teacher="qrl-tiny"))
    for watch in (Watch(stop=("entropy",)), Watch(probe_every=2)):
        with pytest.raises(BadInput, match="without watchers"):
            check(watch=watch)
