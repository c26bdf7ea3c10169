"""Properties of fake quantization: every format against its definition in float64, ties, zeros, groups of one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("compressed_tensors")
from compressed_tensors.quantization import QuantizationArgs

from qrl import names
from qrl.errors import BadInput
from qrl.formats.fakequant import presets, rounding

FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # codes 0..7; even codes have an even mantissa
FP8 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
)
FORMATS = [name for name in names.FORMATS if name != "int8-attention"]  # as int8, in another scope
REFITTING = ["fp8", "mxfp4"]  # quantized values give the same scales again
FAST = settings(max_examples=25, deadline=None)


def args(name: str) -> QuantizationArgs:
    return rounding.scheme(name).weights


def quantized(weight: torch.Tensor, of: QuantizationArgs) -> torch.Tensor:
    """Return Q(W) of one matrix."""
    return rounding.folded([weight], of)[0][0]


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return the nearest point of a grid of magnitudes, ties to the even code."""
    above = np.clip(np.searchsorted(grid, np.abs(values)), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    to_low, to_high = np.abs(values) - low, high - np.abs(values)
    up = (to_low > to_high) | ((to_low == to_high) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), values)


def power_of_two(x: float) -> float:
    """Return the power of two below x, or the next one if x is at least 1.75 times as large."""
    below = 2.0 ** math.floor(math.log2(x)) if x else 0.0
    return 2 * below if x and x / below >= 1.75 else below


def reference(weight: torch.Tensor, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a format's values and the factor of each code, in float64 from the definition."""
    integers = {f"int{bits}": (bits, 128) for bits in (4, 3, 2)} | {"int8": (8, None)}
    name = name.removesuffix("-a8-static").removesuffix("-static")  # these have the weights of the same format
    bits, size = (integers | {"fp8": (8, None), "mxfp4": (4, 32)}).get(name, (4, 16))
    exact = weight.double().numpy()
    groups = exact.reshape(len(exact), -1, size or exact.shape[1])
    largest = np.abs(groups).max(-1, keepdims=True)
    if name.startswith("int"):
        scale = largest / ((2**bits - 1) / 2)
        ratios = np.divide(groups, scale, where=scale > 0, out=np.zeros_like(groups))
        codes = np.clip(np.rint(ratios), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return (codes * scale).reshape(exact.shape), np.broadcast_to(scale, groups.shape).reshape(exact.shape)
    if name == "fp8":
        scale = largest / 448
    elif name == "mxfp4":
        scale = np.vectorize(power_of_two)(largest) / 4
    else:
        whole = np.abs(exact).max() / (6 * 448)
        scale = nearest(largest / 6 / whole, FP8) * whole if whole else largest
        scale = np.where(scale == 0, 0.125 * whole, scale)  # compressed-tensors' replacement where FP8 gives zero
    grid = FP8 if name == "fp8" else FP4
    codes = nearest(np.divide(groups, scale, where=scale > 0, out=np.zeros_like(groups)), grid)
    return (codes * scale).reshape(exact.shape), np.broadcast_to(scale, groups.shape).reshape(exact.shape)


@st.composite
def matrices(draw, rows=8, columns=256):
    """Draw weights of any magnitude, some with outliers, some with rows of zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(rows, columns, generator=generator) * 2.0 ** draw(st.integers(-12, 6))
    weight[0, draw(st.integers(0, columns - 1))] *= draw(st.sampled_from([1.0, 8.0, 60.0]))
    weight[draw(st.integers(1, rows - 1))] *= draw(st.sampled_from([0.0, 1.0]))
    return weight


@pytest.mark.parametrize("name", FORMATS)
@given(weight=matrices())
@FAST
def test_a_format_agrees_with_its_definition_in_float64(name, weight):
    actual = quantized(weight, args(name)).double().numpy()
    expected, scale = reference(weight, name)
    width = 2.0**-8 if "fp4" in name else 1e-5  # four-bit floats are unpacked to bfloat16
    exact = weight.double().numpy()
    tie = np.abs(np.abs(actual - exact) - np.abs(expected - exact)) <= (2.0**-5 if "fp4" in name else 1e-4) * scale
    assert (np.isclose(actual, expected, rtol=width, atol=0) | tie).all()
    assert (np.isclose(actual, expected, rtol=width, atol=0)).mean() > 0.99  # ties are rare


@pytest.mark.parametrize("name", FORMATS)
@given(weight=matrices())
@FAST
def test_quantized_values_stay_under_the_same_scales_and_in_some_formats_under_new_ones(name, weight):
    (scale,), shared, _ = rounding.scales([weight], args(name))
    once = rounding.values(weight, args(name), scale, shared)
    assert torch.equal(rounding.values(once, args(name), scale, shared), once)
    if name in REFITTING:
        assert torch.equal(quantized(once, args(name)), once)


@given(weight=matrices(), group=st.sampled_from([16, 32, 128, None]))
@FAST
def test_error_falls_as_bits_rise(weight, group):
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    errors = []
    for bits in range(2, 9):
        integers = QuantizationArgs(num_bits=bits, type="int", symmetric=True, **strategy)
        errors.append(float((quantized(weight, integers) - weight).norm()))
    assert errors == sorted(errors, reverse=True)


@given(weight=matrices())
@FAST
def test_eight_bit_floats_err_less_than_four_bit_floats(weight):
    fp8, *fp4 = (float((quantized(weight, args(name)) - weight).norm()) for name in ("fp8", "mxfp4", "nvfp4-a16"))
    assert fp8 <= min(fp4)


@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_or_a_group_of_zeros_stays_zero(name):
    assert quantized(torch.zeros(4, 256), args(name)).eq(0).all()
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    weight[1, :128] = 0
    actual = quantized(weight, args(name))
    assert actual.isfinite().all() and actual[1, :128].eq(0).all() and not actual[1, 128:].eq(0).all()


def test_ties_go_to_the_even_code():
    whole = torch.zeros(1, 128)
    whole[0, :6] = torch.tensor([7.5, 0.5, 1.5, 2.5, -0.5, -1.5])  # a scale of one: max / 7.5
    assert quantized(whole, args("int4"))[0, 1:6].tolist() == [0, 2, 2, 0, -2]
    blocks = torch.zeros(1, 32)
    blocks[0, :8] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -0.75])  # a scale of one: 2^(2 - 2)
    assert quantized(blocks, args("mxfp4"))[0, :8].tolist() == [4, 0, 1, 1, 2, 2, 4, -1]


@given(weight=matrices(columns=16), bits=st.integers(2, 8))
@FAST
def test_a_group_of_one_element_has_its_own_scale(weight, bits):
    single = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=1)
    actual = quantized(weight, single)
    half_a_code = weight.abs() / (2**bits - 1)  # every value is half-way between two codes: 7.5 in four bits
    assert torch.allclose((actual - weight).abs(), half_a_code, rtol=1e-3)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_matrix_of_one_column_keeps_its_values_within_one_percent(name):
    weight = torch.tensor([[3.0], [-2.0], [0.0], [1e-3]])
    assert torch.allclose(quantized(weight, args(name)), weight, rtol=0.01)


def test_groups_that_do_not_divide_a_layer_are_refused_with_its_name():
    with pytest.raises(BadInput, match=r"model\.layers\.0\.mlp\.down_proj has 200 inputs.* 128"):
        rounding.check_width("model.layers.0.mlp.down_proj", torch.nn.Linear(200, 8), args("int4"))
    rounding.check_width("x", torch.nn.Linear(200, 8), args("int8"))
    blocks = args("int8").model_copy(update={"strategy": "block", "block_structure": [128, 64]})
    rounding.check_width("x", torch.nn.Linear(64, 128), blocks)
    with pytest.raises(BadInput, match="Layer x is 64 × 128, which blocks of 128 × 64 do not divide"):
        rounding.check_width("x", torch.nn.Linear(128, 64), blocks)


@given(seed=st.integers(0, 2**31), exponent=st.integers(-8, 8))
@FAST
def test_activations_are_scaled_by_token_or_by_block(seed, exponent):
    inputs = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    fp8, nvfp4 = (rounding.scheme(name).input_activations for name in ("fp8", "nvfp4-a4"))
    per_token = rounding.activations(inputs, fp8)
    alone = torch.cat([rounding.activations(row[None], fp8) for row in inputs.flatten(0, 1)])
    assert torch.equal(per_token.flatten(0, 1), alone)  # a token's result does not depend on its neighbours
    assert ((per_token - inputs).abs() <= inputs.abs().amax(-1, keepdim=True) / 16).all()
    blocks = rounding.activations(inputs, nvfp4, rounding.global_scale(inputs.abs().amax()))
    expected = torch.tensor(reference(inputs.flatten(0, 1), "nvfp4-a4")[0]).float().reshape(2, 5, 64)
    assert torch.allclose(blocks, expected, rtol=0.02, atol=float(inputs.abs().max()) / 6)
    assert blocks.dtype == inputs.dtype and blocks.shape == inputs.shape


def test_an_unknown_format_is_refused():
    with pytest.raises(BadInput, match="int5"):
        rounding.scheme("int5")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fp8-static", "int8-a8-static"])
def test_a_static_scale_rounds_as_compressed_tensors_does_bit_for_bit_and_clips_beyond_it(name, dtype):
    inputs_args = rounding.scheme(name).input_activations
    inputs = 4 * torch.randn(37, 96, generator=torch.Generator().manual_seed(0))
    scale = rounding.calibrated_scale(inputs.abs().amax() / 2, inputs_args)  # half of the range lies beyond
    end = 448 if name == "fp8-static" else 127.5
    assert float(scale) == pytest.approx(float(inputs.abs().amax()) / 2 / end, rel=1e-6)
    inputs = inputs.to(dtype)
    found = rounding.activations(inputs.view(1, 37, 96), inputs_args, scale)
    library = presets.library().fake_quantize(inputs, scale.to(dtype), None, inputs_args)
    assert found.dtype == dtype and torch.equal(found[0], library)
    limit = float(scale.to(dtype)) * (448 if name == "fp8-static" else 128)
    assert found.abs().max() <= limit * 1.01 < inputs.abs().max()
    assert (found[0] - inputs).abs().max() > 0.3 * inputs.abs().max()  # what is clipped
