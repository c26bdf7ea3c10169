"""The fused fake quantization is the eager one, bit for bit; the kernel itself needs a GPU."""

import pytest
import torch

pytest.importorskip("compressed_tensors")

from qrl.formats.fakequant import fused, values

SHAPES = ((96, 256), (32, 256))  # that share a scale, where the format has one
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's kernels need a GPU")
ARITHMETIC = [
    name for name in values.FORMATS if name not in ("int8-attention", "nvfp4-a4")
]  # of weights; the others' is int8's and nvfp4-a16's


def weights(seed: int, spread: float = 0.02, device: str = "cpu", wide: int = 256) -> list[torch.Tensor]:
    """Ordinary weights, with zeros, a group of zeros, ties and an outlier among them."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(rows, wide, generator=generator) * spread for rows, _ in SHAPES]
    found[0][3, :128] = 0
    found[0][4, ::3] = 0
    found[1][5, 7] = 40 * spread
    found[1][6] = torch.arange(wide) / wide * spread  # on the steps and half-way between them
    return [each.to(device) for each in found]


def alike(found, wanted) -> None:
    for a, b in zip((*found[0], found[1]), (*wanted[0], wanted[1]), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def proven(monkeypatch) -> dict:
    monkeypatch.setattr(fused, "_proven", {})
    return fused._proven


@on_gpu
@pytest.mark.filterwarnings("error")  # a kernel that differs warns
@pytest.mark.parametrize(
    "masters, dtype",
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_kernels_fold_is_the_eager_one_bit_for_bit(name, masters, dtype, monkeypatch):
    args, known = values.scheme(name).weights, proven(monkeypatch)
    for seed, spread, wide in (
        (0, 0.02, 256),
        (1, 0.02, 1536),
        (2, 1e-6, 8960),
        (3, 300.0, 1536),
        (4, 1.0, 8960),
        (5, 3e-3, 256),
    ):
        given = [each.to(masters) for each in weights(seed, spread, "cuda", wide)]
        for _ in range(2):  # the first time it is checked, and the second time used
            for found in fused.folded([given, given[:1]], args, dtype):
                alike(found, values.folded(given[: len(found[0])], args, dtype))
    assert len(known) == 6 and all(known.values())


@on_gpu
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["nvfp4-a4", "fp8"])
def test_a_kernels_activations_are_the_eager_ones_whatever_the_number_of_tokens(name, dtype, monkeypatch):
    args, known = values.scheme(name).input_activations, proven(monkeypatch)
    scale = values.global_scale(torch.tensor(12.0, device="cuda")) if name == "nvfp4-a4" else None
    for wide in (256, 1536, 8960):
        for count in (37, 64, 5, 1, 1000):
            given = 3 * torch.randn(count, wide, device="cuda", generator=torch.Generator("cuda").manual_seed(count))
            found = fused.activations(given.unflatten(0, (1, count)), args, scale, dtype)
            assert torch.equal(found[0], values.activations(given.to(dtype), args, scale))
    assert len(known) == 3 and all(known.values())


@on_gpu
@pytest.mark.parametrize("name", ["int4", "nvfp4-a16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_seen_beside_the_kernel_too(name, value):
    args, given = values.scheme(name).weights, weights(0, device="cuda")
    fused.folded([given], args, torch.bfloat16)
    given[1][2, 3] = value
    assert fused.folded([given], args, torch.bfloat16)[0][1].isfinite().tolist() == [True, False]


def test_largest_weights_and_global_scales_of_many_groups_are_those_of_each():
    groups = [weights(0), weights(1)[:1], [torch.zeros(4, 16)], weights(2, spread=300.0)]
    largest = fused._largest(groups)
    assert torch.equal(
        largest,
        torch.stack(
            [
                values._largest(*values._extremes(each, values.scheme("int8").weights))
                for group in groups
                for each in group
            ]
        ),
    )
    scales = fused._global_scales(largest, (2, 1, 1, 2))
    maxima = [max(float(each.abs().max()) for each in group) for group in groups]
    assert torch.equal(scales, torch.cat([values.global_scale(torch.tensor(each)) for each in maxima]))
    groups[0][1][0, 0] = float("nan")
    assert fused._largest(groups).isfinite().tolist() == [True, False, True, True, True, True]


def test_what_has_no_kernel_runs_eagerly_and_says_so(monkeypatch):
    args, given = values.scheme("int4").weights, weights(0)
    known = proven(monkeypatch)

    def broken(*_):
        raise RuntimeError("there is no Triton here")

    monkeypatch.setattr(fused, "_fits", lambda weight: True)
    monkeypatch.setattr(fused, "_fused", broken)
    with pytest.warns(UserWarning, match="runs eagerly, many times slower .RuntimeError: there is no Triton here"):
        first = fused.folded([given, given[:1]], args, torch.bfloat16)
    second = fused.folded([given, given[:1]], args, torch.bfloat16)
    for found in (first, second):
        alike(found[0], values.folded(given, args, torch.bfloat16))
        alike(found[1], values.folded(given[:1], args, torch.bfloat16))
    assert list(known.values()) == [False, False]


def test_a_kernels_values_that_differ_from_eager_ones_are_not_used_but_those_of_others_are(monkeypatch):
    args, given = values.scheme("int8").weights, weights(0)
    known, used = proven(monkeypatch), []

    def doubled(groups, *rest):
        used.append(len(groups))
        return [values.folded([2 * each if len(group) == 2 else each for each in group], *rest) for group in groups]

    monkeypatch.setattr(fused, "_fits", lambda weight: True)
    monkeypatch.setattr(fused, "_fused", doubled)
    with pytest.warns(UserWarning, match="the kernel's values differ from eager ones"):
        found = fused.folded([given, given[1:], given[:1]], args, torch.bfloat16)
    for place, group in enumerate((given, given[1:], given[:1])):
        alike(found[place], values.folded(group, args, torch.bfloat16))
    assert list(known.values()) == [False, True, True] and used == [
        1,
        1,
        1,
        2,
    ]  # each alone at first, then all that hold in one go
