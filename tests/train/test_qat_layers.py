"""Training that rounds some linears and not others, or in several formats: what it computes with, stores and sends."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qrl import checkpoint, names, quantize, tasks, tiny
from qrl.engine import hf
from qrl.errors import BadInput
from qrl.formats import layers
from qrl.formats import stored as matrices
from qrl.formats.fakequant import linears, operation
from qrl.quantize import settings as choices
from qrl.recipe import Quantize, Recipe, Rollout, Train, rules
from qrl.tracking import keys
from qrl.train import Job, grpo
from qrl.train.qat import linear, prepare
from qrl.train.qat.fold import folds, refold
from qrl.train.rollout import checks, codes, sync

pytestmark = pytest.mark.process

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
INNER_MLP = ("mlp", "-first:2", "-last:2")
PLANS = {
    "inner mlp": ("nvfp4-a16", INNER_MLP),
    "inner mlp, rounded inputs": ("nvfp4-a4", INNER_MLP),
    "several formats": ("nvfp4-a4", ("attention=fp8", "down_proj=int8", "-first:1")),
    "groups": ("fp8", ("mlp=int4", "-last:1")),
}


@pytest.fixture(scope="module")
def masters(tiny_checkpoint, tmp_path_factory):
    """Return a float32 checkpoint of six blocks with weights that bfloat16 cannot hold exactly, as after training."""
    folder = tmp_path_factory.mktemp("masters") / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "model.safetensors").unlink()
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 6}
    config = AutoConfig.from_pretrained(tiny_checkpoint, **shape, layer_types=["full_attention"] * 6)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def trained(masters, name, terms):
    """Return a model with a format attached, calibrated where the format needs it."""
    model = AutoModelForCausalLM.from_pretrained(masters, dtype=torch.float32).eval()
    linear.attach(model, name, terms=terms)
    scales = prepare.calibrate(model, [BATCH]) if linears.needs_calibration(name) else {}
    return model, scales


def store(masters, out, name, terms, scales=None):
    source = masters
    if scales:
        source = out.parent / "with-scales"
        shutil.copytree(masters, source)
        linears.write_activation_scales(source, scales)
    recipe = Quantize(calibration_samples=1, calibration_max_tokens=16, layers=terms)
    settings = choices.settings_of(f"{names.ROUNDED_PREFIX}{name}", recipe, 0)
    texts = ["Tom has 3 apples and buys 4 more."] if settings.calibration else ()
    return quantize.run(settings.scheme, source, out, settings=settings, calibration=texts)


@pytest.mark.parametrize("name, terms", PLANS.values(), ids=PLANS)
def test_what_was_trained_is_what_is_stored(masters, tmp_path, name, terms):
    model, scales = trained(masters, name, terms)
    attached = {path: module for path, module in model.named_modules() if isinstance(module, linear.QATLinear)}
    result = store(masters, tmp_path / "out", name, terms, scales)
    stored_names = matrices.names(result.path)
    assert {f"{path}.weight" for path in attached} == set(stored_names)
    loaded, _ = hf.load(result.path, "cpu", torch.float32)
    for path, module in attached.items():
        assert torch.equal(module.effective_weight, loaded.get_submodule(path).weight), path
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, loaded(IDS).logits)
    # Linears that are left out compute with the masters, and are stored as these.
    left_out = layers.plan_of(model, name, terms).left_out
    for path in left_out:
        assert torch.equal(loaded.get_submodule(path).weight, model.get_submodule(path).weight)


def test_only_covered_linears_are_rounded_and_gradients_reach_all(masters):
    model, _ = trained(masters, "nvfp4-a16", INNER_MLP)
    plain = AutoModelForCausalLM.from_pretrained(masters, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = [each(IDS, output_hidden_states=True).hidden_states for each in (model, plain)]
    assert all(torch.equal(*pair) for pair in list(zip(*hidden, strict=True))[:3])  # the embeddings and two blocks
    assert not torch.equal(hidden[0][3], hidden[1][3])
    model(IDS, labels=IDS).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())
    before = {path: module.effective_weight.clone() for path, module in _attached(model).items()}
    torch.optim.SGD(model.parameters(), lr=10.0).step()
    refold(model)
    moved = [
        path for path, value in before.items() if not torch.equal(value, model.get_submodule(path).effective_weight)
    ]
    assert len(before) == 6 and moved


def _attached(model):
    return {path: module for path, module in model.named_modules() if isinstance(module, linear.QATLinear)}


@pytest.mark.slow
def test_a_training_of_inner_mlps_ends_in_a_file_that_computes_as_it_did(tmp_path):
    """GRPO on the shipped model of four blocks: its ends in full precision, the MLP between them in NVFP4."""
    terms = ("mlp", "-first:1", "-last:1")
    questions = tasks.load("arithmetic", "train", 16, 0)
    batches = {"steps": 2, "prompts_per_step": 4, "generations": 4, "micro_batch": 16, "max_completion_tokens": 64}
    settings = Train(**batches, qat="nvfp4-a16", qat_layers=terms, qat_calibration_samples=8)
    data = {"base": tiny.PATH, "questions": questions, "task": "arithmetic", "template": "plain", "seed": 0}
    folders = {"work": tmp_path / "work", "out": tmp_path / "model"}
    done = grpo.run(Job(settings=settings, device="cpu", **data, **folders))

    before, after = dict(checkpoint.tensors(tiny.PATH)), dict(checkpoint.tensors(done.path))
    assert all(not torch.equal(before[name].float(), after[name]) for name in before if "mlp" in name)
    result = store(done.path, tmp_path / "codes", "nvfp4-a16", terms)
    expected = {f"model.layers.{block}.mlp.{leaf}_proj.weight" for block in (1, 2) for leaf in ("gate", "up", "down")}
    assert set(matrices.names(result.path)) == expected
    policy, _ = trained(done.path, "nvfp4-a16", terms)
    loaded, _ = hf.load(result.path, "cpu", torch.float32)
    with torch.inference_mode():
        assert torch.equal(policy(IDS).logits, loaded(IDS).logits)


def test_formats_side_by_side_fold_each_in_its_own(masters):
    model, scales = trained(masters, *PLANS["several formats"])
    formats = {
        path: (fold.scheme.weights.num_bits, fold.scheme.weights.type) for fold in folds(model) for path in fold.members
    }
    assert formats["model.layers.1.mlp.up_proj"] == (4, "float")
    assert formats["model.layers.1.mlp.down_proj"] == (8, "int")
    assert formats["model.layers.1.self_attn.q_proj"] == (8, "float")
    assert "model.layers.0.mlp.up_proj" not in formats
    # Only NVFP4's inputs have a calibrated scale; one that is missing, or of another linear, is refused.
    assert set(scales) == {f"model.layers.{block}.mlp.{leaf}_proj" for block in range(1, 6) for leaf in ("gate", "up")}
    with pytest.raises(BadInput, match="in only one"):
        prepare.set_activation_scales(model, scales | {"model.layers.1.mlp.down_proj": 1.0})


def test_masters_of_other_layers_are_not_stored_as_if_they_were_trained(masters, tmp_path):
    _, scales = trained(masters, *PLANS["inner mlp, rounded inputs"])
    with pytest.raises(BadInput, match=r"other linears in few bits than quantize\.layers"):
        store(masters, tmp_path / "out", "nvfp4-a4", ("mlp",), scales)
    assert not (tmp_path / "out").exists()


def test_a_rollout_engine_is_sent_what_training_computes_with(masters):
    model, _ = trained(masters, "nvfp4-a16", INNER_MLP)
    original = dict(checkpoint.tensors(masters))
    sent = dict(sync.named_weights(model))
    rounded = {name for name, weight in sent.items() if not torch.equal(weight, original[name])}
    assert rounded == {f"{path}.weight" for path in _attached(model)}
    parts = dict(codes.named_codes(model, torch.bfloat16))
    packed = {name.rpartition(".")[0] for name in parts if name.endswith(".weight_packed")}
    assert packed == set(_attached(model))


def test_an_engine_with_codes_knows_which_linears_have_them(masters, tmp_path):
    config = codes.engine_config(masters, "nvfp4-a16", terms=INNER_MLP)
    stored = store(masters, tmp_path / "out", "nvfp4-a16", INNER_MLP)
    written = checkpoint.config(stored.path)["quantization_config"]
    assert layers.stored_plan(config).formats.keys() == layers.stored_plan(written).formats.keys()
    assert set(config["ignore"]) == set(written["ignore"]) and "lm_head" in config["ignore"]
    assert config["format"] == written["format"] == "nvfp4-pack-quantized"
    mixed = codes.engine_config(masters, "int4", terms=("mlp=fp8",))
    assert mixed["format"] == "mixed-precision" and len(mixed["config_groups"]) == 2
    whole = codes.engine_config(masters, "int4")
    assert whole["config_groups"]["group_0"]["targets"] == ["Linear"] and whole["ignore"] == ["lm_head"]


def test_an_engine_that_simulates_rounds_the_inputs_of_covered_linears_alone(masters):
    from qrl.engine import pretrained

    plan = layers.plan_of(pretrained.skeleton(checkpoint.config(masters)), "fp8", ("mlp=int4", "-first:2"))
    config = operation.engine_config("fp8", plan.formats)
    rounded = {f"model.layers.{block}.self_attn.{leaf}_proj" for block in range(2, 6) for leaf in "qkvo"}
    assert set(config["linears"]) == rounded and "input_activations" not in config
    assert set(config["linears"].values()) == {operation.engine_config("fp8")["input_activations"]}
    json.dumps(config)
    weights_alone = layers.plan_of(pretrained.skeleton(checkpoint.config(masters)), "int4", ("mlp",))
    assert operation.engine_config("int4", weights_alone.formats) is None


@pytest.mark.parametrize(
    "name, terms, quantization, refused",
    [
        ("fp8", ("-q_proj",), "none", True),  # their inputs would be rounded, and theirs alone
        ("int4", ("-q_proj",), "real", True),
        ("int4", ("-q_proj",), "none", False),  # an engine multiplies by Q(W), whatever its format
        ("int4", ("up_proj=fp8",), "none", True),
        ("fp8", ("attention", "-first:2"), "real", False),
    ],
)
def test_linears_that_an_engine_fuses_must_compute_alike_where_it_matters(masters, name, terms, quantization, refused):
    settings = Rollout(engine="vllm", quantization=quantization)
    train = Train(qat=name, qat_layers=terms)
    if refused:
        with pytest.raises(BadInput, match="fuses them into one linear"):
            checks.check_layers(train, settings, masters)
    else:
        checks.check_layers(train, settings, masters)


def test_layers_are_part_of_the_key_and_of_the_variants_name():
    def key(**train):
        return keys.trained(Recipe(train=Train(qat="nvfp4-a16", **train)), "digest", "cpu")

    assert len({key(), key(qat_layers=("mlp",)), key(qat_layers=INNER_MLP)}) == 3
    assert Train(qat="nvfp4-a16", qat_layers=INNER_MLP).variant == "qat-nvfp4-a16+mlp.no-first2.no-last2"
    groups_of = [
        keys.trained(Recipe(train=Train(qat="fp8", qat_layers=("mlp=int4",))), "d", "cpu", group_size=size)
        for size in (64, 128)
    ]
    assert len(set(groups_of)) == 2


def test_a_term_without_a_linear_is_refused_before_weights_are_read(masters):
    prepare.check(Train(qat="int4", qat_layers=("mlp",)), masters)
    with pytest.raises(BadInput, match=r"train\.qat_layers has 'experts'"):
        prepare.check(Train(qat="int4", qat_layers=("experts",)), masters)


def test_a_server_cannot_round_the_inputs_of_some_linears():
    served = Rollout(engine="vllm", mode="server")
    rules.check_training(Train(qat="int4"), served)
    for train in (Train(qat="fp8", qat_layers=("mlp",)), Train(qat="int4", qat_layers=("mlp=fp8",))):
        recipe = Recipe(train=train, rollout=served, quantize=Quantize(schemes=("gptq",), layers=train.qat_layers))
        with pytest.raises(BadInput, match="one rounding of inputs for all"):
            rules.check(recipe)
    train = Train(qat="int4", qat_layers=("mlp",))
    rules.check(Recipe(train=train, rollout=served, quantize=Quantize(schemes=("gptq",), layers=train.qat_layers)))
