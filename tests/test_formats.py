"""Codes and values: round-to-nearest by its properties, AutoAWQ's packing against its definition."""

import json
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qrl.errors import BadInput
from qrl.formats import awq, rtn

shapes = st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 20), st.integers(2, 8), st.integers(0, 2**31))


def random_matrix(outputs: int, inputs: int, seed: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_rounding_is_off_by_at_most_half_a_step(shape):
    outputs, inputs, group_size, bits, seed = shape
    weight = random_matrix(outputs, inputs, seed)
    codes, scales = rtn.encode(weight, bits, group_size)
    back = rtn.decode(codes, scales, inputs)
    steps = scales.expand(codes.shape).flatten(1)[:, :inputs]
    assert back.shape == weight.shape
    assert ((back - weight).abs() <= steps / 2 * (1 + 1e-5)).all()
    assert codes.abs().max() == 2 ** (bits - 1) - 1  # the largest of a group sits on the grid's end


@given(shapes)
@settings(max_examples=30, deadline=None)
def test_rounding_twice_is_rounding_once(shape):
    outputs, inputs, group_size, bits, seed = shape
    once = rtn.decode(*rtn.encode(random_matrix(outputs, inputs, seed), bits, group_size), inputs)
    twice = rtn.decode(*rtn.encode(once, bits, group_size), inputs)
    assert torch.allclose(once, twice, rtol=1e-5, atol=0)


def test_error_by_hand():
    weight = torch.tensor([[7.0, 1.4, -2.6, 0.0]])  # scale 1: rounds to 7, 1, -3, 0
    found = rtn.error(weight, bits=4, group_size=4)
    relative = (0.4**2 + 0.4**2) / (49 + 1.96 + 6.76)
    assert found.relative_mse == pytest.approx(relative, rel=1e-5)
    assert found.snr_db == pytest.approx(-10 * math.log10(relative), rel=1e-5)
    assert found.max_error == pytest.approx(0.4, rel=1e-5)


def test_error_falls_with_bits_and_with_smaller_groups():
    weight = random_matrix(64, 256, 0)
    by_bits = [rtn.error(weight, bits).relative_mse for bits in (3, 4, 6, 8)]
    by_group = [rtn.error(weight, 4, size).relative_mse for size in (256, 128, 32, 8)]
    assert by_bits == sorted(by_bits, reverse=True)
    assert by_group == sorted(by_group, reverse=True)


def test_a_ragged_group_equals_one_padded_with_zeros():
    weight = random_matrix(4, 100, 1)
    padded = torch.nn.functional.pad(weight, (0, 28))
    assert torch.equal(rtn.encode(weight)[0], rtn.encode(padded)[0])


def test_zeros_have_codes_but_no_relative_error():
    assert not rtn.encode(torch.zeros(2, 8), group_size=4)[0].any()
    with pytest.raises(ValueError, match="zeros"):
        rtn.error(torch.zeros(2, 8))


def pack(values: torch.Tensor) -> torch.Tensor:
    """AutoAWQ's packing as its WQLinear_GEMM.from_linear does it: nibble i of a word holds column order_map[i] of eight."""
    order_map = [0, 2, 4, 6, 1, 3, 5, 7]
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int32)
    for column in range(words.shape[1]):
        for i in range(8):
            words[:, column] |= values[:, column * 8 + order_map[i]].to(torch.int32) << (i * 4)
    return words


def packed(inputs: int, outputs: int, group_size: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(inputs)
    codes = torch.randint(16, (inputs, outputs), generator=generator)
    zeros = torch.randint(16, (inputs // group_size, outputs), generator=generator)
    scales = torch.rand(inputs // group_size, outputs, generator=generator).half()
    return codes, zeros, scales


@pytest.mark.parametrize(("inputs", "outputs", "group_size"), [(128, 8, 128), (256, 64, 128), (96, 16, 32)])
def test_unpacking_gives_each_code_minus_its_zero_times_its_scale(inputs, outputs, group_size):
    codes, zeros, scales = packed(inputs, outputs, group_size)
    weight = awq.unpack(pack(codes), pack(zeros), scales)
    assert (weight.shape, weight.dtype) == ((outputs, inputs), torch.float16)
    for i, o in [(0, 0), (inputs - 1, outputs - 1), (inputs // 2, 3), (5, 6)]:
        group = i // group_size
        assert weight[o, i] == (codes[i, o] - zeros[group, o]).half() * scales[group, o]
    every = (codes - zeros.repeat_interleave(group_size, 0)).half() * scales.repeat_interleave(group_size, 0)
    assert torch.equal(weight, every.T)


@pytest.fixture
def awq_folder(tiny_checkpoint, tmp_path):
    """The random model with every linear of its layers packed, and the values that the packing stands for."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "awq")
    state, values = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim != 2 or "layers" not in name:
            state[name] = values[name] = tensor.half()
            continue
        codes, zeros, scales = packed(tensor.shape[1], tensor.shape[0], 128)
        prefix = name.removesuffix(".weight")
        state |= {f"{prefix}.qweight": pack(codes), f"{prefix}.qzeros": pack(zeros), f"{prefix}.scales": scales / 256}
        values[name] = awq.unpack(pack(codes), pack(zeros), scales / 256)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, values


def test_a_packed_checkpoint_loads_as_an_ordinary_model(awq_folder):
    folder, values = awq_folder
    model = awq.load_unpacked(folder, torch.float32)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], value.float()) for name, value in values.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id is not None
    assert not hasattr(model.config, "quantization_config")
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_other_layouts_and_missing_parts_are_refused(awq_folder, tiny_checkpoint):
    folder, _ = awq_folder
    with pytest.raises(BadInput, match="not an AWQ checkpoint"):
        awq.unpack_checkpoint_state(tiny_checkpoint)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.scales"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"scales of model\.layers\.0\.mlp\.up_proj"):
        awq.unpack_checkpoint_state(folder)
