"""Quantization-aware training of a model: what is swapped, what flows back, when Q(W) is computed, what is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

pytest.importorskip("compressed_tensors")

from qrl import names
from qrl.errors import BadInput, QrlError
from qrl.formats.fakequant import fused
from qrl.formats.fakequant import linears as fake_linears
from qrl.formats.fakequant import rounding as values
from qrl.recipe import Train
from qrl.train.qat import linear as qat
from qrl.train.qat import prepare
from qrl.train.rollout import sync, vllm_engine
from qrl.train.trl import vllm_link

pytestmark = pytest.mark.process

SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def small(tied=True, width=512):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(intermediate_size=width, tie_word_embeddings=tied, **SHAPE))


def quantized(weight, args, dtype=None):
    return values.folded([weight], args, dtype)[0][0]


def attached(name, **options):
    model = small()
    qat.attach(model, name, **options)
    if fake_linears.needs_calibration(name):
        prepare.calibrate(model, [batch()])
    return model


def batch(rows=2, length=12):
    ids = torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def step(model, rate=1e-2):
    """Take one optimizer step of plain language modelling."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model(**batch(), labels=batch()["input_ids"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", names.FORMATS)
def test_keys_and_masters_stay_and_head_embeddings_and_norms_are_left_alone(name):
    model, plain = attached(name), small()
    state, before = model.state_dict(), plain.state_dict()
    assert list(state) == list(before) and all(torch.equal(state[key], before[key]) for key in before)
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.get_input_embeddings().weight
    covered = {path for path, module in model.named_modules() if isinstance(module, qat.QATLinear)}
    linears = {path for path, module in plain.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    assert covered == ({path for path in linears if "self_attn" in path} if name == "int8-attention" else linears)


@pytest.mark.parametrize("name", names.FORMATS)
def test_the_forward_is_an_ordinary_models_with_quantized_weights(name):
    model, plain = attached(name), small()
    plain.load_state_dict(dict(sync.named_weights(model)) | {"lm_head.weight": model.lm_head.weight})
    if values.scheme(name).input_activations is not None:
        for path, module in model.named_modules():
            if isinstance(module, qat.QATLinear):
                args, scale = module.fold.scheme.input_activations, module.input_global_scale
                plain.get_submodule(path).register_forward_pre_hook(
                    lambda _, inputs, args=args, scale=scale: (values.activations(inputs[0], args, scale),)
                )
    with torch.no_grad():
        assert torch.equal(model(**batch()).logits, plain(**batch()).logits)
        assert not torch.equal(model(**batch()).logits, small()(**batch()).logits)


@pytest.mark.parametrize("name", names.FORMATS)
def test_gradients_are_those_of_an_unquantized_linear_at_the_quantized_point(name):
    model = attached(name)
    linear = model.model.layers[0].self_attn.q_proj
    inputs = torch.randn(3, 7, 256, requires_grad=True)
    upstream = torch.randn(3, 7, 256)
    linear(inputs).backward(upstream)
    args = linear.fold.scheme.input_activations
    at = inputs.detach() if args is None else values.activations(inputs, args, linear.input_global_scale)
    point = [
        at.clone().requires_grad_(),
        linear.fold.weight_of(linear).clone().requires_grad_(),
        linear.bias.detach().clone().requires_grad_(),
    ]
    functional.linear(*point).backward(upstream)
    for ours, wanted in zip((inputs, linear.weight, linear.bias), point, strict=True):
        assert torch.equal(ours.grad, wanted.grad)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("name", ["int4", "nvfp4-a4"])
def test_gradients_of_micro_batches_add_up_and_recomputed_forwards_have_the_same(name, reentrant):
    whole, model = attached(name), attached(name)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    model.train()
    whole(**batch(4), labels=batch(4)["input_ids"]).loss.backward()
    for half in (slice(0, 2), slice(2, 4)):
        part = {key: value[half] for key, value in batch(4).items()}
        (model(**part, labels=part["input_ids"]).loss / 2).backward()
    for ours, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(ours.grad, wanted.grad, rtol=1e-4, atol=1e-6)


def test_a_backward_at_weights_that_were_folded_anew_since_is_an_error():
    model = attached("int4")
    loss = model(**batch(), labels=batch()["input_ids"]).loss
    qat.refold(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_masters_that_are_cast_or_replaced_after_attaching_get_their_gradients():
    model = attached("int4", dtype=torch.bfloat16).to(torch.bfloat16)
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().clone())
    model(**batch(), labels=batch()["input_ids"]).loss.backward()
    assert all(
        weight.grad.dtype == torch.bfloat16 and weight.grad.abs().max() > 0
        for weight in model.parameters()
        if weight.ndim > 1
    )
    assert torch.equal(linear.fold.weight_of(linear), quantized(linear.weight, values.scheme("int4").weights))


def test_a_weight_that_is_frozen_after_attaching_gets_no_gradient():
    model = attached("int8")
    linear = model.model.layers[0].mlp.up_proj
    linear.weight.requires_grad_(False)
    qat.refold(model)
    model(**batch(), labels=batch()["input_ids"]).loss.backward()
    assert linear.weight.grad is None and model.model.layers[0].mlp.gate_proj.weight.grad is not None


def test_queries_keys_and_values_share_a_global_scale_and_so_do_gate_and_up():
    model = attached("nvfp4-a16")
    layer, args = model.model.layers[0], values.scheme("nvfp4-a16").weights
    for together in (
        (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
        (layer.mlp.gate_proj, layer.mlp.up_proj),
    ):
        assert len({id(linear.fold) for linear in together}) == 1
        expected, _ = values.folded([linear.weight for linear in together], args)
        for linear, wanted in zip(together, expected, strict=True):
            assert torch.equal(linear.fold.weight_of(linear), wanted)
    assert len(qat.folds(model)) == 2 * 4


def test_weights_are_folded_once_a_step_and_every_forward_reuses_them():
    model = attached("int4")
    with torch.no_grad():
        model.generate(**batch(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert {fold.times_folded for fold in qat.folds(model)} == {1}
    before = model.model.layers[0].mlp.up_proj.fold.weight_of(model.model.layers[0].mlp.up_proj)
    step(model)
    qat.refold(model)
    with torch.no_grad():
        model(**batch())
    assert {fold.times_folded for fold in qat.folds(model)} == {2}
    after = model.model.layers[0].mlp.up_proj.fold.weight_of(model.model.layers[0].mlp.up_proj)
    assert not torch.equal(before, after) and torch.equal(
        after, quantized(model.model.layers[0].mlp.up_proj.weight, values.scheme("int4").weights)
    )


def test_a_forgotten_fold_is_noticed_and_weights_loaded_later_are_quantized_too():
    model = attached("int8")
    step(model)  # nobody folds
    expected = copy.deepcopy(small())
    expected.load_state_dict(model.state_dict())
    qat.attach(expected, "int8")
    with torch.no_grad():
        assert torch.equal(model(**batch()).logits, expected(**batch()).logits)
        model.load_state_dict(small().state_dict())
        assert torch.equal(model(**batch()).logits, attached("int8")(**batch()).logits)


@pytest.mark.parametrize("name", names.FORMATS)
def test_training_moves_the_masters_and_lowers_the_loss(name):
    model = attached(name)
    losses = []
    for _ in range(4):
        losses.append(float(model(**batch(), labels=batch()["input_ids"]).loss.detach()))
        step(model, rate=1e-3)
        qat.refold(model)
    assert losses[-1] < losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_switched_off_it_is_the_full_precision_model_and_comes_back_on():
    model, plain = attached("nvfp4-a4"), small()
    with torch.no_grad():
        on = model(**batch()).logits
        with qat.off(model):
            assert torch.equal(model(**batch()).logits, plain(**batch()).logits)
            assert all(
                torch.equal(value, wanted)
                for (_, value), (_, wanted) in zip(sync.named_weights(model), plain.named_parameters(), strict=True)
            )
        assert torch.equal(model(**batch()).logits, on)


def test_a_rollout_engine_is_sent_q_under_the_checkpoints_names():
    model = attached("int4", dtype=torch.bfloat16)
    sent = dict(sync.named_weights(model, torch.bfloat16))
    assert list(sent) == [name for name, _ in model.named_parameters()]
    linear = model.model.layers[1].mlp.gate_proj
    args = values.scheme("int4").weights
    assert torch.equal(
        sent["model.layers.1.mlp.gate_proj.weight"], quantized(linear.weight, args, dtype=torch.bfloat16)
    )
    assert torch.equal(sent["model.norm.weight"], model.model.norm.weight.bfloat16())
    with torch.no_grad():
        linear.weight.mul_(1.5)
    qat.refold(model)
    assert not torch.equal(
        dict(sync.named_weights(model))["model.layers.1.mlp.gate_proj.weight"],
        sent["model.layers.1.mlp.gate_proj.weight"],
    )


@pytest.mark.parametrize("name", names.FORMATS)
def test_a_rollout_engine_is_sent_the_scale_of_every_linear_that_has_one(name):
    model = attached(name)
    sent = dict(sync.named_scales(model))
    linears = {path: module for path, module in model.named_modules() if isinstance(module, qat.QATLinear)}
    assert list(sent) == [f"{path}.input_global_scale" for path in linears if name in names.CALIBRATED_FORMATS]
    for path, scale in sent.items():
        assert scale.shape == (1,) and scale.dtype == torch.float32
        assert scale is linears[path.removesuffix(".input_global_scale")].input_global_scale
    link = object.__new__(vllm_link.Link)
    link.model, link.train = model, Train(qat=name)
    link.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    for shards in (False, True):  # TRL itself would send the masters
        link._dist = SimpleNamespace(is_fsdp=shards)
        assert [name for name, _ in link._iter_named_params()] == [*sent, *dict(sync.named_weights(model))]


def test_an_engine_that_is_sent_no_scales_ends_training_in_a_sentence():
    model = attached("int4")
    theirs = dict(sync.named_weights(model)) | {"model.layers.0.mlp.down_proj.input_global_scale": torch.ones(1)}
    runner = SimpleNamespace(
        model=SimpleNamespace(named_parameters=theirs.items, load_weights=lambda sent: {name for name, _ in sent})
    )
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    engine = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor), reset_prefix_cache=lambda: None)
    with pytest.raises(QrlError, match=r"did not send \(model\.layers\.0\.mlp\.down_proj\.input_global_scale\)"):
        vllm_engine.load(engine, sync.named_weights(model), reloads=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_scales_that_are_no_positive_numbers_are_refused_by_name(bad):
    model = attached("nvfp4-a4")
    scales = {name.rpartition(".")[0]: float(scale) for name, scale in sync.named_scales(model)}
    with pytest.raises(BadInput, match=r"do not fit the model \(model\.layers\.0\.mlp\.up_proj is in only one"):
        prepare.set_activation_scales(
            model, {path: scales[path] for path in scales if path != "model.layers.0.mlp.up_proj"}
        )
    with pytest.raises(BadInput, match=rf"activation scale of model\.layers\.1\.mlp\.up_proj is {bad}, but must be"):
        prepare.set_activation_scales(model, scales | {"model.layers.1.mlp.up_proj": bad})


def test_a_base_whose_activations_are_nan_is_refused_while_they_are_calibrated():
    model = small()
    qat.attach(model, "nvfp4-a4")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = float("nan")
    with pytest.raises(BadInput, match=r"activation scale of model\.layers\.0\.self_attn\.q_proj is nan"):
        prepare.calibrate(model, [batch()])


def test_queries_keys_and_values_are_fed_one_and_the_same_tensor(monkeypatch):
    model, seen = attached("nvfp4-a4"), []
    whole = fused.activations
    monkeypatch.setattr(fused, "activations", lambda inputs, *args: seen.append(inputs) or whole(inputs, *args))
    with torch.no_grad():
        model(**batch())
    assert len(seen) == 2 * 4  # of seven linears a layer: q, k and v have one input, gate and up another
    assert all(fold.latest_inputs is None for fold in qat.folds(model))


def test_q_is_kept_in_the_dtype_of_the_forward_and_gradients_in_the_masters():
    model = attached("int4", dtype=torch.bfloat16)
    linear = model.model.layers[0].mlp.up_proj
    assert linear.fold.weight_of(linear).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch(), labels=batch()["input_ids"]).loss.backward()
    assert linear.weight.grad.dtype == linear.weight.dtype == torch.float32
    with (
        torch.no_grad()
    ):  # a rollout of TRL's, without autocast: Q(W) in the same dtype, the rest of the model in its own
        assert model(**batch()).logits.dtype == torch.float32


def test_activation_scales_come_from_the_largest_input_padding_apart_and_are_read_back_bit_for_bit(tmp_path):
    model = small()
    qat.attach(model, "nvfp4-a4")
    seen = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    padded = batch()
    padded["attention_mask"][1, :5] = 0
    scales = prepare.calibrate(model, [padded])
    largest = seen[0][padded["attention_mask"].bool()].abs().max()
    linear = model.model.layers[1].mlp.down_proj
    assert (
        float(linear.input_global_scale)
        == scales["model.layers.1.mlp.down_proj"]
        == pytest.approx(6 * 448 / float(largest), rel=1e-6)
    )
    fake_linears.write_activation_scales(tmp_path, scales)
    again = small()
    qat.attach(again, "nvfp4-a4")
    prepare.set_activation_scales(again, fake_linears.read_activation_scales(tmp_path))
    assert torch.equal(again.model.layers[1].mlp.down_proj.input_global_scale, linear.input_global_scale)
    with pytest.raises(BadInput, match="do not fit the model"):
        prepare.set_activation_scales(again, {"model.layers.9.mlp.down_proj": 1.0})
    assert fake_linears.read_activation_scales(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["int8", "nvfp4-a16", "mxfp4"])
def test_nan_and_infinity_are_reported_by_name_before_and_during_training(name, value):
    model = small()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] = value
    with pytest.raises(BadInput, match=r"model\.layers\.1\.self_attn\.k_proj holds NaN or infinity"):
        qat.attach(model, name)
    model = attached(name)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = value
        with pytest.raises(QrlError, match=r"model\.layers\.0\.mlp\.up_proj holds NaN or infinity"):
            model(**batch())


def test_what_cannot_be_trained_is_refused_in_a_sentence():
    with pytest.raises(
        BadInput, match=r"model\.layers\.0\.mlp\.down_proj has 320 inputs, which groups of 128 do not divide"
    ):
        qat.attach(small(width=320), "int4")
    experts = MixtralForCausalLM(MixtralConfig(intermediate_size=64, num_local_experts=2, **SHAPE))
    with pytest.raises(BadInput, match="mixtral is a mixture of experts"):
        qat.attach(experts, "int8")
    mamba = MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=64, state_size=4))
    with pytest.raises(BadInput, match="mamba has Mamba layers"):
        qat.attach(mamba, "int8")
    narrow = small()
    narrow.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        narrow.model.layers[0].mlp.up_proj.weight.to(torch.float8_e4m3fn), requires_grad=False
    )
    with pytest.raises(BadInput, match="masters of at least 16 bits"):
        qat.attach(narrow, "int8")


def test_masters_are_saved_as_an_ordinary_checkpoint(tmp_path):
    model = attached("int4")
    step(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(again) is Qwen2ForCausalLM and type(again.model.layers[0].mlp.up_proj) is nn.Linear
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())
