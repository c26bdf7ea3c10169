"""The rounding of inputs as one operation of torch: its values, torch.compile, and what engines are told."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("compressed_tensors")

from qrl import names
from qrl.formats.fakequant import operation, rounding

ROUNDING = ("nvfp4-a4", "fp8", "fp8-static", "int8-a8-static")
SCALES = {"nvfp4-a4": 300.0, "fp8-static": 0.25, "int8-a8-static": 0.5}  # of all inputs


def inputs(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    values[..., ::17] *= 30
    return values.to(dtype)


def spec_and_scale(name: str) -> tuple[str, torch.Tensor | None]:
    scale = torch.tensor([SCALES[name]]) if name in SCALES else None
    return operation.engine_config(name)["input_activations"], scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ROUNDING)
def test_its_values_are_the_formats_own_bit_for_bit(name, dtype):
    spec, scale = spec_and_scale(name)
    x = inputs(3, 7, 64, dtype=dtype)
    rounded = operation.rounded(x, spec, scale)
    assert rounded.dtype == dtype and not torch.equal(rounded, x)
    assert torch.equal(rounded, rounding.activations(x, rounding.scheme(name).input_activations, scale))
    assert torch.equal(operation.rounded(x.mT.contiguous().mT, spec, scale), rounded)


@pytest.mark.parametrize("name", ROUNDING)
def test_a_compiled_graph_keeps_it_whole_and_has_the_same_values(name):
    spec, scale = spec_and_scale(name)
    weight, seen = inputs(32, 64), []

    def linear(x):
        return functional.linear(torch.ops.qrl.rounded(x, spec, scale), weight)

    def backend(graph, _):
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph

    compiled = torch.compile(linear, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (1, 5, 40):
        assert torch.equal(compiled(inputs(tokens, 64)), linear(inputs(tokens, 64)))
    assert all(any("qrl.rounded" in target for target in targets) for targets in seen)


@pytest.mark.parametrize("name", ROUNDING)
def test_torchs_own_checks_of_a_custom_operation_pass(name):
    spec, scale = spec_and_scale(name)
    torch.library.opcheck(operation.rounded, (inputs(5, 64), spec, scale))


@pytest.mark.parametrize("name", ["none", *names.FORMATS])
def test_an_engine_is_told_of_formats_that_round_inputs_alone(name):
    config = operation.engine_config(name)
    assert (config is not None) == (name in ROUNDING)
    if config:
        args, ours = operation.arguments(config["input_activations"]), rounding.scheme(name).input_activations
        fields = ("num_bits", "type", "strategy", "group_size", "dynamic", "scale_dtype", "symmetric")
        assert all(getattr(args, field) == getattr(ours, field) for field in fields)
        assert config["quant_method"] == operation.METHOD and config["version"] == operation.version()


def test_a_file_of_the_users_own_is_told_too(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "weights: {num_bits: 4, type: int, strategy: group, group_size: 32}\n"
        "input_activations: {num_bits: 8, type: int, strategy: token, dynamic: true}\n"
    )
    config, x = operation.engine_config(str(file)), inputs(4, 64)
    expected = rounding.activations(x, rounding.scheme(str(file)).input_activations)
    assert torch.equal(operation.rounded(x, config["input_activations"], None), expected)
