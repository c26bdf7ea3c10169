"""The weights sent to a rollout engine, the measure of its gap, and its checks; without GPU and vLLM."""

import importlib.util
import math
import re
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qrl import process, recipe, tiny
from qrl.errors import BadInput, QrlError
from qrl.recipe import Rollout, Train, rules
from qrl.study import build
from qrl.tracking import keys
from qrl.train import Job, arguments, loop, policy, rollout
from qrl.train.rollout import checks, engine_gap, memory, slot, sync, vllm_engine
from qrl.train.trl.grpo import grpo_trainer

pytestmark = pytest.mark.process

METHODS = {
    "full": Train(),
    "lora": Train(method="lora"),
    "lora over bf16": Train(method="lora", dtype="bf16"),
    "qlora": Train(method="qlora"),
    "lora over int8": Train(method="lora", base_storage="int8"),
}


def adapted(train: Train):
    """Return the built-in model as a method stores it, with a random adapter."""
    from peft import get_peft_model

    model = policy.load(tiny.PATH, train, "cpu")
    if train.adapter:
        torch.manual_seed(0)
        model = get_peft_model(model, policy.adapter(train))
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(weight, std=0.02)
    return model


@pytest.fixture(scope="module", params=METHODS)
def held(request):
    return METHODS[request.param], adapted(METHODS[request.param])


def stored(model) -> str:
    """Return the digest of every weight in memory, the trained ones too."""
    state = {name: weight.requires_grad for name, weight in model.named_parameters()}
    model.requires_grad_(False)
    digest = loop.frozen_digest(model)
    for name, weight in model.named_parameters():
        if state[name]:
            weight.requires_grad_(True)
    return digest


def test_what_is_sent_has_the_checkpoints_names_and_shapes_each_once(held):
    from qrl.checkpoint import entries

    sent = list(sync.named_weights(held[1], torch.bfloat16))
    wanted = {name: entry.shape for name, entry in entries(tiny.PATH).items()}
    assert len(sent) == len(wanted) and {name: tuple(weight.shape) for name, weight in sent} == wanted
    assert {weight.dtype for _, weight in sent} == {torch.bfloat16}


def test_what_is_sent_is_the_freshly_dequantized_base_with_the_adapter_merged(held):
    """PEFT's own merge into a dequantized copy gives the same weights."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    train, model = held
    if not train.adapter:
        wanted = dict(model.named_parameters())
    else:
        fresh = policy.load(tiny.PATH, train, "cpu")
        if train.storage in policy.PACKED:
            fresh = fresh.dequantize(dtype=torch.bfloat16)
        copy = get_peft_model(fresh.float(), policy.adapter(train))
        set_peft_model_state_dict(copy, get_peft_model_state_dict(model))
        wanted = dict(copy.merge_and_unload().named_parameters())
    for name, weight in sync.named_weights(model, torch.float32):
        torch.testing.assert_close(
            weight, wanted[name].detach(), rtol=2**-7, atol=2**-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_base_and_the_adapter_that_a_slot_is_sent_add_up_to_the_merged_weights(held):
    train, model = held
    base = dict(sync.named_weights(model, torch.float32, adapters=False))
    parts = {f"{name}.weight": up @ down for name, down, up in sync.named_adapter(model)}
    assert bool(parts) == train.adapter
    for name, weight in sync.named_weights(model, torch.float32):
        wanted = base[name] + parts[name] if name in parts else base[name]
        torch.testing.assert_close(wanted, weight, rtol=2**-7, atol=2**-12)  # merged, a bf16 base is rounded again
    if parts:
        linears = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        sizes = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16}
        assert slot.options(model) == sizes | {"lora_target_modules": linears}


UNFIT = {  # what no slot can hold, and the sentence's remedy
    "no adapter": ({}, {}, r"train\.method = full trains all weights: set train\.method = lora or qlora"),
    "a server": ({"mode": "server"}, {"method": "lora"}, r"merged weights: set rollout\.mode = colocate, or"),
    "FP8": ({"quantization": "fp8"}, {"method": "qlora"}, r"set rollout\.quantization = none, or rollout\.adapter = m"),
    "a high rank": ({}, {"method": "lora", "lora_rank": 513}, r"ranks up to 512, but train\.lora_rank = 513: lower it"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_adapter_that_no_slot_can_hold_is_refused_before_any_weight_is_loaded(name):
    sampling, training, sentence = UNFIT[name]
    with pytest.raises(BadInput, match=rf"rollout\.adapter = slot .*{sentence}"):
        rules.check_training(Train(**training), Rollout(engine="vllm", adapter="slot", **sampling))
    rules.check_training(Train(method="qlora", lora_rank=512), Rollout(engine="vllm", adapter="slot"))
    assert slot.RANKS[-1] == rules.SLOT_RANK_LIMIT


def test_ten_syncs_leave_every_weight_bit_for_bit_and_send_the_same(held):
    _, model = held
    before = stored(model)
    first = {name: weight.clone() for name, weight in sync.named_weights(model, torch.bfloat16)}
    for _ in range(9):
        assert all(weight.equal(first[name]) for name, weight in sync.named_weights(model, torch.bfloat16))
    assert stored(model) == before


def test_a_packed_base_is_moved_by_trls_own_way_and_not_by_ours():
    """Why `sync` exists: merging and unmerging in place rounds the codes again."""
    model = adapted(METHODS["qlora"])
    before = loop.frozen_digest(model)
    for _ in sync.named_weights(model):
        pass
    assert loop.frozen_digest(model) == before
    model.merge_adapter()
    model.unmerge_adapter()
    assert loop.frozen_digest(model) != before


def test_a_forward_after_syncing_is_what_it_was(held):
    _, model = held
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for _ in sync.named_weights(model, torch.bfloat16):
            pass
        assert model(input_ids=ids).logits.equal(before)


LOGPS = st.lists(st.floats(-8, -0.01), min_size=1, max_size=24)


@given(LOGPS, st.floats(0, 0.5), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_gap_is_its_definition(logps, spread, seed):
    torch.manual_seed(seed)
    trainer = torch.tensor([logps, logps])
    engine = trainer + spread * torch.randn_like(trainer)
    mask = torch.ones_like(trainer)
    gap = engine_gap.measure(trainer, engine, mask)
    ratios = [math.exp(p - q) for p, q in zip(trainer.flatten().tolist(), engine.flatten().tolist(), strict=True)]
    assert gap.kl_k1 == pytest.approx(-sum(map(math.log, ratios)) / len(ratios), abs=1e-9)
    assert (
        gap.kl_k3 == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / len(ratios), abs=1e-9) and gap.kl_k3 >= 0
    )
    assert gap.token_ess == pytest.approx(sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios))
    assert 0 < gap.sequence_ess <= 1 + 1e-12 and 0 < gap.token_ess <= 1 + 1e-12


def test_processes_add_up_and_what_was_not_sampled_or_scored_does_not_count():
    torch.manual_seed(0)
    trainer, engine = -torch.rand(4, 6), -torch.rand(4, 6)
    mask = torch.ones(4, 6)
    mask[0, 3:] = 0
    whole = vars(engine_gap.measure(trainer, engine, mask))
    theirs = []
    engine_gap.measure(trainer[2:], engine[2:], mask[2:], lambda tensor: theirs.append(tensor) or tensor)
    ours = engine_gap.measure(trainer[:2], engine[:2], mask[:2], lambda tensor: torch.cat([tensor, theirs.pop(0)]))
    assert vars(ours) == pytest.approx(whole)
    unknown = engine.clone()
    unknown[0, 3:] = math.nan
    assert vars(engine_gap.measure(trainer, unknown, torch.ones(4, 6))) == pytest.approx(whole)
    same = engine_gap.measure(trainer, trainer, mask)
    assert vars(same) == pytest.approx(
        {"kl_k1": 0, "kl_k3": 0, "kl_k3_first_quarter": 0, "kl_k3_last_quarter": 0, "token_ess": 1, "sequence_ess": 1}
    )
    with pytest.raises(ValueError, match="no token"):
        engine_gap.measure(trainer, engine, torch.zeros(4, 6))


def test_the_quarters_are_those_of_each_completions_scored_tokens():
    """The first token of the second completion was not scored; padding is far off, but counts nowhere."""
    rows = [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [math.nan, 0.9, 0.0, 1.1, 9.0, 9.0, 9.0, 9.0], [0.7] + [9.0] * 7]
    lengths = (8, 4, 1)
    engine = torch.tensor(rows)
    mask = torch.tensor([[place < length for place in range(8)] for length in lengths])
    gap = engine_gap.measure(torch.zeros(3, 8), engine, mask)

    def k3(*gaps: float) -> float:
        return sum(math.exp(-each) - 1 + each for each in gaps) / len(gaps)

    assert gap.kl_k3_first_quarter == pytest.approx(k3(0.1, 0.2, 0.9, 0.7), rel=1e-6)
    assert gap.kl_k3_last_quarter == pytest.approx(k3(0.7, 0.8, 1.1, 0.7), rel=1e-6)


def test_long_completions_far_apart_still_have_an_effective_size():
    """Weights of whole completions overflow floats; their ratios do not."""
    logs = torch.tensor([-900.0, -901.0, -905.0], dtype=torch.float64)
    weights = (logs - logs.max()).exp()
    assert engine_gap.effective_share(logs) == pytest.approx(float(weights.sum() ** 2 / weights.square().sum() / 3))
    engine = torch.zeros(3, 2048, dtype=torch.float64)
    gap = engine_gap.measure(engine + (logs / 2048)[:, None], engine, torch.ones_like(engine))
    assert gap.sequence_ess == pytest.approx(engine_gap.effective_share(logs))


def test_k1_and_k3_estimate_the_divergence_that_they_are_named_after():
    torch.manual_seed(0)
    q, p = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.35, 0.25])
    drawn = torch.multinomial(q, 200_000, replacement=True)[None]
    gap = engine_gap.measure(p.log()[drawn], q.log()[drawn], torch.ones_like(drawn))
    wanted = float((q * (q / p).log()).sum())
    assert gap.kl_k1 == pytest.approx(wanted, rel=0.05) and gap.kl_k3 == pytest.approx(wanted, rel=0.05)


def test_what_an_engine_draws_depends_on_its_seed_alone_and_shifts_nothing_that_training_draws():
    """vLLM draws tokens from torch's generator on a CPU, and the seeds of completions from numpy's on a GPU."""

    def drawn() -> tuple[float, float]:
        return torch.rand(()).item(), numpy.random.random()

    def start() -> None:
        torch.manual_seed(5)
        numpy.random.seed(5)

    start()
    undisturbed = drawn()
    start()
    with vllm_engine.seeded(2**40 + 7):
        first = drawn()
    assert drawn() == undisturbed
    with vllm_engine.seeded(2**40 + 7):
        assert drawn() == first
    with vllm_engine.seeded(2**40 + 8):
        other = drawn()
    assert other[0] != first[0] and other[1] != first[1]
    start()
    with pytest.raises(RuntimeError, match="engine"), vllm_engine.seeded(1):
        drawn()
        raise RuntimeError("the engine fell over")
    assert drawn() == undisturbed


def test_an_engine_sleeps_where_memory_asks_for_it():
    gib = 2**30
    assert not vllm_engine.memory_is_short(6 * gib, int(1.5 * gib), 0.3, 140 * gib)  # full, 1.5 B, one H200
    assert vllm_engine.memory_is_short(6 * gib, int(1.5 * gib), 0.3, 40 * gib)
    assert not vllm_engine.memory_is_short(6 * gib, gib // 50, 0.2, 24 * gib)  # QLoRA, 8 B
    assert vllm_engine.sleeps(Rollout(sleep="on"), None) and not vllm_engine.sleeps(Rollout(sleep="off"), None)


def test_an_fp8_engine_pads_batches_whose_products_are_slow_to_one_that_it_may_draw():
    """A CUDA graph for more completions than an engine samples at once would not be used for whole steps."""
    for sequences, fp8 in ((300, False), (16, True)):
        plain = {"max_num_seqs": sequences, "compilation_config": {}}
        assert vllm_engine._batches(sequences, fp8=fp8, compiled=True) == plain
    for sequences, most in [(17, 64), (32, 64), (64, 64), (128, 128), (1000, 1000)]:
        options = vllm_engine._batches(sequences, fp8=True, compiled=True)
        sizes = options["compilation_config"]["cudagraph_capture_sizes"]
        assert options["max_num_seqs"] == most and sizes[:6] == [1, 2, 4, 8, 16, 64] and sizes == sorted(sizes)
        assert sizes[-1] == min(2 * most, 512)


@pytest.mark.parametrize("fp8", [False, True])
def test_an_engine_that_does_not_compile_still_captures_its_graphs(fp8):
    options = vllm_engine._batches(300, fp8=fp8, compiled=False)
    assert options["optimization_level"] == 0 and options["max_num_seqs"] == 300
    assert options["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    sizes = options["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == sorted(sizes) and sizes[-1] >= 300 and (32 in sizes) is not fp8  # slow in FP8


VLLM = Rollout(engine="vllm")
GIB, FREE_OF_80 = 2**30, "Free memory on device cuda:0 (20/80 GiB) is less than desired GPU memory utilization (0.3)"


@pytest.mark.parametrize(
    ("raised", "fixed", "sentence"),
    [
        (ValueError(f"{FREE_OF_80}.\nDecrease it."), None, r"20/80 GiB.*nvidia-smi.*lower rollout\.gpu_memory_util"),
        (RuntimeError("CUDA error: out of memory"), 4.0, r"out of memory.*lower rollout\.kv_cache_gib, or use"),
        (ValueError("No available memory for the cache blocks."), None, r"raise rollout\.gpu_memory_utilization"),
        (ValueError("To serve it, 3 GiB KV cache is needed, which is larger than the available KV cache memory"), 0.5,
         r"raise rollout\.kv_cache_gib, or lower rollout\.max_model_tokens"),
        (ValueError("Qwen9ForCausalLM does not support LoRA yet."), None, r"set rollout\.adapter = merged\.$"),
        (ValueError("Qwen9ForCausalLM is not supported"), None, r"Qwen9.*rollout\.engine = transformers"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_start_says_why_and_what_to_do(raised, fixed, sentence, monkeypatch):
    class LLM:
        def __init__(self, **_options):
            raise raised

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # which `create` sets
    settings = Rollout(engine="vllm", kv_cache_gib=fixed)
    with pytest.raises(QrlError, match=sentence) as failed:
        vllm_engine.create("model", settings, sequences=4, sleeps=False, rank=0, world=1)
    assert str(failed.value).count("\n") == 0 and failed.value.__cause__ is raised


@pytest.mark.parametrize(
    ("settings", "train", "teacher", "needed"),
    [
        (VLLM, Train(), 0, 24 + 4 + 8),  # 0.3 of 80 GiB, 2**30 parameters in fp32, and AdamW's moments
        (Rollout(engine="vllm", sleep="off"), Train(), 0, 24 + 4 + 8 + 4),  # beside gradients, too
        (VLLM, Train(beta=0.1), 0, 24 + 4 + 8 + 4),
        (VLLM, Train(beta=0.1, teacher="t", dtype="bf16"), GIB, 24 + 4 + 8 + 2),  # which has no reference
        (VLLM, Train(algorithm="sft", beta=0.1), 0, 16),  # nor an engine
        (Rollout(), Train(), 0, 16),
        (Rollout(engine="vllm", mode="server", server="http://a:1"), Train(), 0, 16),
        (Rollout(), Train(teacher="t"), 8 * GIB, 16 + 32),
        (Rollout(engine="vllm", kv_cache_gib=5, quantization="real"), Train(qat="int4"), 0, 5 + 0.5 + 4 + 8),
        (Rollout(engine="vllm", kv_cache_gib=5, quantization="real"), Train(qat="fp8"), 0, 5 + 1 + 4 + 8),
        (Rollout(engine="vllm", kv_cache_gib=5), Train(method="lora", dtype="bf16"), 0, 5 + 2 + 2),
        (Rollout(engine="vllm", kv_cache_gib=5, quantization="fp8"), Train(method="qlora"), 0, 5 + 1 + 0.5),
        (VLLM, Train(teacher="t"), 8 * GIB, 24 + 12 + 32),
        (VLLM, Train(teacher="t", dtype="bf16"), 8 * GIB, 24 + 12 + 16),
        (VLLM, Train(teacher="t", teacher_placement="sharded"), 8 * GIB, 24 + 12 + 16),
        (VLLM, Train(teacher="t", teacher_placement="sharded", dtype="bf16"), 8 * GIB, 24 + 12 + 8),
        (VLLM, Train(teacher="t", teacher_placement="server", teacher_server="http://a:1"), 8 * GIB, 24 + 12),
    ],
)
def test_too_little_free_memory_is_refused_before_any_weight_is_loaded(settings, train, teacher, needed, monkeypatch):
    monkeypatch.setattr(process, "world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 80 * GIB))
    free = int(needed * GIB)
    memory.check(settings, train, GIB, teacher)
    free -= 1
    beside = settings.engine == "vllm" and settings.mode == "colocate" and train.algorithm != "sft"
    remedy = r"rollout\.kv_cache_gib" if beside else "take a smaller model"
    with pytest.raises(BadInput, match=rf"of the GPU's 80\.0 GiB are free.*{remedy}") as refused:
        memory.check(settings, train, GIB, teacher)
    counted = teacher and train.teacher_placement != "server"
    assert ("train.teacher_placement = server" in str(refused.value)) == bool(counted)


def test_an_engine_sleeps_where_a_teacher_leaves_too_little(monkeypatch):
    student, card = SimpleNamespace(parameters=lambda: iter([torch.nn.Parameter(torch.empty(2**20))])), 80 * 2**20
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=card))
    for held, sleeps in ((0, False), (8 * 2**20, True)):  # 4 + 12 MiB of training, 16 of the engine, of 40 for these
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device, held=held: held)
        assert vllm_engine.sleeps(Rollout(engine="vllm", gpu_memory_utilization=0.21), student) == sleeps


def test_rollouts_that_cannot_be_are_refused_before_any_weight_is_loaded(monkeypatch):
    rollout.check(Rollout(), "cpu", Train())
    with pytest.raises(BadInput, match=r"rollout\.engine = vllm .*GPU"):
        rollout.check(VLLM, "cpu", Train())
    for name in ("int4", "nvfp4-a4", "fp8"):
        rules.check_training(Train(qat=name), VLLM)
        rollout.check(VLLM, "cuda", Train(qat=name))
    with pytest.raises(BadInput, match=r"rollout\.quantization = fp8 .*train\.qat = int4"):
        rules.check_training(Train(qat="int4"), Rollout(engine="vllm", quantization="fp8"))
    with pytest.raises(BadInput, match="No rollout server answers"):
        rollout.check(Rollout(engine="vllm", mode="server", server="http://127.0.0.1:9"), "cuda", Train())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(BadInput, match="FSDP"):
        rollout.check(VLLM, "cuda", Train(method="lora"))
    for whole in (Train(), Train(qat="int4")):
        rollout.check(VLLM, "cuda", whole)


UNHEEDED = {
    "FP8 without an engine": (
        Rollout(quantization="fp8"),
        r"rollout\.quantization = fp8 .*rollout\.engine = transformers",
    ),
    "a server without an engine": (Rollout(mode="server"), r"rollout\.mode = server .* set rollout\.engine = vllm"),
    "a correction of nothing": (
        Rollout(is_correction="sequence_mask"),
        r"rollout\.is_correction = sequence_mask .*rollout\.engine = vllm",
    ),
    "an address, colocated": (
        Rollout(engine="vllm", server="http://a:1"),
        r"rollout\.server = http://a:1 .* rollout\.mode = colocate",
    ),
    "memory of a server": (
        Rollout(engine="vllm", mode="server", sleep="on"),
        r"rollout\.sleep = on .* rollout\.mode = server",
    ),
    "a limit of what is not measured": (
        Rollout(engine="vllm", is_correction="none", max_engine_kl=1),
        r"rollout\.max_engine_kl = 1.* rollout\.is_correction = none",
    ),
}


@pytest.mark.parametrize(
    ("settings", "train", "told"),
    [
        (VLLM, Train(), {}),
        (VLLM, Train(qat="int4"), {}),
        (VLLM, Train(qat="nvfp4-a4"), {"format": r"qat = nvfp4-a4 .*was 1\.6e-03 .*bf16 4\.0e-06.*begin at"}),
        (
            VLLM.model_copy(update={"quantization": "fp8"}),
            Train(),
            {"format": r"rollout\.quantization = fp8 .*2\.0e-04"},
        ),
        (VLLM.model_copy(update={"is_correction": "none"}), Train(), {"gap": "the watcher `rollout` sees nothing"}),
        (
            VLLM.model_copy(update={"quantization": "fp8", "is_correction": "none"}),
            Train(),
            {"format": r"bf16 4\.0e-06\.$", "gap": "sees nothing"},
        ),
        (VLLM, Train(qat="nvfp4-a4", teacher="t"), {}),
        (VLLM.model_copy(update={"quantization": "fp8"}), Train(algorithm="sft"), {}),
        (Rollout(), Train(qat="nvfp4-a4"), {}),
    ],
)
def test_a_wide_or_unmeasured_gap_is_told_before_the_first_step(settings, train, told):
    known = checks.startup_warnings(settings, train)
    assert known.keys() == told.keys() and all(re.search(told[name], known[name]) for name in told)


@pytest.mark.parametrize("name", UNHEEDED)
def test_a_setting_that_nothing_would_heed_is_refused(name):
    settings, sentence = UNHEEDED[name]
    with pytest.raises(BadInput, match=sentence):
        rules.check_training(Train(), settings)


@pytest.mark.parametrize("name", recipe.names())
def test_no_shipped_recipe_sets_what_nothing_heeds(name):
    rules.check(recipe.load(name))


def test_a_distillation_reads_no_probability_of_the_engine():
    distils = Train(teacher="t", temperature=0.7, top_p=0.9)
    rules.check_training(distils, VLLM)
    with pytest.raises(BadInput, match=r"train\.top_p = 0\.9"):
        rules.check_training(distils.model_copy(update={"teacher": ""}), VLLM)
    for key, value in {"is_correction": "sequence_mask", "max_engine_kl": 1.0}.items():  # of a sweep's other arms
        rules.check_training(Train(teacher="t"), VLLM.model_copy(update={key: value}))


@pytest.mark.parametrize("key", ["quantization", "kv_cache"])
@pytest.mark.parametrize(
    ("capability", "refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False), ((10, 0), False)]
)
def test_fp8_is_refused_on_gpus_without_it(key, capability, refused):
    narrow = Rollout(engine="vllm", **{key: "fp8"})
    if refused:
        with pytest.raises(BadInput, match=rf"rollout\.{key} = fp8 needs a GPU of compute capability 8\.9"):
            checks.check_fp8(narrow, capability, "a GPU")
    else:
        checks.check_fp8(narrow, capability, "a GPU")


def test_fp8_is_left_to_the_nodes_where_a_study_starts_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rollout.check(Rollout(engine="vllm", quantization="fp8"), "cuda", Train())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_vllm_is_missed_in_a_sentence():
    with pytest.raises(BadInput, match="vLLM is not installed in this environment"):
        grpo_trainer(VLLM)


def test_transformers_rollouts_are_trls_own_trainer():
    from trl import GRPOTrainer

    assert grpo_trainer(Rollout()) is GRPOTrainer and rollout.arguments(Rollout()) == {}


def test_the_correction_reaches_trl(tmp_path):
    def made(sampling):
        data = {"base": tiny.PATH, "questions": (), "task": "arithmetic", "template": "plain", "seed": 0}
        folders = {"work": tmp_path, "out": tmp_path / "model"}
        return arguments.grpo_config(Job(settings=Train(), device="cpu", rollout=sampling, **data, **folders))

    masked = made(Rollout(engine="vllm", is_correction="token_mask", is_correction_max=1.5))
    assert masked.vllm_importance_sampling_correction and masked.vllm_importance_sampling_mode == "token_mask"
    assert masked.vllm_importance_sampling_clip_max == 1.5
    assert not made(Rollout(engine="vllm", is_correction="none")).vllm_importance_sampling_correction


def test_training_with_vllm_runs_in_its_environment_and_is_another_result(monkeypatch):
    monkeypatch.delenv(build.PLACE, raising=False)
    assert build.environment_for("train", "transformers") is None
    assert build.environment_for("train", "vllm").name == "vllm"
    monkeypatch.setenv(build.PLACE, "vllm")
    assert build.environment_for("train", "vllm") is None

    def key(**overrides):
        return keys.trained(
            recipe.load("tiny", {f"rollout.{name}": value for name, value in overrides.items()}), "d", "cuda"
        )

    changed = ({}, {"quantization": "fp8"}, {"adapter": "slot"})
    assert len({key(), *(key(engine="vllm", **each) for each in changed)}) == 4
    assert key(engine="vllm", adapter="merged") == key(engine="vllm")
    assert key(engine="vllm", server="http://a:1") == key(engine="vllm", server="http://b:2")


def test_a_trainings_key_holds_what_changes_its_weights_and_nothing_else():
    def key(overrides=None, **more):
        return keys.trained(recipe.load("tiny", overrides), "d", "cuda", **more)

    plain = key()
    assert {
        key({"watch.max_reference_kl": "0.1"}),
        key({"watch.window": "9"}),
        key({"rollout.max_engine_kl": "1"}),
    } == {plain}
    stops = [{"watch.stop": "kl", "train.beta": "0.1", "watch.max_reference_kl": limit} for limit in ("0.1", "0.2")]
    assert len({plain, key({"watch.probe_every": "2"}), *map(key, stops)}) == 4
    assert key({"rollout.engine": "vllm"}, processes=2) not in {key({"rollout.engine": "vllm"}), plain}
    here, there = ({"train.teacher": address} for address in ("here", "there"))
    assert key(here, teacher="a") == key(there, teacher="a") != key(here, teacher="b")
    assert key(here, teacher="a") != plain
