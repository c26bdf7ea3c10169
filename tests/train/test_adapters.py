"""Adapters over a base in bf16, INT8 or NF4: the base does not change, it is the reference, and the merge is exact."""

import contextlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from qrl import checkpoint, tasks, tiny
from qrl.checkpoint.header import Entry
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.recipe import Recipe, Train, rules
from qrl.tasks import prompt
from qrl.train import Job, arguments, footprint, grpo, loop, merge, policy, reward, trainers
from qrl.train.job import Machine
from tests.train import pair

pytestmark = pytest.mark.process

QUESTIONS = tasks.load("arithmetic", "train", 16, 0)
BATCH = {
    "steps": 2,
    "prompts_per_step": 4,
    "generations": 4,
    "micro_batch": 16,
    "max_completion_tokens": 32,
    "save_every": 1,
}
BATCH |= {"temperature": 2.0}  # so that a group's completions differ, and there is something to learn
ADAPTER = {"lora_rank": 4, "lora_targets": ("q_proj", "v_proj"), "learning_rate": 2e-3, "beta": 0.01}
STORED = {
    "fp32": Train(method="lora", **BATCH, **ADAPTER),
    "int8": Train(method="lora", base_storage="int8", dtype="fp32", **BATCH, **ADAPTER),
    "nf4": Train(method="qlora", dtype="fp32", **BATCH, **ADAPTER),
}


def job(settings, folder):
    """Return a job over the built-in model; only its work folder and the adapter in it are written."""
    data = {"base": tiny.PATH, "questions": QUESTIONS, "task": "arithmetic", "template": "plain", "seed": 0}
    return Job(settings=settings, device="cpu", work=folder / "work", out=folder / "adapter", **data)


class Ran:
    """One GRPO run over a base stored in one way, with its trainer before the run."""

    def __init__(self, storage: str, folder) -> None:
        self.storage, self.settings, self.work = storage, STORED[storage], folder / "work"
        with pytest.MonkeyPatch.context() as patch:
            make = grpo.make_trainer

            def noted(job):
                self.trainer = make(job)
                self.before = loop.frozen_digest(self.trainer.model)
                return self.trainer

            patch.setattr(grpo, "make_trainer", noted)
            self.done = grpo.run(job(self.settings, folder))


@pytest.fixture(
    scope="module", params=["fp32", pytest.param("int8", marks=[pytest.mark.slow, pytest.mark.long]), "nf4"]
)
def ran(request, tmp_path_factory):
    return Ran(request.param, tmp_path_factory.mktemp(request.param))


def prompts():
    tokens = hf.tokenizer(tiny.PATH)
    return [prompt.render(tokens, question.question, "plain") for question in QUESTIONS[:4]]


def test_the_base_is_the_same_in_memory_and_on_disk_while_its_adapter_moves(ran):
    model = ran.trainer.model
    assert loop.frozen_digest(model) == ran.before
    assert policy.recorded(ran.done.path)["base_digest"] == checkpoint.digest(tiny.PATH)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.float32}
    written = load_file(ran.done.path / "adapter_model.safetensors")
    assert all("lora_" in name for name in written) and any(
        value.any() for name, value in written.items() if "lora_B" in name
    )
    packed = {type(module).__name__ for _, module in policy.packed(model)}
    assert any(
        ran.storage == storage and name in packed for storage, name in (("nf4", "Linear4bit"), ("int8", "Linear8bitLt"))
    ) or (ran.storage == "fp32" and not packed)


def test_a_base_that_moved_keeps_nothing(ran):
    weight = next(weight for name, weight in ran.trainer.model.named_parameters() if "base_layer.weight" in name).data
    first = weight.reshape(-1)[0].clone()
    watching = loop.Guard(ran.trainer.model, adapter=True)
    assert watching.digest_before == ran.before
    try:
        weight.reshape(-1)[0] += 1
        with pytest.raises(QrlError, match="changed in memory"):
            watching.check(None)
    finally:
        weight.reshape(-1)[0] = first
    watching.check(None)


def test_a_base_that_fsdp_lays_out_anew_is_guarded_by_its_values(ran, monkeypatch):
    if ran.storage != "fp32":
        pytest.skip("packed bases are refused under FSDP")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    model = ran.trainer.model
    watching = loop.Guard(model, adapter=True)
    state = {name: weight.detach().clone() for name, weight in model.named_parameters()}  # as its parts are gathered
    watching.check({name: weight.to(torch.float64) for name, weight in state.items()})
    next(value for name, value in state.items() if "lora_B" in name).add_(1)
    watching.check(state)
    next(value for name, value in state.items() if "base_layer" in name).reshape(-1)[0] += 1
    with pytest.raises(QrlError, match="changed in memory"):
        watching.check(state)
    monkeypatch.setenv("RANK", "1")
    loop.Guard(model, adapter=True).check(None)  # the others have nothing to hash


IN_PARTS = """
import sys
import peft
import torch
from peft import get_peft_model, get_peft_model_state_dict
from peft.utils.other import fsdp_auto_wrap_policy
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, StateDictType
from qrl import tiny
from qrl.recipe import Train
from qrl.train import policy, sharded

def same(weights):
    return len(wanted) == 56 and weights.keys() == wanted.keys() and all(weights[k].equal(wanted[k]) for k in wanted)

def laid_out():
    settings = Train(method="lora")
    model = get_peft_model(policy.load(tiny.PATH, settings, "cpu"), policy.adapter(settings))
    adapter = {name: weight for name, weight in model.named_parameters() if ".lora_" in name}
    drawn = {name.replace(".default", ""): weight.detach().clone() for name, weight in adapter.items()}
    bf16 = MixedPrecision(*3 * [torch.bfloat16])  # as accelerate makes it: of weights, gradients and buffers
    options = {"auto_wrap_policy": fsdp_auto_wrap_policy(model), "use_orig_params": True}
    options |= {"mixed_precision": sharded.keep_precision(bf16, adapter=True), "device_id": torch.device("cpu")}
    return model, drawn, FullyShardedDataParallel(model, **options)

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=0, world_size=1)
model, wanted, parts = laid_out()
sharded.patch_peft()
sharded.patch_peft()  # a second call changes nothing
with FullyShardedDataParallel.state_dict_type(parts, StateDictType.FULL_STATE_DICT):
    model.save_pretrained(sys.argv[1] + "/adapter", state_dict=parts.state_dict())  # as save.write does
    assert same(load_file(sys.argv[1] + "/adapter/adapter_model.safetensors")), "written"
    state = get_peft_model_state_dict(parts)  # as accelerate's checkpoints do
    checkpoint = {name: weight.clone() for name, weight in state.items()}
    assert same(checkpoint), "kept"

_, _, again = laid_out()  # the resuming process: its parts load weights before any forward pass through the whole
with FullyShardedDataParallel.state_dict_type(again, StateDictType.FULL_STATE_DICT):
    peft.set_peft_model_state_dict(again, checkpoint)
    assert same(get_peft_model_state_dict(again)), "resumed"
optimizer = torch.optim.AdamW(again.parameters())
FullyShardedDataParallel.optim_state_dict(again, optimizer)  # as the optimizer's state is read
rotary = [value for name, value in again.named_buffers() if name.endswith("inv_freq")]
assert rotary and all(value.dtype == torch.float32 for value in rotary), "positions"
with torch.no_grad():
    assert again(torch.tensor([[3, 5, 7]])).logits.isfinite().all(), "computed"
"""


@pytest.mark.slow
def test_an_adapter_that_fsdp_lays_out_is_written_kept_and_gone_on_with_whole(tmp_path):
    words = [sys.executable, "-W", "ignore", "-c", IN_PARTS + pair.ENDS, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_fsdp_on_a_cpu_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(BadInput, match=r"FSDP .*CPU"):
        grpo.check(job(Train(), tmp_path), Machine("cpu"))


def test_processes_of_fsdp_share_what_a_reference_takes(monkeypatch):
    settings, here = Train(beta=0.1), footprint.device_bytes("cpu")
    count = here // 18
    footprint.check_total(Train(), count, "cpu")  # 16 bytes each, without a reference; 20 with one
    with pytest.raises(BadInput, match=r"second copy .* GiB .*train\.beta = 0"):
        footprint.check_total(settings, count, "cpu")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    footprint.check_total(settings, count, "cpu")


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        ({}, "take a smaller model or train.method = lora or qlora"),
        ({"algorithm": "sft"}, "take a smaller model"),
        ({"teacher": "qrl-tiny"}, "take a smaller model"),
        ({"trainer": "verl"}, None),  # which divides and offloads in its own way
    ],
)
def test_every_trainer_of_all_weights_counts_memory_before_it_loads(changes, ways, monkeypatch, tmp_path):
    monkeypatch.setattr(footprint, "device_bytes", lambda device: 2**20)
    asked = replace(job(Train(**BATCH, **changes), tmp_path), teacher=tiny.PATH)
    base = checkpoint.check(tiny.PATH)
    trainer = trainers.TRAINERS[trainers.name(asked.settings)]
    if ways is None:
        grpo.check_job(base, asked, Machine("cpu"))
        return
    with pytest.raises(BadInput, match=rf"AdamW's .* this cpu has 0 GiB: {ways}\.$"):
        trainer.check(asked, Machine("cpu"))
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")  # in the host's memory, but for a teacher
    teacher = pytest.raises(BadInput, match=r"The teacher needs .*train\.teacher_placement = server")
    with teacher if asked.settings.teacher else contextlib.nullcontext():
        trainer.check(asked, Machine("cpu"))


def test_a_packed_base_is_refused_under_fsdp(monkeypatch):
    policy.check(Train(method="qlora"), TENSORS)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    policy.check(Train(method="lora"), TENSORS)
    for settings in (Train(method="qlora"), Train(method="lora", base_storage="int8")):
        with pytest.raises(BadInput, match=r"FSDP .*train\.base_storage = bf16"):
            policy.check(settings, TENSORS)


def test_the_reference_is_the_base_with_the_adapter_off_and_no_second_copy(ran):
    assert ran.trainer.ref_model is None and ran.done.history["kl"].notna().all()
    model, ids = ran.trainer.model.eval(), torch.tensor([prompts()[0]])
    with torch.inference_mode():
        on = model(ids).logits
        with model.disable_adapter():
            off = model(ids).logits
        assert off.equal(policy.load(tiny.PATH, ran.settings, "cpu").eval()(ids).logits)
    assert not on.equal(off)
    assert (ran.done.history["peak_memory_gib"] > 0).all()


def test_an_adapters_checkpoints_hold_no_base(ran):
    files = {file.name: file.stat().st_size for file in (ran.work / "checkpoint-2").iterdir()}
    assert "model.safetensors" not in files
    assert sum(size for name, size in files.items() if "tokenizer" not in name) < checkpoint.check(tiny.PATH).bytes / 10


def test_an_adapter_merges_into_the_base_that_it_was_trained_over(ran, tmp_path):
    before = checkpoint.digest(tiny.PATH)
    merged = merge.run(tiny.PATH, ran.done.path, tmp_path / "merged", prompts(), max_kl=50)
    assert merged.into == ("full" if ran.storage == "fp32" else ran.storage)
    assert (merged.base_shift > 0) == (ran.storage != "fp32")
    assert checkpoint.digest(tiny.PATH) == before and checkpoint.check(merged.path).quantization is None
    assert merged.max_logit_diff < 0.25 and merged.kl < 1e-4
    if ran.storage == "nf4":
        other = merge.run(tiny.PATH, ran.done.path, tmp_path / "other", prompts(), max_kl=50, into="full")
        with pytest.raises(QrlError, match=r"corrects its errors: leave merge\.into at auto"):
            merge.run(
                tiny.PATH, ran.done.path, tmp_path / "refused", prompts(), max_kl=Recipe().merge.max_kl, into="full"
            )
        assert other.into == "full" and other.max_logit_diff > 2 * merged.max_logit_diff and other.kl > 10 * merged.kl
    assert json.loads((merged.path / "config.json").read_text()).get("quantization_config") is None


def test_nothing_merges_into_codes(ran):
    if ran.storage != "fp32":
        with pytest.raises(TypeError, match="codes"):
            merge.fold(ran.trainer.model, torch.bfloat16)


def test_an_adapter_of_another_base_is_refused(ran, tmp_path):
    shutil.copytree(ran.done.path, tmp_path / "adapter")
    note = json.loads((tmp_path / "adapter" / policy.RECORD).read_text())
    (tmp_path / "adapter" / policy.RECORD).write_text(json.dumps(note | {"base_digest": "0" * 64}))
    with pytest.raises(BadInput, match="trained over the base with digest 000000000000"):
        merge.run(tiny.PATH, tmp_path / "adapter", tmp_path / "merged", prompts(), max_kl=1)


TENSORS = checkpoint.entries(tiny.PATH)
LARGE = {"w.weight": Entry("model.safetensors", "BF16", (10**6, 10**7), 2 * 10**13, start=0)}
REFUSED = {
    "adapter keys, full": (Train(lora_rank=8), TENSORS, r"train\.lora_rank is set, but train\.method = full"),
    "targets, full": (Train(lora_targets=("q_proj",)), TENSORS, r"train\.lora_targets is set"),
    "nf4, full": (Train(base_storage="nf4"), TENSORS, r"base_storage = nf4 stores the base in too few bits"),
    "int8, full": (Train(base_storage="int8"), TENSORS, r"base_storage = int8"),
    "no such target": (
        Train(method="lora", lora_targets=("qkv",)),
        TENSORS,
        r"names 'qkv', which is no linear .* q_proj",
    ),
    "half a name": (Train(method="lora", lora_targets=("proj",)), TENSORS, r"names 'proj'"),
    "an embedding": (Train(method="qlora", lora_targets=("embed_tokens",)), TENSORS, r"names 'embed_tokens'"),
    "the output head": (
        Train(method="lora", lora_targets=("lm_head",)),
        TENSORS | {"lm_head.weight": LARGE["w.weight"]},
        "'lm_head'",
    ),
    "bf16 in fp32": (Train(method="lora", base_storage="bf16", dtype="fp32"), TENSORS, r"train\.dtype is fp32"),
    "no room for the optimizer": (Train(), LARGE, r"AdamW's .*149012 GiB .*train\.method = lora or qlora"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_from_names_alone(name):
    settings, tensors, sentence = REFUSED[name]
    with pytest.raises(BadInput, match=sentence):
        rules.check_training(settings)
        policy.check(settings, tensors)
        footprint.check_total(settings, sum(entry.numel for entry in tensors.values()), "cpu")


BATCHES = {
    "micro-batch": (Train(prompts_per_step=4, generations=4, micro_batch=5), 100, "does not divide the 16 completions"),
    "prompts": (Train(prompts_per_step=64), 63, "There are 63 training questions"),
    "weights": (Train(rewards=("correct", "format"), reward_weights=(1,)), 100, "1 numbers for 2 rewards"),
    "saving within a batch": (Train(num_iterations=4, save_every=10), 100, r"no multiple of train\.num_iterations = 4"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_do_not_work_out_are_refused(name):
    settings, questions, sentence = BATCHES[name]
    with pytest.raises(BadInput, match=sentence):
        rules.check_training(settings)
        arguments.check(settings, questions)


def test_processes_share_a_steps_completions(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(BadInput, match="3 processes do not divide the 16 completions"):
        arguments.check(Train(prompts_per_step=4, generations=4), 100)
    with pytest.raises(BadInput, match="5 does not divide the 8 completions of a step in each of 3 processes"):
        arguments.check(Train(prompts_per_step=6, generations=4, micro_batch=5), 100)
    arguments.check(Train(prompts_per_step=6, generations=4, micro_batch=4), 100)


def test_a_quantized_checkpoint_is_not_trained(tmp_path):
    shutil.copytree(tiny.PATH, tmp_path / "quantized")
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    (tmp_path / "quantized" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq"}})
    )
    with pytest.raises(BadInput, match=r"stored in awq.* full-precision"):
        grpo.check(replace(job(Train(), tmp_path), base=tmp_path / "quantized"), Machine("cpu"))


@pytest.mark.parametrize(
    ("typed", "storage", "compute"),
    [
        ({}, "fp32", "fp32"),
        ({"dtype": "bf16"}, "fp32", "bf16"),
        ({"method": "lora"}, "fp32", "fp32"),
        ({"method": "lora", "dtype": "bf16"}, "bf16", "bf16"),
        ({"method": "lora", "base_storage": "bf16"}, "bf16", "bf16"),
        ({"method": "qlora"}, "nf4", "bf16"),
        ({"method": "qlora", "dtype": "fp32"}, "nf4", "fp32"),
        ({"method": "qlora", "base_storage": "int8"}, "int8", "bf16"),
    ],
)
def test_what_is_typed_resolves_to_a_storage_and_a_compute_dtype(typed, storage, compute):
    assert (Train(**typed).storage, Train(**typed).compute) == (storage, compute)


def test_full_training_with_beta_keeps_a_reference_of_its_own_and_all_keys_reach_trl(tmp_path):
    keys = {
        "loss": "grpo",
        "importance_sampling_level": "sequence",
        "num_iterations": 2,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "save_every": 2,
    }
    settings = Train(beta=0.1, rewards=("correct", "format"), reward_weights=(1, 0.2), **BATCH | keys)
    trainer = grpo.make_trainer(job(settings, tmp_path))
    assert trainer.ref_model is not None and trainer.reward_func_names == ["correct", "format"]
    assert trainer.reward_weights.tolist() == pytest.approx([1, 0.2])
    assert (trainer.importance_sampling_level, trainer.num_iterations) == ("sequence", 2)
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.loss_type) == (3e-4, 4e-4, "grpo")


def test_the_format_reward_asks_for_an_answer_in_the_asked_form_right_or_wrong():
    correct, form = reward.functions("arithmetic", ("correct", "format"))
    texts, gold = ["#### 7", "#### 8", "7", "#### 7\n#### 8"], ["7"] * 4
    assert correct(texts, gold) == [1, 0, 0, 0] and form(texts, gold) == [1, 1, 0, 0]
    assert form(texts, ["8"] * 4) == [1, 1, 0, 0] and correct(texts, ["8"] * 4) == [0, 1, 0, 0]
