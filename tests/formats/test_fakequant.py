"""Fake quantization by property: every format against its definition in float64, ties, zeros, groups of one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("compressed_tensors")
from compressed_tensors.quantization import QuantizationArgs

from qrl.errors import BadInput
from qrl.formats.fakequant import values as fake

FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # codes 0..7: even ones have an even mantissa
FP8 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
)
FORMATS = [name for name in fake.FORMATS if name != "int8-attention"]  # int8's arithmetic, another scope
REFITTING = ["fp8", "mxfp4"]  # whose scales come out the same from values that are quantized already
FAST = settings(max_examples=25, deadline=None)


def args(name: str) -> QuantizationArgs:
    return fake.scheme(name).weights


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The nearest point of a grid of magnitudes, ties to the even code."""
    above = np.clip(np.searchsorted(grid, np.abs(values)), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    up = (np.abs(values) - low > high - np.abs(values)) | (
        (np.abs(values) - low == high - np.abs(values)) & (above % 2 == 0)
    )
    return np.copysign(np.where(up, high, low), values)


def reference(weight: torch.Tensor, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A format's values, and what its codes are multiplied by, in float64 from the definition."""
    bits, size = {"int8": (8, None), "int4": (4, 128), "fp8": (8, None), "mxfp4": (4, 32)}.get(name, (4, 16))
    exact = weight.double().numpy()
    groups = exact.reshape(len(exact), -1, size or exact.shape[1])
    largest = np.abs(groups).max(-1, keepdims=True)
    if name.startswith("int"):
        scale = largest / ((2**bits - 1) / 2)
        codes = np.clip(
            np.rint(np.divide(groups, scale, where=scale > 0, out=np.zeros_like(groups))),
            -(2 ** (bits - 1)),
            2 ** (bits - 1) - 1,
        )
        return (codes * scale).reshape(exact.shape), np.broadcast_to(scale, groups.shape).reshape(exact.shape)
    if name == "fp8":
        scale = largest / 448
    elif name == "mxfp4":  # the power of two below the largest, one up from 1.75 times it
        scale = np.vectorize(
            lambda x: (
                2.0 ** (math.floor(math.log2(x)) + (x / 2.0 ** math.floor(math.log2(x)) >= 1.75) - 2) if x else 0.0
            )
        )(largest)
    else:
        whole = np.abs(exact).max() / (6 * 448)
        scale = nearest(largest / 6 / whole, FP8) * whole if whole else largest
        scale = np.where(
            scale == 0, 0.125 * whole, scale
        )  # too small for FP8: what compressed-tensors puts in its place
    grid = FP8 if name == "fp8" else FP4
    codes = nearest(np.divide(groups, scale, where=scale > 0, out=np.zeros_like(groups)), grid)
    return (codes * scale).reshape(exact.shape), np.broadcast_to(scale, groups.shape).reshape(exact.shape)


@st.composite
def matrices(draw, rows=8, columns=256):
    """Weights of any size, some with outliers, some rows of zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(rows, columns, generator=generator) * 2.0 ** draw(st.integers(-12, 6))
    weight[0, draw(st.integers(0, columns - 1))] *= draw(st.sampled_from([1.0, 8.0, 60.0]))
    weight[draw(st.integers(1, rows - 1))] *= draw(st.sampled_from([0.0, 1.0]))
    return weight


@pytest.mark.parametrize("name", FORMATS)
@given(weight=matrices())
@FAST
def test_a_format_agrees_with_its_definition_in_float64(name, weight):
    found = fake.quantized(weight, args(name)).double().numpy()
    wanted, scale = reference(weight, name)
    width = 2.0**-8 if "fp4" in name else 1e-5  # four-bit floats are unpacked to bfloat16
    exact = weight.double().numpy()
    tie = np.abs(np.abs(found - exact) - np.abs(wanted - exact)) <= (2.0**-5 if "fp4" in name else 1e-4) * scale
    assert (np.isclose(found, wanted, rtol=width, atol=0) | tie).all()
    assert (np.isclose(found, wanted, rtol=width, atol=0)).mean() > 0.99  # ties are rare


@pytest.mark.parametrize("name", FORMATS)
@given(weight=matrices())
@FAST
def test_values_that_a_format_holds_stay_and_quantizing_twice_is_quantizing_once(name, weight):
    by = fake.scales(weight, args(name))
    once = fake.values(weight, args(name), by)
    assert torch.equal(fake.values(once, args(name), by), once)
    if name in REFITTING:
        assert torch.equal(fake.quantized(once, args(name)), once)


@given(weight=matrices(), group=st.sampled_from([16, 32, 128, None]))
@FAST
def test_error_falls_as_bits_rise(weight, group):
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    errors = [
        float(
            (
                fake.quantized(weight, QuantizationArgs(num_bits=bits, type="int", symmetric=True, **strategy)) - weight
            ).norm()
        )
        for bits in range(2, 9)
    ]
    assert errors == sorted(errors, reverse=True)


@given(weight=matrices())
@FAST
def test_a_float_of_eight_bits_errs_less_than_one_of_four(weight):
    error = {
        name: float((fake.quantized(weight, args(name)) - weight).norm()) for name in ("fp8", "mxfp4", "nvfp4-a16")
    }
    assert error["fp8"] <= min(error["mxfp4"], error["nvfp4-a16"])


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros_in_a_matrix_and_in_a_group(name):
    assert fake.quantized(torch.zeros(4, 256), args(name)).eq(0).all()
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    weight[1, :128] = 0
    found = fake.quantized(weight, args(name))
    assert found.isfinite().all() and found[1, :128].eq(0).all() and not found[1, 128:].eq(0).all()


def test_ties_go_to_the_even_code():
    whole = torch.zeros(1, 128)
    whole[0, :6] = torch.tensor([7.5, 0.5, 1.5, 2.5, -0.5, -1.5])  # a scale of one: max / 7.5
    assert fake.quantized(whole, args("int4"))[0, 1:6].tolist() == [0, 2, 2, 0, -2]
    blocks = torch.zeros(1, 32)
    blocks[0, :8] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -0.75])  # a scale of one: 2^(2 - 2)
    assert fake.quantized(blocks, args("mxfp4"))[0, :8].tolist() == [4, 0, 1, 1, 2, 2, 4, -1]


@given(weight=matrices(columns=16), bits=st.integers(2, 8))
@FAST
def test_a_group_of_one_element_has_its_own_scale(weight, bits):
    single = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=1)
    found = fake.quantized(weight, single)
    half_a_code = weight.abs() / (
        2**bits - 1
    )  # its value sits between two codes, whatever it is: max / scale is 7.5 in four bits
    assert torch.allclose((found - weight).abs(), half_a_code, rtol=1e-3)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_matrix_of_one_column_keeps_its_values_to_a_hundredth(name):
    weight = torch.tensor([[3.0], [-2.0], [0.0], [1e-3]])
    assert torch.allclose(fake.quantized(weight, args(name)), weight, rtol=0.01)


def test_a_group_that_does_not_divide_is_refused_by_the_layers_name():
    with pytest.raises(
        BadInput, match=r"model\.layers\.0\.mlp\.down_proj has 200 inputs, which groups of 128 do not divide"
    ):
        fake.check_width("model.layers.0.mlp.down_proj", 200, args("int4"))
    fake.check_width("x", 200, args("int8"))


@given(seed=st.integers(0, 2**31), exponent=st.integers(-8, 8))
@FAST
def test_activations_are_scaled_by_token_or_by_block(seed, exponent):
    inputs = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    per_token = fake.activations(inputs, fake.scheme("fp8").input_activations)
    alone = torch.cat(
        [fake.activations(row[None], fake.scheme("fp8").input_activations) for row in inputs.flatten(0, 1)]
    )
    assert torch.equal(per_token.flatten(0, 1), alone)  # a token does not see its neighbours
    assert ((per_token - inputs).abs() <= inputs.abs().amax(-1, keepdim=True) / 16).all()
    blocks = fake.activations(inputs, fake.scheme("nvfp4-a4").input_activations, fake.global_scale(inputs.abs().amax()))
    assert torch.allclose(
        blocks,
        torch.tensor(reference(inputs.flatten(0, 1), "nvfp4-a4")[0]).float().reshape(2, 5, 64),
        rtol=0.02,
        atol=float(inputs.abs().max()) / 6,
    )
    assert blocks.dtype == inputs.dtype and blocks.shape == inputs.shape


def test_an_unknown_format_is_refused():
    with pytest.raises(BadInput, match="There is no format 'int3'"):
        fake.scheme("int3")
