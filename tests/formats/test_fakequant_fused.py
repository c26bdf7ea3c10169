"""Fused fake quantization equals the eager one bit for bit; the kernel itself needs a GPU."""

import pytest
import torch

pytest.importorskip("compressed_tensors")

from qrl import names
from qrl.formats.fakequant import fused, rounding

ROWS = (96, 32)  # of matrices that share a scale, where the format has one
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's kernels need a GPU")
SAME_WEIGHTS = ("int8-attention", "nvfp4-a4")  # round weights as int8 and nvfp4-a16 do
ARITHMETIC = [name for name in names.FORMATS if name not in SAME_WEIGHTS]


def weights(seed: int, spread: float = 0.02, device: str = "cpu", wide: int = 256) -> list[torch.Tensor]:
    """Two ordinary matrices with zeros, a group of zeros, ties and an outlier."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(rows, wide, generator=generator) * spread for rows in ROWS)
    first[3, :128] = 0
    first[4, ::3] = 0
    second[5, 7] = 40 * spread
    second[6] = torch.arange(wide) / wide * spread  # on the steps and half-way between them
    return [first.to(device), second.to(device)]


def assert_equal(actual, expected) -> None:
    for ours, theirs in zip((*actual[0], actual[1]), (*expected[0], expected[1]), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def empty_cache(monkeypatch) -> dict:
    monkeypatch.setattr(fused, "_proven", {})
    return fused._proven


@on_gpu
@pytest.mark.filterwarnings("error")  # fused warns where the kernel differs
@pytest.mark.parametrize(
    "masters, dtype",
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_the_kernels_fold_equals_the_eager_one_bit_for_bit(name, masters, dtype, monkeypatch):
    args, known = rounding.scheme(name).weights, empty_cache(monkeypatch)
    spreads, widths = (0.02, 0.02, 1e-6, 300.0, 1.0, 3e-3), (256, 1536, 8960, 1536, 8960, 256)
    for seed, (spread, wide) in enumerate(zip(spreads, widths, strict=True)):
        matrices = [weight.to(masters) for weight in weights(seed, spread, "cuda", wide)]
        for _ in range(2):  # the first call compares the kernel, the second uses it
            for fold in fused.folded([matrices, matrices[:1]], args, dtype):
                assert_equal(fold, rounding.folded(matrices[: len(fold[0])], args, dtype))
    assert len(known) == 6 and all(known.values())


@on_gpu
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["nvfp4-a4", "fp8"])
def test_the_kernels_activations_equal_the_eager_ones_for_any_number_of_tokens(name, dtype, monkeypatch):
    args, known = rounding.scheme(name).input_activations, empty_cache(monkeypatch)
    scale = rounding.global_scale(torch.tensor(12.0, device="cuda")) if name == "nvfp4-a4" else None
    for wide in (256, 1536, 8960):
        for count in (37, 64, 5, 1, 1000):
            inputs = 3 * torch.randn(count, wide, device="cuda", generator=torch.Generator("cuda").manual_seed(count))
            rounded = fused.activations(inputs.unflatten(0, (1, count)), args, scale, dtype)
            assert torch.equal(rounded[0], rounding.activations(inputs.to(dtype), args, scale))
    assert len(known) == 3 and all(known.values())


@on_gpu
@pytest.mark.parametrize("name", ["int4", "nvfp4-a16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_show_up_with_the_kernel_too(name, value):
    args, matrices = rounding.scheme(name).weights, weights(0, device="cuda")
    fused.folded([matrices], args, torch.bfloat16)
    matrices[1][2, 3] = value
    assert fused.folded([matrices], args, torch.bfloat16)[0][1].isfinite().tolist() == [True, False]


def test_largest_weights_and_global_scales_of_many_groups_are_those_of_each():
    groups = [weights(0), weights(1)[:1], [torch.zeros(4, 16)], weights(2, spread=300.0)]
    largest = fused._largest(groups)
    per_channel = rounding.scheme("int8").weights
    assert torch.equal(largest, torch.cat([rounding.scales(group, per_channel)[-1] for group in groups]))
    scales = fused._global_scales(largest, (0, 0, 1, 2, 3, 3))
    maxima = [max(float(weight.abs().max()) for weight in group) for group in groups]
    assert torch.equal(scales, torch.cat([rounding.global_scale(torch.tensor(maximum)) for maximum in maxima]))
    groups[0][1][0, 0] = float("nan")
    assert fused._largest(groups).isfinite().tolist() == [True, False, True, True, True, True]


def test_without_a_kernel_rounding_stays_eager_and_warns(monkeypatch):
    args, matrices = rounding.scheme("int4").weights, weights(0)
    known = empty_cache(monkeypatch)

    def broken(*_):
        raise RuntimeError("there is no Triton here")

    monkeypatch.setattr(fused, "_fits", lambda weight: True)
    monkeypatch.setattr(fused, "_fused", broken)
    with pytest.warns(UserWarning, match="eagerly.*RuntimeError: there is no Triton here"):
        first = fused.folded([matrices, matrices[:1]], args, torch.bfloat16)
    second = fused.folded([matrices, matrices[:1]], args, torch.bfloat16)
    for folds in (first, second):
        assert_equal(folds[0], rounding.folded(matrices, args, torch.bfloat16))
        assert_equal(folds[1], rounding.folded(matrices[:1], args, torch.bfloat16))
    assert list(known.values()) == [False, False]


def test_a_kernel_that_differs_for_one_group_is_still_used_for_the_others(monkeypatch):
    args, matrices = rounding.scheme("int8").weights, weights(0)
    known, used = empty_cache(monkeypatch), []

    def doubled(groups, *rest):
        used.append(len(groups))
        return [
            rounding.folded([2 * weight if len(group) == 2 else weight for weight in group], *rest) for group in groups
        ]

    monkeypatch.setattr(fused, "_fits", lambda weight: True)
    monkeypatch.setattr(fused, "_fused", doubled)
    with pytest.warns(UserWarning, match="differ from eager ones"):
        folds = fused.folded([matrices, matrices[1:], matrices[:1]], args, torch.bfloat16)
    for fold, group in zip(folds, (matrices, matrices[1:], matrices[:1]), strict=True):
        assert_equal(fold, rounding.folded(group, args, torch.bfloat16))
    assert list(known.values()) == [False, True, True]
    assert used == [1, 1, 1, 2]  # groups to the kernel in each call: compared one by one, then the two that agree
