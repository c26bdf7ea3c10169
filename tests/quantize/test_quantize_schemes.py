"""Every scheme of the core environment on a CPU: its bits and error, its settings, and the inputs that it refuses."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from qrl import checkpoint, compare, names, quantize
from qrl.diagnose.schemes import measure as measure_stored
from qrl.engine import hf, pretrained
from qrl.errors import BadInput, QrlError
from qrl.formats import kind, plain
from qrl.quantize import compressed, error, fit, settings
from qrl.recipe import Quantize
from qrl.tasks import rows as task_rows

pytestmark = pytest.mark.process

SCHEMES = (names.INT8, *names.COMPRESSED)
# Bits of a code plus, where the format fixes small groups, the bits that a scale adds to each code.
BITS = {
    "int8": 8,
    "awq-ct": 4,
    "gptq": 4,
    "gptq-int3": 3,
    "gptq-int2": 2,
    "fp8": 8,
    "nvfp4a16": 4.5,
    "nvfp4": 4.5,
    "w8a16": 8,
    "w8a8": 8,
    "mxfp4a16": 4.25,
    "mxfp8": 8.25,
    "fp8-block": 8,
    "w4afp8": 4,
    "autoround": 4,
    "spinquant": 4,
    "fp8-static": 8,
    "w8a8-static": 8,
}
# Bounds, with a margin, on the relative squared error of weights and on that of the last layer's output; a bit less
# makes steps twice as large, and so squared errors four times.
WORST = {scheme: {2: 0.5, 3: 0.1}.get(bits, 0.02 if bits < 8 else 0.002) for scheme, bits in BITS.items()}
FAR = {scheme: {2: 1.0, 3: 0.3}.get(bits, 0.15) for scheme, bits in BITS.items()}
TEXTS = [f"Tom has {i} apples and buys {i + 2} more. How many does he have?" for i in range(8)]


def chosen(scheme: str, **recipe) -> settings.Settings:
    return settings.settings_of(scheme, Quantize(**recipe), 0)


@pytest.fixture(scope="module")
def made(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("schemes")
    return {
        scheme: quantize.run(scheme, tiny_checkpoint, folder / scheme, calibration=TEXTS, probe=TEXTS)
        for scheme in SCHEMES
    }


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_are_counted_from_what_is_stored(made, scheme):
    result = made[scheme]
    assert BITS[scheme] <= result.bits_per_weight < BITS[scheme] + 0.26  # scales, zero points, shapes
    assert result.bits_per_weight < result.bits_per_parameter < 16  # embeddings stay in 16
    assert checkpoint.check(result.path).quantization == names.STORED_AS[scheme]
    assert result.bytes == checkpoint.check(result.path).bytes
    assert (result.calibration_digest is not None) == (scheme in settings.CALIBRATED)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_engine_runs_it_and_stays_near_the_original(made, tiny_checkpoint, scheme):
    model, _ = hf.load(made[scheme].path, "cpu", torch.float32)
    original, _ = hf.load(tiny_checkpoint, "cpu", torch.float32)
    dtypes = {parameter.dtype for name, parameter in model.named_parameters() if name.endswith("proj.weight")}
    assert dtypes == {torch.float32}
    weight, stored = (each.model.layers[0].self_attn.q_proj.weight for each in (original, model))
    if scheme not in (names.AWQ_CT, names.SPINQUANT):  # these change weights first, and undo it in other layers
        assert 0 < (weight - stored).square().sum() <= WORST[scheme] * weight.square().sum()
    assert len(made[scheme].layer_errors) == 2
    assert 0 < made[scheme].layer_errors[-1] < FAR[scheme]
    assert 0 < made[scheme].logit_error < FAR[scheme]
    again = error.between(*(error.outputs(each, [[5, 6, 7]]) for each in (original, original)))
    assert again == error.Errors((0.0, 0.0), 0.0)


@pytest.mark.slow
def test_eight_bits_move_the_model_less_than_four(made):
    uncalibrated = {scheme: bits for scheme, bits in BITS.items() if scheme not in settings.CALIBRATED}
    errors = {scheme: made[scheme].layer_errors[-1] for scheme in uncalibrated}
    eight, four = (
        [errors[scheme] for scheme, bits in uncalibrated.items() if (bits >= 8) is wide] for wide in (True, False)
    )
    assert max(eight) < min(four)


@pytest.mark.slow
def test_rounded_activations_are_rounded_and_reported_as_simulated(made, tiny_checkpoint):
    reports = {scheme: hf.describe_departure(made[scheme].path, "cpu") for scheme in SCHEMES}
    rounded = {"fp8", "w8a8", "nvfp4", "mxfp8", "fp8-block", "w4afp8", "fp8-static", "w8a8-static"}
    assert {scheme for scheme, words in reports.items() if "in software" in words} == rounded
    assert reports["int8"] == "activations not rounded to int8" and hf.describe_departure(tiny_checkpoint, "cpu") == ""
    # A grid of 4 bits in groups of 16, and e4m3 with scales per group, per group and per token.
    for scheme, (least, most) in {
        "nvfp4": (0.01, 0.3),
        **dict.fromkeys(("mxfp8", "fp8-block", "w4afp8"), (0.01, 0.05)),
    }.items():
        model, _ = hf.load(made[scheme].path, "cpu", torch.float32)
        layer = model.model.layers[0].mlp.up_proj
        inputs = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
        exact = torch.nn.functional.linear(inputs, layer.weight)
        with torch.inference_mode():
            moved = (layer(inputs) - exact).norm() / exact.norm()
        assert least < moved < most


@pytest.mark.slow
def test_nvfp4_has_the_weights_of_nvfp4a16_and_activation_ranges(made):
    with_ranges, without = (dict(checkpoint.tensors(made[scheme].path)) for scheme in ("nvfp4", "nvfp4a16"))
    assert {name.rpartition(".")[2] for name in set(with_ranges) - set(without)} == {"input_global_scale"}
    assert all(torch.equal(with_ranges[name], tensor) for name, tensor in without.items())
    ranges = {float(tensor) for name, tensor in with_ranges.items() if name.endswith("input_global_scale")}
    assert len(ranges) > 4  # one per layer, not a constant


def test_bits_groups_and_zero_points_follow_the_recipe_and_nothing_is_printed(tiny_checkpoint, tmp_path, capfd):
    given = chosen("gptq", bits=8, group_size=32, symmetric=False)
    result = quantize.run("gptq", tiny_checkpoint, tmp_path / "out", settings=given, calibration=TEXTS)
    stored = checkpoint.config(result.path)["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (stored["num_bits"], stored["group_size"], stored["symmetric"]) == (8, 32, False)
    assert 8.5 <= result.bits_per_weight < 9  # a scale of 16 bits for 32 weights, and zero points
    assert capfd.readouterr() == ("", "")  # llm-compressor draws two bars a layer


def test_layers_that_groups_do_not_divide_are_refused_and_nothing_is_written(tmp_path, tiny_checkpoint):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    odd = shutil.copytree(tiny_checkpoint, tmp_path / "odd")
    config = Qwen2Config(**{**checkpoint.config(odd), "intermediate_size": 200})
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(odd)
    groups = {"w8a16": 128, "awq": 128, "nvfp4a16": 16, "mxfp4a16": 32, "mxfp8": 32, "w4afp8": 128, "spinquant": 128}
    for scheme, group in groups.items():
        with pytest.raises(BadInput, match=rf"down_proj has 200 inputs.* {group} "):
            quantize.run(scheme, odd, tmp_path / "out", calibration=TEXTS)
        assert not (tmp_path / "out").exists()
    (odd / "config.json").write_text((odd / "config.json").read_text().replace("200", "328"))
    with pytest.raises(
        BadInput, match="has 328 inputs"
    ):  # from config.json, before weights are read: they would not fit
        quantize.run("w8a16", odd, tmp_path / "out")
    (odd / "config.json").write_text((odd / "config.json").read_text().replace("328", "200"))
    quantize.run("w8a8", odd, tmp_path / "out")  # a scale per row: no groups
    (odd / "config.json").write_text((odd / "config.json").read_text().replace("200", "192"))
    with pytest.raises(
        BadInput, match=r"groups of 128 .*leave w4afp8 out, or choose a scheme"
    ):  # no setting changes the group
        quantize.check_fit(odd, chosen("w4afp8"))


def test_outputs_that_a_block_does_not_divide_are_refused(tiny_checkpoint, tmp_path):
    config = checkpoint.config(tiny_checkpoint)
    narrow = config | {"head_dim": 32, "num_key_value_heads": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(narrow))
    with pytest.raises(BadInput, match=r"k_proj has 64 outputs.* 128"):
        quantize.check_fit(tmp_path, chosen("fp8-block"))
    quantize.check_fit(tmp_path, chosen("fp8"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_spinquant_keeps_the_model_and_its_matrices_can_be_turned_back(family, tiny_checkpoint, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 384, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads)).to(torch.bfloat16)
    for name, tensor in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # else ones and zeros, which would hide what is not fused
            tensor.data.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(source)
    result = quantize.run("spinquant", source, tmp_path / "out", probe=TEXTS)
    nearest = quantize.run("rtn-int4", source, tmp_path / "nearest", probe=TEXTS)
    assert all(0 < turned < 2 * plain for turned, plain in zip(result.layer_errors, nearest.layer_errors, strict=True))
    plain.write(result.path, tmp_path / "plain")
    rotated = pretrained.load(source, dtype=torch.float32)
    with compressed._oneshot_on("cpu") as oneshot:
        oneshot(model=rotated, recipe=compressed._recipe(chosen("spinquant", group_size=128), rotated)[:1])
    models = [hf.load(path, "cpu", torch.float32)[0] for path in (source, result.path, tmp_path / "plain")]
    with torch.inference_mode():
        logits = [each(torch.arange(5, 69)[None]).logits for each in (*models, rotated)]
    original, quantized, unpacked, only_rotated = logits
    assert torch.allclose(only_rotated, original, atol=1e-3)
    assert (quantized - original).square().sum() < 0.2 * original.square().sum()
    assert torch.allclose(quantized, unpacked, atol=1e-4)
    frame = measure_stored({"base": source}, {"base": result.path}, "spinquant")
    assert len(frame) == 14 and frame["relative_mse"].max() < 0.02  # of four bits, as without rotation


def test_models_that_spinquant_would_spoil_are_refused(tmp_path):
    from transformers import Gemma2Config, LlamaConfig

    sizes = {"hidden_size": 384, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=64).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=r"qwen3.* not gemma2.* gptq"):
        quantize.check_fit(tmp_path, chosen("spinquant"))
    LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)  # heads of 96
    with pytest.raises(BadInput, match=r"heads .* 96.* gptq"):
        quantize.check_fit(tmp_path, chosen("spinquant"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_to_nearest_keeps_what_it_does_not_quantize_in_the_base_s_dtype(dtype, tiny_checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint, source)
    for name in checkpoint.shards(source):
        tensors = load_file(source / name)
        save_file({key: tensor.to(getattr(torch, dtype)) for key, tensor in tensors.items()}, source / name)
    result = quantize.run("rtn-int8", source, tmp_path / "out")
    originals = dict(checkpoint.tensors(source))
    kept = [name for name in checkpoint.entries(result.path) if name in originals]
    assert any("embed_tokens" in name for name in kept) and any("norm" in name for name in kept)
    for name, tensor in checkpoint.tensors(result.path, kept):
        if tensor.is_floating_point():
            assert tensor.dtype is getattr(torch, dtype), name
            assert torch.equal(tensor, originals[name]), name
    assert json.loads((result.path / "config.json").read_text())["dtype"] == dtype


@pytest.mark.slow
def test_autoround_stays_nearer_than_rounding_to_nearest(made, tiny_checkpoint, tmp_path):
    nearest = quantize.run("rtn-int4", tiny_checkpoint, tmp_path / "out", probe=TEXTS)
    assert made["autoround"].layer_errors[-1] < nearest.layer_errors[-1]  # on the texts that it was fitted to


def test_an_unknown_scheme_and_rollouts_that_awq_cannot_make_are_refused():
    with pytest.raises(BadInput, match=r"'int3'.*nf4, int8, awq, awq-ct, gptq, fp8"):
        chosen("int3")
    with pytest.raises(BadInput, match=r"awq-ct, or quantize.calibration=task"):
        chosen("awq", calibration="rollouts")


def test_a_setting_that_a_scheme_ignores_is_reported_and_one_that_all_ignore_is_refused():
    def unheeded(schemes, *typed, **recipe):
        return settings.unheeded(Quantize(schemes=schemes, **recipe), schemes, typed)

    assert unheeded(("nf4", "int8", "fp8")) == []
    assert unheeded(("awq-ct", "gptq"), "quantize.bits", bits=8, symmetric=True) == []
    (warning,) = unheeded(("nf4", "gptq", "awq"), "quantize.bits", bits=8)
    assert warning == "quantize.bits = 8 is for gptq; nf4 and awq have no such setting."
    for schemes, said in (
        (("nf4", "gptq", "gptq-int3"), "gptq and gptq-int3"),
        (("nf4", "gptq"), "gptq"),
        (("nf4", "gptq", "rtn-int4", "rtn-int2"), "gptq, rtn-int4 and rtn-int2"),
    ):
        assert unheeded(schemes, group_size=64) == [f"quantize.group_size = 64 is for {said}; nf4 has no such setting."]
    (warning,) = unheeded(("nvfp4", "gptq"), group_size=64)
    assert warning == "quantize.group_size = 64 is for gptq; nvfp4 (always groups of 16) has no such setting."
    assert unheeded(("nf4",), group_size="auto") == []
    (warning,) = settings.unheeded(Quantize(group_size=64), ("nf4",), (), qat="int4")  # training has such groups too
    assert warning == "quantize.group_size = 64 is for train.qat=int4; nf4 has no such setting."
    rollouts, added = Quantize(calibration="rollouts"), ("rtn-int4", "rtn-nvfp4-a4")
    (warning,) = settings.unheeded(rollouts, ("nf4",), ("quantize.calibration",), beside=added)
    assert warning == "quantize.calibration = rollouts is for rtn-nvfp4-a4; nf4 has no such setting."
    for field, value in (("bits", 8), ("group_size", 32), ("symmetric", False), ("calibration", "rollouts")):
        for typed in ((), (f"quantize.{field}", "quantize.schemes")):  # set in the user's recipe, or as an option
            with pytest.raises(BadInput, match=rf"quantize\.{field} = {value} .* nf4, fp8: .* \(.*awq-ct"):
                unheeded(("nf4", "fp8"), *typed, **{field: value})
        # A recipe made for other schemes than the ones that were typed.
        assert len(unheeded(("nf4", "fp8"), "quantize.schemes", **{field: value})) == 1


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("int4", "gptq awq nf4"),
        ("INT4", "gptq awq nf4"),
        ("w4a16", "gptq awq nf4"),
        ("bnb-4bit", "gptq awq nf4"),
        ("q4_k_m", "gptq awq nf4"),
        ("8bit", "int8 fp8 w8a8"),
        ("int3", "gptq-int3"),
        ("gptq_int3", "gptq-int3"),
        ("fp4", "nvfp4a16 nvfp4 mxfp4a16"),
        ("fp8-dynamic", "fp8"),
        ("gtpq", "gptq"),
        ("nf-4", "nf4"),
        ("something", ""),
    ],
)
def test_an_unknown_scheme_suggests_those_that_may_be_meant(word, meant):
    assert names.similar_schemes(word) == tuple(meant.split())
    with pytest.raises(BadInput, match=f"no scheme '{word}'") as refused:
        settings.settings_of(word, Quantize(), 0)
    assert all(f"'{scheme}'" in str(refused.value).partition(":")[0] for scheme in meant.split())


@pytest.mark.parametrize("scheme", ["rtn-int4", "w8a16", "gptq"])
def test_llm_compressor_computes_on_the_chosen_device_even_where_there_is_a_gpu(
    scheme, tiny_checkpoint, tmp_path, monkeypatch
):
    from llmcompressor.pipelines.data_free import pipeline as data_free
    from llmcompressor.pipelines.sequential import pipeline as sequential

    used = []

    def set_onload_device(model, device):
        used.append(str(device))
        return on_cpu(model, torch.device("cpu"))

    on_cpu = data_free.set_onload_device
    for pipeline in (data_free, sequential):
        monkeypatch.setattr(pipeline, "get_main_device", lambda: torch.device("cuda", 0))  # as on a machine with a GPU
        monkeypatch.setattr(pipeline, "set_onload_device", set_onload_device)
    result = quantize.run(scheme, tiny_checkpoint, tmp_path / "cpu", calibration=TEXTS, device="cpu")
    assert set(used) == {"cpu"}
    assert data_free.get_main_device().type == sequential.get_main_device().type == "cuda"  # restored
    if scheme != "gptq":  # which computes on the device that the pipeline names
        used.clear()
        again = quantize.run(scheme, tiny_checkpoint, tmp_path / "cuda", calibration=TEXTS, device="cuda")
        assert set(used) == {"cuda:0"} and checkpoint.digest(again.path) == checkpoint.digest(result.path)


def test_a_missing_llm_compressor_is_an_error_with_advice(monkeypatch, tiny_checkpoint, tmp_path):
    monkeypatch.setitem(sys.modules, "llmcompressor", None)  # as where it is not installed
    with pytest.raises(QrlError, match=r"llm-compressor.*nf4 or int8"):
        quantize.run("fp8", tiny_checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_settings_digest_covers_exactly_the_settings_that_the_scheme_uses(tmp_path):
    def digest(scheme, questions="q", **recipe):
        return chosen(scheme, **recipe).with_groups(128).digest(questions)

    for scheme, same, other in (
        ("nf4", {"group_size": 32, "bits": 8, "calibration_samples": 4}, {"calibration_seed": 1}),
        ("fp8", {"group_size": 32, "symmetric": True}, {"calibration_seed": 1}),
        ("gptq", {"symmetric": True}, {"symmetric": False}),
        ("gptq", {"calibration_seed": 0}, {"bits": 8}),
        ("awq", {"bits": 8}, {"group_size": 32}),
        ("awq", {"group_size": 128}, {"group_size": 64}),
        ("rtn-int4", {"group_size": 128}, {"group_size": 64}),
        ("awq-ct", {"symmetric": False}, {"calibration": "rollouts"}),
    ):
        assert digest(scheme, **same) == digest(scheme)
        assert digest(scheme, **other) != digest(scheme)
    (tmp_path / "own.yaml").write_text("weights: {num_bits: 4, type: int, symmetric: true, strategy: channel}")
    digests = {digest(scheme) for scheme in names.QUANTIZED_SCHEMES if scheme != names.RTN_FILE}
    digests.add(digest(names.RTN_FILE, format=str(tmp_path / "own.yaml")))
    assert len(digests) == len(names.QUANTIZED_SCHEMES)
    assert digest("gptq", "other questions") != digest("gptq")
    with pytest.raises(ValueError, match="no model has decided the group size"):
        chosen("gptq").digest("q")
    moved = digest("gptq", calibration="moved/b.jsonl")  # files are identified by their content
    assert digest("gptq", calibration="a.jsonl") == moved


def test_calibration_files_are_read_or_refused(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert task_rows.calibration_texts(file, 3) == TEXTS[:3]
    with pytest.raises(BadInput, match=r"8 calibration texts.* 9\b.*"):
        task_rows.calibration_texts(file, 9)
    with pytest.raises(BadInput, match="cannot be read"):
        task_rows.calibration_texts(tmp_path / "none.jsonl", 1)
    for broken in ('{"question": "?"}', '{"text": ""}', "[]", "{"):
        file.write_text(broken)
        with pytest.raises(BadInput, match="line 1 "):
            task_rows.calibration_texts(file, 1)


def cells(**changes) -> pd.DataFrame:
    """Return two variants under two schemes with equal answers; changes are column → {(variant, scheme): value}."""
    rows = [
        {"variant": variant, "scheme": scheme, "question": str(i), "correct": i % 2, "engine": "transformers",
         "settings_digest": "" if scheme == "full" else "a"}
        for variant in ("base", "grpo") for scheme in ("full", "gptq") for i in range(4)
    ]  # fmt: skip
    for row in rows:
        for column, values in changes.items():
            row[column] = values.get((row["variant"], row["scheme"]), row.get(column))
    return pd.DataFrame(rows)


def test_cells_with_different_settings_or_engines_are_never_subtracted():
    compare.from_questions(cells())
    for other in ("b", "", None):
        with pytest.raises(BadInput, match="gptq"):
            compare.from_questions(cells(settings_digest={("grpo", "gptq"): other}))
    with pytest.raises(BadInput, match=r"engines \(transformers, vllm\)"):
        compare.from_questions(cells(engine={("base", "full"): "vllm"}))
    versions = {
        (variant, scheme): f"vllm 0.{number}"
        for number, (variant, scheme) in enumerate([("base", "full"), ("grpo", "gptq")])
    }
    with pytest.raises(BadInput, match=r"engines \(transformers, vllm 0.0, vllm 0.1\)"):
        compare.from_questions(cells(engine=versions))
    both = {(variant, scheme): "vllm 0.1" for variant in ("base", "grpo") for scheme in ("full", "gptq")}
    with pytest.raises(BadInput, match=r"engines \(vllm 0.1, vllm 0.2\)"):  # kernels change with the version
        compare.from_questions(cells(engine=both | {("grpo", "gptq"): "vllm 0.2"}))
    comparison = compare.from_questions(cells(engine=both))
    assert "| scheme | engine |" in comparison.markdown() and comparison.markdown().count("| vllm 0.1 |") == 2
    assert {entry["engine"] for entry in comparison.table_json().values()} == {"vllm 0.1"}
    unnamed = compare.from_questions(cells().drop(columns=["engine", "settings_digest"]))
    assert unnamed.engine == "" and "engine" not in unnamed.markdown()


def test_seeds_may_differ_from_each_other_but_not_within_one():
    one, two = cells().assign(seed=0), cells().assign(seed=1).replace({"settings_digest": {"a": "b"}})
    compare.from_questions(pd.concat([one, two]))
    with pytest.raises(BadInput, match="gptq and seed 1"):
        compare.from_questions(pd.concat([one, two[two["variant"] != "base"]]))


@pytest.mark.slow
def test_the_same_settings_twice_give_the_same_weights(made, tiny_checkpoint, tmp_path):
    for scheme in ("gptq", "nvfp4a16", "autoround", "spinquant"):
        again = quantize.run(scheme, tiny_checkpoint, tmp_path / scheme, calibration=TEXTS, probe=TEXTS)
        assert checkpoint.digest(again.path) == checkpoint.digest(made[scheme].path)
        assert replace(again, path=made[scheme].path, seconds=made[scheme].seconds) == made[scheme]


def test_widths_are_checked_on_every_linear_but_the_head():
    model = torch.nn.ModuleDict({"block": torch.nn.Linear(64, 8), "lm_head": torch.nn.Linear(60, 8)})
    fit.check_widths(model, 32)
    with pytest.raises(BadInput, match=r"block has 64 inputs.*128"):
        fit.check_widths(model, 128)
    with pytest.raises(BadInput, match="no linear layer"):
        fit.check_widths(torch.nn.ModuleDict({"lm_head": torch.nn.Linear(64, 8)}), 32)


def test_a_calibration_file_may_hold_empty_lines_and_any_string(tmp_path):
    file = tmp_path / "texts.jsonl"
    line_end_of_unicode = "one\u2028two\x85three"  # for str.splitlines; in JSONL only "\n" ends a line
    file.write_text(
        f'\n{json.dumps({"text": line_end_of_unicode}, ensure_ascii=False)}\r\n\n\n{{"text": " "}}\n',
        encoding="utf-8-sig",
    )
    with pytest.raises(BadInput, match=r"texts\.jsonl, line 5 "):
        task_rows.calibration_texts(file, 1)
    file.write_text(file.read_text(encoding="utf-8").replace('" "', '"four"'), encoding="utf-8")
    assert task_rows.calibration_texts(file, 2) == [line_end_of_unicode, "four"]


@pytest.mark.parametrize("scheme", ["nf4", "gptq", "rtn-int4"])
def test_nan_in_weights_is_refused_by_name_and_nothing_is_written(scheme, tiny_checkpoint, tmp_path):
    spoilt = Path(shutil.copytree(tiny_checkpoint, tmp_path / "spoilt"))
    weights = load_file(spoilt / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][3, 5] = float("nan")
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"NaN or infinity in .*model\.layers\.1\.self_attn\.v_proj"):
        quantize.run(scheme, spoilt, tmp_path / "out", calibration=TEXTS, probe=TEXTS)
    assert not (tmp_path / "out").exists()


def test_infinity_is_refused_where_no_text_would_meet_it(tiny_checkpoint, tmp_path):
    spoilt = Path(shutil.copytree(tiny_checkpoint, tmp_path / "spoilt"))
    weights = load_file(spoilt / "model.safetensors")
    weights["model.embed_tokens.weight"][-1, 0] = float("inf")  # of a token that no text of the probe holds
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"NaN or infinity in model\.embed_tokens\.weight"):
        quantize.run("nf4", spoilt, tmp_path / "out", probe=TEXTS)
    assert not (tmp_path / "out").exists()


def test_matrices_that_would_silently_stay_in_full_precision_are_refused_by_every_scheme(tmp_path):
    from transformers import GPT2Config, MambaConfig, MixtralConfig

    sizes = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
    unfit = {  # fp8 of GPT-2 once stored no matrix in few bits and called the checkpoint fp8
        "mixtral is a mixture of experts": (
            MixtralConfig(**sizes, **heads, num_local_experts=2),
            ("nf4", "int8", "fp8", "awq-ct", "awq", "rtn-int8"),
        ),
        "mamba has Mamba layers": (MambaConfig(**sizes, state_size=4), ("nf4", "w8a8", "w8a16", "rtn-fp8")),
        "in a Conv1D": (GPT2Config(vocab_size=64, n_embd=128, n_layer=1, n_head=2), ("fp8", "gptq", "rtn-int4")),
    }
    for words, (config, schemes) in unfit.items():
        config.save_pretrained(tmp_path)
        for scheme in schemes:
            with pytest.raises(BadInput, match=words):
                quantize.check_fit(tmp_path, chosen(scheme))
    quantize.check_fit(tmp_path, chosen("nf4"))  # bitsandbytes quantizes GPT-2's


@pytest.mark.slow
def test_the_kind_of_codes_in_a_config_is_one_that_the_scheme_may_hold(made):
    for scheme, result in made.items():
        kinds = kind.of(checkpoint.config(result.path)["quantization_config"])
        assert len(kinds) == 1 and kinds <= set(kind.KINDS[scheme])
        assert f"{min(int(BITS[scheme]), 8)}-bit" in min(kinds)
    assert set(kind.KINDS) == set(names.QUANTIZED_SCHEMES)
