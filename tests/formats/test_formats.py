"""Codes and values: properties of round-to-nearest, and every packing against its definition."""

import json
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qrl import checkpoint, quantize
from qrl.checkpoint.stream import Rows
from qrl.errors import BadInput
from qrl.formats import decode, plain, proxy, stored

shapes = st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(1, 20), st.integers(2, 8), st.integers(0, 2**31))


def error(weight: torch.Tensor, bits: int = 4, group_size: int = 128) -> tuple[float, float]:
    """Return the relative and the largest error of a matrix."""
    groups = proxy.grouped(weight, group_size)
    squared, largest = proxy.scan(groups, groups.abs().amax(-1, keepdim=True), bits)
    return squared / weight.double().square().sum().item(), largest


def random_matrix(outputs: int, inputs: int, seed: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_rounding_is_off_by_at_most_half_a_step(shape):
    outputs, inputs, group_size, bits, seed = shape
    weight = random_matrix(outputs, inputs, seed)
    codes, scales = proxy.encode(weight, bits, group_size)
    back = proxy.decode(codes, scales, inputs)
    steps = scales.expand(codes.shape).flatten(1)[:, :inputs]
    assert back.shape == weight.shape
    assert ((back - weight).abs() <= steps / 2 * (1 + 1e-5)).all()
    assert codes.abs().max() == 2 ** (bits - 1) - 1  # a group's largest weight has the largest code


@given(shapes)
@settings(max_examples=30, deadline=None)
def test_rounding_twice_is_rounding_once(shape):
    outputs, inputs, group_size, bits, seed = shape
    once = proxy.decode(*proxy.encode(random_matrix(outputs, inputs, seed), bits, group_size), inputs)
    twice = proxy.decode(*proxy.encode(once, bits, group_size), inputs)
    assert torch.allclose(once, twice, rtol=1e-5, atol=0)


def test_a_weight_half_way_between_two_codes_goes_to_the_even_one():
    """Half of the largest weight is at 3.5 steps, however the scale of a bf16 significand rounds."""
    largest = torch.arange(128, 256, dtype=torch.bfloat16)[:, None]
    codes, _ = proxy.encode(torch.cat([largest, largest / 2, -largest / 2, largest * 0], 1), group_size=4)
    assert (codes.flatten(1) == torch.tensor([7, 4, -4, 0])).all()


def test_the_error_of_a_matrix_computed_by_hand():
    weight = torch.tensor([[7.0, 1.4, -2.6, 0.0]])  # scale 1: rounds to 7, 1, -3, 0
    measured, largest = error(weight, bits=4, group_size=4)
    relative = (0.4**2 + 0.4**2) / (49 + 1.96 + 6.76)
    assert measured == pytest.approx(relative, rel=1e-5)
    assert proxy.snr_db(measured) == pytest.approx(-10 * math.log10(relative), rel=1e-5)
    assert largest == pytest.approx(0.4, rel=1e-5)


def test_error_falls_with_bits_and_with_smaller_groups():
    weight = random_matrix(64, 256, 0)
    by_bits = [error(weight, bits)[0] for bits in (3, 4, 6, 8)]
    by_group = [error(weight, 4, size)[0] for size in (256, 128, 32, 8)]
    assert by_bits == sorted(by_bits, reverse=True)
    assert by_group == sorted(by_group, reverse=True)


def test_a_ragged_group_equals_one_padded_with_zeros():
    weight = random_matrix(4, 100, 1)
    padded = torch.nn.functional.pad(weight, (0, 28))
    assert torch.equal(proxy.encode(weight)[0], proxy.encode(padded)[0])


def test_zeros_have_codes_but_no_signal_to_noise_ratio():
    assert not proxy.encode(torch.zeros(2, 8), group_size=4)[0].any()
    assert math.isnan(proxy.snr_db(math.nan))


def pack(values: torch.Tensor) -> torch.Tensor:
    """Pack as AutoAWQ's WQLinear_GEMM.from_linear does: nibble i of a word holds column order_map[i] of eight."""
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
    weight, centred = decode.unpack_awq(pack(codes), pack(zeros), scales)
    assert (weight.shape, weight.dtype) == ((outputs, inputs), torch.float16)
    for i, o in [(0, 0), (inputs - 1, outputs - 1), (inputs // 2, 3), (5, 6)]:
        group = i // group_size
        assert weight[o, i] == (codes[i, o] - zeros[group, o]).half() * scales[group, o]
    every = (codes - zeros.repeat_interleave(group_size, 0)).half() * scales.repeat_interleave(group_size, 0)
    assert torch.equal(weight, every.T)
    assert torch.equal(centred, (codes - zeros.repeat_interleave(group_size, 0)).to(torch.int8))


@pytest.fixture
def awq_folder(tiny_checkpoint, tmp_path):
    """The random model with every linear of its layers packed, and the values of all its tensors."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "awq")
    state, values = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim != 2 or "layers" not in name:
            state[name] = values[name] = tensor.half()
            continue
        codes, zeros, scales = packed(tensor.shape[1], tensor.shape[0], 128)
        prefix = name.removesuffix(".weight")
        state |= {f"{prefix}.qweight": pack(codes), f"{prefix}.qzeros": pack(zeros), f"{prefix}.scales": scales / 256}
        values[name], _ = decode.unpack_awq(pack(codes), pack(zeros), scales / 256)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, values


@pytest.mark.process
def test_a_packed_checkpoint_loads_as_an_ordinary_model(awq_folder):
    folder, values = awq_folder
    model = plain.load(folder, torch.float32)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], value.float()) for name, value in values.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id is not None
    assert not hasattr(model.config, "quantization_config")
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.process
def test_other_layouts_and_missing_parts_are_refused(awq_folder, tiny_checkpoint):
    folder, _ = awq_folder
    with pytest.raises(BadInput, match="full-precision checkpoint"):
        stored.plain_state(tiny_checkpoint, torch.float32)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.scales"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match=r"model\.layers\.0\.mlp\.up_proj.*scales"):
        stored.plain_state(folder, torch.float32)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"\(awq\).*gemm"):
        stored.plain_state(folder, torch.float32)


def test_rows_are_read_from_their_place_in_the_file(tiny_checkpoint):
    name = "model.layers.1.mlp.down_proj.weight"
    entry, whole = checkpoint.entries(tiny_checkpoint)[name], load_file(tiny_checkpoint / "model.safetensors")[name]
    rows = Rows(tiny_checkpoint)
    for first, last in [(0, 256), (17, 18), (200, 256)]:
        assert torch.equal(rows.read(entry, first, last), whole[first:last])
    rows.close()


def test_a_file_that_is_cut_while_it_is_read_is_named(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "cut")
    entry = max(checkpoint.entries(folder).values(), key=lambda entry: entry.start)
    with open(folder / entry.file, "r+b") as file:
        file.truncate(entry.start + 100)
    with pytest.raises(BadInput, match=r"model\.safetensors ends before"):
        Rows(folder).read(checkpoint.Entry(entry.file, entry.dtype, (1, entry.numel), entry.bytes, entry.start), 0, 1)


@pytest.fixture(scope="module")
def nf4_folder(tiny_checkpoint, tmp_path_factory):
    return quantize.run("nf4", tiny_checkpoint, tmp_path_factory.mktemp("nf4") / "out").path


@pytest.mark.process
def test_nf4_is_read_as_bitsandbytes_does(nf4_folder, tiny_checkpoint):
    from bitsandbytes import functional

    names = stored.names(nf4_folder)
    assert len(names) == 14 and all("layers" in name for name in names)
    parts, table = load_file(nf4_folder / "model.safetensors"), load_file(tiny_checkpoint / "model.safetensors")
    for name, matrix in stored.matrices(nf4_folder, names):
        own = {part.removeprefix(f"{name}."): value for part, value in parts.items() if part.startswith(f"{name}.")}
        state = functional.QuantState.from_dict(own, torch.device("cpu"))
        state.dtype = torch.float32
        assert torch.equal(matrix.values, functional.dequantize_4bit(parts[name], state))
        assert matrix.codes.max() == 255 and 2 * matrix.codes.numel() == matrix.values.numel()  # two codes a byte
        assert (matrix.values - table[name].float()).norm() < 0.15 * table[name].float().norm()


def test_int8_is_read_as_codes_times_row_scales(tiny_checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint, quantization_config=settings, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(tmp_path)
    true = load_file(tiny_checkpoint / "model.safetensors")
    for name, matrix in stored.matrices(tmp_path, stored.names(tmp_path)[:3]):
        step = true[name].float().abs().amax(1, keepdim=True) / 127
        assert torch.allclose(matrix.values, matrix.codes * step, rtol=1e-5, atol=1e-8)
        assert ((matrix.values - true[name].float()).abs() <= 0.51 * step).all()


@pytest.mark.process
def test_awq_is_read_as_unpacked(awq_folder):
    folder, values = awq_folder
    matrices = dict(stored.matrices(folder, stored.names(folder)))
    assert matrices.keys() == {name for name in values if "layers" in name and values[name].ndim == 2}
    assert all(torch.equal(matrix.values, values[name].float()) for name, matrix in matrices.items())


def compressed(folder, tensors, weights, layout):
    """Write one linear as compressed-tensors does, and return the values that `stored` reads."""
    state = {f"model.layers.0.mlp.up_proj.{part}": tensor for part, tensor in tensors.items()}
    save_file(state, folder / "model.safetensors")
    weights = {"symmetric": True, "dynamic": False} | weights
    activations = {"input_activations": None, "output_activations": None}
    group = {"targets": ["Linear"], "weights": weights, "format": layout, **activations}
    settings = {"format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    settings["quant_method"] = "compressed-tensors"
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return dict(stored.matrices(folder, stored.names(folder)))["model.layers.0.mlp.up_proj.weight"].values


@pytest.fixture
def in_parts(monkeypatch):
    """Unpack matrices a few rows at a time."""
    monkeypatch.setattr(decode, "BLOCK", 1)


def test_compressed_fp8_is_code_times_scale(tmp_path, in_parts):
    codes, scale = random_matrix(70, 64, 0).to(torch.float8_e4m3fn), torch.rand(70, 1).bfloat16()
    kind = {"num_bits": 8, "type": "float", "strategy": "channel"}
    actual = compressed(tmp_path, {"weight": codes, "weight_scale": scale}, kind, "float-quantized")
    assert torch.equal(actual, codes.float() * scale.float())


def test_compressed_integers_with_zero_points_are_code_minus_zero_times_scale(tmp_path, in_parts):
    generator = torch.Generator().manual_seed(0)
    codes, zeros = (torch.randint(-8, 8, (100, width), generator=generator, dtype=torch.int8) for width in (64, 2))
    scale = torch.rand(100, 2, generator=generator).bfloat16()
    tensors = {
        "weight_packed": words(codes),
        "weight_scale": scale,
        "weight_shape": torch.tensor([100, 64]),
        "weight_zero_point": words(zeros.T).T.contiguous(),
    }
    kind = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    actual = compressed(tmp_path, tensors, kind, "pack-quantized")
    assert torch.equal(
        actual, (codes - zeros.repeat_interleave(32, 1)).float() * scale.float().repeat_interleave(32, 1)
    )


def words(codes):
    """Pack eight codes -8..7 of a row into each int32, the first lowest, as compressed-tensors does."""
    eight = torch.nn.functional.pad(codes.long() + 8, (0, -codes.shape[1] % 8)).view(len(codes), -1, 8)
    packed = (eight << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def test_compressed_nvfp4_is_grid_times_both_scales(tmp_path, in_parts):
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(16, (70, 32), generator=torch.Generator().manual_seed(0))
    scale, whole = (1 + 7 * torch.rand(70, 2)).to(torch.float8_e4m3fn), torch.tensor([40.0])
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    kind = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole}
    actual = compressed(tmp_path, tensors, kind, "nvfp4-pack-quantized")
    values = grid[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    expected = values * scale.float().repeat_interleave(16, 1) / whole
    assert torch.allclose(actual, expected, rtol=2**-8)  # the library's values are bf16


def test_unreadable_checkpoints_are_refused(tiny_checkpoint, nf4_folder, tmp_path):
    with pytest.raises(BadInput, match="full-precision checkpoint"):
        stored.names(tiny_checkpoint)
    folder = shutil.copytree(nf4_folder, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "aqlm"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"\(aqlm\).*bitsandbytes"):
        stored.names(folder)
    state = load_file(nf4_folder / "model.safetensors")
    name = stored.names(nf4_folder)[0]
    del state[f"{name}.absmax"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(nf4_folder / "config.json", folder / "config.json")
    with pytest.raises(BadInput, match=f"{name}.*absmax"):
        next(stored.matrices(folder, [name]))


def test_the_short_last_block_of_nf4_has_its_own_scale():
    state = json.dumps({"blocksize": 4, "shape": [3, 3]}).encode()
    tensors = {
        "weight": torch.full((5, 1), 0x11, dtype=torch.uint8),  # code 1 everywhere; the tenth half is padding
        "weight.quant_map": torch.arange(16.0),
        "weight.absmax": torch.tensor([1.0, 2.0, 3.0]),
        decode.NF4_STATE.removeprefix("."): torch.tensor(list(state), dtype=torch.uint8),
    }
    values = decode.nf4(tensors, {}, "layer").values.flatten().tolist()
    assert values == [1.0] * 4 + [2.0] * 4 + [3.0]
