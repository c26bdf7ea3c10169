"""The compiled fake quantization is the eager one, bit for bit, on a CPU and on a GPU where there is one."""

import pytest
import torch

pytest.importorskip("compressed_tensors")

from qrl.formats import fake, fake_compiled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float32) if DEVICE == "cuda" else (torch.bfloat16,)  # compiling takes seconds each
SHAPES = ((96, 256), (32, 256))  # that share a scale, where the format has one


def weights(seed: int, spread: float = 0.02) -> list[torch.Tensor]:
    """Ordinary weights, with zeros, a group of zeros, ties and an outlier among them."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(*shape, generator=generator) * spread for shape in SHAPES]
    found[0][3, :128] = 0
    found[0][4, ::3] = 0
    found[1][5, 7] = 40 * spread
    found[1][6] = torch.arange(256) / 256 * spread  # on the steps and half-way between them
    return [each.to(DEVICE) for each in found]


def alike(found, wanted) -> None:
    for a, b in zip((*found[0], found[1]), (*wanted[0], wanted[1]), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.slow  # a C++ or Triton compiler for every format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in fake.FORMATS if name != "int8-attention"])  # int8's arithmetic
def test_a_compiled_fold_is_the_eager_one_bit_for_bit(name, dtype):
    args = fake.scheme(name).weights
    made = fake_compiled.compiled(lambda *each: fake.folded(each, args, dtype), weights(0), dynamic=False)
    for seed, spread in ((0, 0.02), (1, 0.02), (2, 1e-6), (3, 300.0)):
        given = weights(seed, spread)
        alike(made(*given), fake.folded(given, args, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in fake.FORMATS if fake.scheme(name).input_activations is not None])
def test_compiled_activations_are_the_eager_ones_whatever_the_number_of_tokens(name, dtype):
    args = fake.scheme(name).input_activations
    scale = [fake.global_scale(torch.tensor(12.0, device=DEVICE))] if name == "nvfp4-a4" else []
    draw = torch.Generator().manual_seed(0)

    def tokens(count):
        return (3 * torch.randn(count, 256, generator=draw)).to(DEVICE, dtype)

    made = fake_compiled.compiled(lambda each, *by: fake.activations(each, args, *by), [tokens(37), *scale], dynamic=True)
    for count in (37, 64, 5, 1, 1000):
        given = tokens(count)
        assert torch.equal(made(given, *scale), fake.activations(given, args, *scale))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "nvfp4-a16"])
def test_nan_and_infinity_are_seen_by_the_compiled_fold_too(name):
    args = fake.scheme(name).weights
    made = fake_compiled.compiled(lambda *each: fake.folded(each, args), weights(0), dynamic=False)
    for value in (float("nan"), float("inf"), -float("inf")):
        given = weights(0)
        given[1][2, 3] = value
        assert made(*given)[1].isfinite().tolist() == [True, False]


def test_what_cannot_be_compiled_runs_eagerly_and_says_so(monkeypatch):
    args = fake.scheme("int4").weights

    def broken(*given, **named):
        raise RuntimeError("there is no compiler here")

    monkeypatch.setattr(fake_compiled, "compiled", broken)
    monkeypatch.setattr(fake_compiled, "_made", {})
    given = weights(0)
    with pytest.warns(UserWarning, match="runs uncompiled, several times slower .RuntimeError: there is no compiler here"):
        first = fake_compiled._call(("x",), lambda *each: fake.folded(each, args), given, dynamic=False)
    second = fake_compiled._call(("x",), lambda *each: fake.folded(each, args), given, dynamic=False)
    alike(first, fake.folded(given, args))
    alike(second, first)


def test_compiled_values_that_differ_from_eager_ones_are_not_used(monkeypatch):
    args = fake.scheme("int8").weights
    monkeypatch.setattr(fake_compiled, "compiled", lambda work, given, *, dynamic: lambda *each: work(*(2 * one for one in each)))
    monkeypatch.setattr(fake_compiled, "_made", {})
    given = weights(0)
    with pytest.warns(UserWarning, match="the compiled values differ from eager ones"):
        fake_compiled._call(("x",), lambda *each: fake.folded(each, args), given, dynamic=False)
    alike(fake_compiled._call(("x",), lambda *each: fake.folded(each, args), given, dynamic=False), fake.folded(given, args))
