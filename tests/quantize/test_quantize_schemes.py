"""Every scheme that the core environment makes, for real on a CPU: what it stores, how far it moves the model, what it refuses."""

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
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.formats import kind
from qrl.quantize import calibration, error, settings, widths
from qrl.recipe import Quantize

SCHEMES = (names.INT8, *names.COMPRESSED)
# Bits of a code, and of the scales that a group or a row of at least 128 inputs adds to each: a share of the definition.
BITS = {
    "int8": 8,
    "awq-ct": 4,
    "gptq": 4,
    "fp8": 8,
    "nvfp4a16": 4.5,
    "nvfp4": 4.5,
    "w8a16": 8,
    "w8a8": 8,
    "mxfp4a16": 4.25,
}
# Relative squared error of a weight uniform within a step, with room: a grid of 4 bits is 16 × as coarse as one of 8.
WORST = {scheme: 0.02 if bits < 8 else 0.002 for scheme, bits in BITS.items()}
TEXTS = [f"Tom has {i} apples and buys {i + 2} more. How many does he have?" for i in range(8)]


def chosen(scheme: str, **recipe) -> settings.Settings:
    return settings.of(scheme, Quantize(**recipe), 0)


@pytest.fixture(scope="module")
def made(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("schemes")
    return {
        scheme: quantize.run(scheme, tiny_checkpoint, folder / scheme, calibration=TEXTS, probe=TEXTS)
        for scheme in SCHEMES
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_are_counted_from_what_is_stored(made, scheme):
    found = made[scheme]
    assert BITS[scheme] <= found.bits_per_weight < BITS[scheme] + 0.26  # scales, zero points, shapes
    assert found.bits_per_weight < found.bits_per_parameter < 16  # embeddings stay in 16
    assert checkpoint.check(found.path).quantization == names.STORED_AS[scheme]
    assert found.bytes == checkpoint.check(found.path).bytes
    assert (found.calibration_digest is not None) == (scheme in settings.CALIBRATED)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_engine_runs_it_and_stays_near_the_original(made, tiny_checkpoint, scheme):
    model, _ = hf.load(made[scheme].path, "cpu", torch.float32)
    original, _ = hf.load(tiny_checkpoint, "cpu", torch.float32)
    assert {parameter.dtype for name, parameter in model.named_parameters() if name.endswith("proj.weight")} == {
        torch.float32
    }
    weight, stored = (each.model.layers[0].self_attn.q_proj.weight for each in (original, model))
    if scheme != names.AWQ_CT:  # which scales weights, and the norm before them back
        assert 0 < (weight - stored).square().sum() <= WORST[scheme] * weight.square().sum()
    assert len(made[scheme].layer_errors) == 2
    assert 0 < made[scheme].layer_errors[-1] < 0.15
    again = error.between(*(error.states(each, [[5, 6, 7]]) for each in (original, original)))
    assert again == (0.0, 0.0)


def test_eight_bits_move_the_model_less_than_four(made):
    plain = {
        scheme: bits for scheme, bits in BITS.items() if scheme not in settings.CALIBRATED
    }  # which know these texts
    four, eight = (
        [made[scheme].layer_errors[-1] for scheme, bits in plain.items() if (bits >= 8) == many]
        for many in (False, True)
    )
    assert max(eight) < min(four)


def test_rounded_activations_are_rounded_and_said_to_be_simulated(made, tiny_checkpoint):
    said = {scheme: hf.simulated(made[scheme].path, "cpu") for scheme in SCHEMES}
    assert {scheme for scheme, words in said.items() if "in software" in words} == {"fp8", "w8a8", "nvfp4"}
    assert said["int8"] == "activations not rounded to int8" and hf.simulated(tiny_checkpoint, "cpu") == ""
    model, _ = hf.load(made["nvfp4"].path, "cpu", torch.float32)
    layer = model.model.layers[0].mlp.up_proj
    inputs = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    exact = torch.nn.functional.linear(inputs, layer.weight)
    with torch.inference_mode():
        moved = (layer(inputs) - exact).norm() / exact.norm()
    assert 0.01 < moved < 0.3  # a grid of 4 bits, in groups of 16


def test_nvfp4_has_the_weights_of_nvfp4a16_and_ranges_of_activations_beside(made):
    with_ranges, without = (dict(checkpoint.tensors(made[scheme].path)) for scheme in ("nvfp4", "nvfp4a16"))
    assert {name.rpartition(".")[2] for name in set(with_ranges) - set(without)} == {"input_global_scale"}
    assert all(torch.equal(with_ranges[name], tensor) for name, tensor in without.items())
    ranges = {float(tensor) for name, tensor in with_ranges.items() if name.endswith("input_global_scale")}
    assert len(ranges) > 4  # a layer's own, not a constant


def test_bits_groups_and_zero_points_follow_the_recipe_and_nothing_is_printed(tiny_checkpoint, tmp_path, capfd):
    given = chosen("gptq", bits=8, group_size=32, symmetric=False)
    found = quantize.run("gptq", tiny_checkpoint, tmp_path / "out", settings=given, calibration=TEXTS)
    stored = checkpoint.config(found.path)["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (stored["num_bits"], stored["group_size"], stored["symmetric"]) == (8, 32, False)
    assert 8.5 <= found.bits_per_weight < 9  # a scale of 16 bits for 32 weights, and zero points
    assert capfd.readouterr() == ("", "")  # llm-compressor draws two bars a layer


def test_what_groups_do_not_divide_is_refused_and_leaves_nothing(tmp_path, tiny_checkpoint):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    odd = shutil.copytree(tiny_checkpoint, tmp_path / "odd")
    config = Qwen2Config(**{**checkpoint.config(odd), "intermediate_size": 200})
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(odd)
    for scheme, group in (("w8a16", 128), ("awq", 128), ("nvfp4a16", 16), ("mxfp4a16", 32)):
        with pytest.raises(BadInput, match=rf"down_proj has 200 inputs, which groups of {group} do not divide"):
            quantize.run(scheme, odd, tmp_path / "out", calibration=TEXTS)
        assert not (tmp_path / "out").exists()
    (odd / "config.json").write_text((odd / "config.json").read_text().replace("200", "328"))
    with pytest.raises(
        BadInput, match="has 328 inputs"
    ):  # by what it says, before a weight is read: these would not fit
        quantize.run("w8a16", odd, tmp_path / "out")
    (odd / "config.json").write_text((odd / "config.json").read_text().replace("328", "200"))
    quantize.run("w8a8", odd, tmp_path / "out")  # a scale a row: no groups


def test_an_unknown_scheme_and_rollouts_that_awq_cannot_make_are_refused():
    with pytest.raises(BadInput, match=r"no scheme 'int3'.*nf4, int8, awq, awq-ct, gptq, fp8"):
        chosen("int3")
    with pytest.raises(BadInput, match=r"awq-ct, or quantize.calibration=task"):
        chosen("awq", calibration="rollouts")


def test_what_a_scheme_does_not_heed_is_said_and_what_none_heeds_is_refused():
    def unheeded(schemes, *typed, **recipe):
        return settings.unheeded(Quantize(schemes=schemes, **recipe), schemes, typed)

    assert (
        unheeded(("nf4", "int8", "fp8")) == unheeded(("awq-ct", "gptq"), "quantize.bits", bits=8, symmetric=True) == []
    )
    assert unheeded(("nf4", "gptq", "awq"), "quantize.bits", bits=8) == [
        "quantize.bits = 8 means nothing to nf4 and awq: gptq alone heeds it."
    ]
    beside = settings.unheeded(
        Quantize(calibration="rollouts"), ("nf4",), ("quantize.calibration",), beside=("rtn-int4", "rtn-nvfp4-a4")
    )
    assert beside == ["quantize.calibration = rollouts means nothing to nf4: rtn-nvfp4-a4 alone heeds it."]
    for field, value in (("bits", 8), ("group_size", 32), ("symmetric", False), ("calibration", "rollouts")):
        for typed in ((), (f"quantize.{field}", "quantize.schemes")):  # a recipe of one's own, or options
            with pytest.raises(
                BadInput,
                match=rf"quantize\.{field} = {value} means nothing to nf4 and fp8.*leave it out, or take a scheme",
            ):
                unheeded(("nf4", "fp8"), *typed, **{field: value})
        assert (
            len(unheeded(("nf4", "fp8"), "quantize.schemes", **{field: value})) == 1
        )  # a recipe for other schemes than were typed


def test_without_llm_compressor_a_sentence_says_what_to_do(monkeypatch, tiny_checkpoint, tmp_path):
    monkeypatch.setitem(sys.modules, "llmcompressor", None)  # as where it is not installed
    with pytest.raises(QrlError, match=r"llm-compressor cannot be imported.*choose nf4 or int8"):
        quantize.run("fp8", tiny_checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_settings_digest_is_what_means_something_to_the_scheme():
    def digest(scheme, questions="q", **recipe):
        return chosen(scheme, **recipe).digest(questions)

    for scheme, same, other in (
        ("nf4", {"group_size": 32, "bits": 8, "calibration_samples": 4}, {"calibration_seed": 1}),
        ("fp8", {"group_size": 32, "symmetric": True}, {"calibration_seed": 1}),
        ("gptq", {"symmetric": True}, {"symmetric": False}),
        ("gptq", {"calibration_seed": 0}, {"bits": 8}),
        ("awq", {"bits": 8}, {"group_size": 32}),
        ("awq-ct", {"symmetric": False}, {"calibration": "rollouts"}),
    ):
        assert digest(scheme, **same) == digest(scheme)
        assert digest(scheme, **other) != digest(scheme)
    assert len({digest(scheme) for scheme in names.QUANTIZED_SCHEMES}) == len(names.QUANTIZED_SCHEMES)
    assert digest("gptq", "other questions") != digest("gptq")
    assert digest("gptq", calibration="a.jsonl") == digest(
        "gptq", calibration="moved/b.jsonl"
    )  # known by what they hold


def test_calibration_files_are_read_or_refused_in_a_sentence(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert calibration.read(file, 3) == TEXTS[:3]
    with pytest.raises(BadInput, match=r"has 8 calibration texts, but 9 were asked for"):
        calibration.read(file, 9)
    with pytest.raises(BadInput, match="cannot be read"):
        calibration.read(tmp_path / "none.jsonl", 1)
    for broken in ('{"question": "?"}', '{"text": ""}', "[]", "{"):
        file.write_text(broken)
        with pytest.raises(BadInput, match="Line 1 of"):
            calibration.read(file, 1)


def cells(**changes) -> pd.DataFrame:
    """Two variants under two schemes, answered alike; changes are column → {(variant, scheme): value}."""
    rows = [
        {"variant": variant, "scheme": scheme, "question": str(i), "correct": i % 2, "engine": "transformers",
         "settings_digest": "" if scheme == "full" else "a"}
        for variant in ("base", "grpo") for scheme in ("full", "gptq") for i in range(4)
    ]  # fmt: skip
    for row in rows:
        for column, values in changes.items():
            row[column] = values.get((row["variant"], row["scheme"]), row.get(column))
    return pd.DataFrame(rows)


def test_cells_that_were_stored_or_asked_differently_are_never_subtracted():
    compare.from_questions(cells())
    for other in ("b", "", None):
        with pytest.raises(BadInput, match="cells of scheme gptq were not stored in the same way"):
            compare.from_questions(cells(settings_digest={("grpo", "gptq"): other}))
    with pytest.raises(BadInput, match=r"different engines \(transformers, vllm\)"):
        compare.from_questions(cells(engine={("base", "full"): "vllm"}))
    versions = {
        (variant, scheme): f"vllm 0.{number}"
        for number, (variant, scheme) in enumerate([("base", "full"), ("grpo", "gptq")])
    }
    with pytest.raises(BadInput, match=r"different engines \(transformers, vllm 0.0, vllm 0.1\)"):
        compare.from_questions(cells(engine=versions))
    both = {(variant, scheme): "vllm 0.1" for variant in ("base", "grpo") for scheme in ("full", "gptq")}
    with pytest.raises(BadInput, match=r"different engines \(vllm 0.1, vllm 0.2\)"):  # kernels change with the version
        compare.from_questions(cells(engine=both | {("grpo", "gptq"): "vllm 0.2"}))
    told = compare.from_questions(cells(engine=both))
    assert "| scheme | engine |" in told.markdown() and told.markdown().count("| vllm 0.1 |") == 2
    assert {entry["engine"] for entry in told.table_json().values()} == {"vllm 0.1"}
    silent = compare.from_questions(cells().drop(columns=["engine", "settings_digest"]))
    assert silent.engine == "" and "engine" not in silent.markdown()


def test_seeds_may_differ_from_each_other_but_not_within_one():
    one, two = cells().assign(seed=0), cells().assign(seed=1).replace({"settings_digest": {"a": "b"}})
    compare.from_questions(pd.concat([one, two]))
    with pytest.raises(BadInput, match="scheme gptq and seed 1 were not stored"):
        compare.from_questions(pd.concat([one, two[two["variant"] != "base"]]))


def test_the_same_settings_twice_give_the_same_weights(made, tiny_checkpoint, tmp_path):
    for scheme in ("gptq", "nvfp4a16"):
        again = quantize.run(scheme, tiny_checkpoint, tmp_path / scheme, calibration=TEXTS, probe=TEXTS)
        assert checkpoint.digest(again.path) == checkpoint.digest(made[scheme].path)
        assert replace(again, path=made[scheme].path, seconds=made[scheme].seconds) == made[scheme]


def test_widths_are_checked_on_every_linear_but_the_head():
    model = torch.nn.ModuleDict({"block": torch.nn.Linear(64, 8), "lm_head": torch.nn.Linear(60, 8)})
    widths.check(model, 32)
    with pytest.raises(BadInput, match=r"block has 64 inputs.*128"):
        widths.check(model, 128)
    with pytest.raises(BadInput, match="no linear layer"):
        widths.check(torch.nn.ModuleDict({"lm_head": torch.nn.Linear(64, 8)}), 32)


def test_a_calibration_file_may_hold_empty_lines_and_whatever_a_string_may_hold(tmp_path):
    file = tmp_path / "texts.jsonl"
    line_end_of_unicode = "one\u2028two\x85three"  # for str.splitlines; JSON and JSONL know "\n" alone
    file.write_text(
        f'\n{json.dumps({"text": line_end_of_unicode}, ensure_ascii=False)}\r\n\n\n{{"text": " "}}\n',
        encoding="utf-8-sig",
    )
    with pytest.raises(BadInput, match=r"Line 5 of .*texts\.jsonl holds no calibration text"):
        calibration.read(file, 1)
    file.write_text(file.read_text(encoding="utf-8").replace('" "', '"four"'), encoding="utf-8")
    assert calibration.read(file, 2) == [line_end_of_unicode, "four"]


@pytest.mark.parametrize("scheme", ["nf4", "gptq", "rtn-int4"])
def test_weights_that_are_no_numbers_are_refused_by_name_and_nothing_is_left(scheme, tiny_checkpoint, tmp_path):
    spoilt = Path(shutil.copytree(tiny_checkpoint, tmp_path / "spoilt"))
    weights = load_file(spoilt / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][3, 5] = float("nan")
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"NaN or infinity in .*model\.layers\.1\.self_attn\.v_proj"):
        quantize.run(scheme, spoilt, tmp_path / "out", calibration=TEXTS, probe=TEXTS)
    assert not (tmp_path / "out").exists()


def test_infinity_is_refused_where_no_text_comes_by(tiny_checkpoint, tmp_path):
    spoilt = Path(shutil.copytree(tiny_checkpoint, tmp_path / "spoilt"))
    weights = load_file(spoilt / "model.safetensors")
    weights["model.embed_tokens.weight"][-1, 0] = float("inf")  # of a token that no text of the probe holds
    save_file(weights, spoilt / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"NaN or infinity in model\.embed_tokens\.weight"):
        quantize.run("nf4", spoilt, tmp_path / "out", probe=TEXTS)
    assert not (tmp_path / "out").exists()


def test_what_would_stay_in_full_precision_unseen_is_refused_by_every_scheme(tmp_path):
    from transformers import GPT2Config, MambaConfig, MixtralConfig

    sizes = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
    unfit = {  # fp8 of GPT-2 stored not one matrix in few bits, and called the checkpoint fp8
        "mixtral is a mixture of experts": (
            MixtralConfig(**sizes, **heads, num_local_experts=2),
            ("nf4", "int8", "fp8", "awq-ct", "awq", "rtn-int8"),
        ),
        "mamba has Mamba layers": (MambaConfig(**sizes, state_size=4), ("nf4", "w8a8", "w8a16", "rtn-fp8")),
        "lies in a Conv1D": (GPT2Config(vocab_size=64, n_embd=128, n_layer=1, n_head=2), ("fp8", "gptq", "rtn-int4")),
    }
    for words, (config, schemes) in unfit.items():
        config.save_pretrained(tmp_path)
        for scheme in schemes:
            with pytest.raises(BadInput, match=words):
                quantize.check_fit(tmp_path, chosen(scheme))
    quantize.check_fit(tmp_path, chosen("nf4"))  # bitsandbytes knows GPT-2's


def test_what_a_checkpoint_says_of_its_codes_is_what_its_scheme_may_hold(made):
    for scheme, found in made.items():
        said = kind.of(checkpoint.config(found.path)["quantization_config"])
        assert len(said) == 1 and said <= set(kind.KINDS[scheme])
        assert f"{min(BITS[scheme] // 4 * 4, 8):.0f}-bit" in min(said)
    assert set(kind.KINDS) == set(names.QUANTIZED_SCHEMES)
