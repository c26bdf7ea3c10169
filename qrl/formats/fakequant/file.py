"""A format of the user's own: a compressed-tensors scheme in a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pydantic

from qrl.errors import BadInput
from qrl.formats.fakequant import rounding
from qrl.recipe import documents

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

# Bits, type and strategy of what training can compute and compressed-tensors can store.
FOUR_BIT_FLOATS = ((4, "float", "group"), (4, "float", "tensor_group"))  # MXFP4 and NVFP4
STRATEGIES = ("tensor", "channel", "group", "block")
WEIGHTS = tuple((*grid, strategy) for grid in ((4, "int"), (8, "int"), (8, "float")) for strategy in STRATEGIES)
INPUTS = ((8, "int", "token"), (8, "float", "token"), FOUR_BIT_FLOATS[1])
OBSERVERS = (None, "minmax", "memoryless_minmax", "static_minmax")  # the range that training reads


def read(path: Path) -> QuantizationScheme:
    """Return the scheme of a file; it covers every linear.

    Raises:
        BadInput: there is no file, it holds no scheme, or one that training cannot compute.
    """
    if not path.exists():
        raise BadInput(f"There is no file {path}: expected a format, as train.qat or quantize.format name it.")
    rounding.library()
    from compressed_tensors.quantization import QuantizationScheme

    try:
        if not (fields := documents.parse(path, str(path))):
            raise TypeError("it holds no mapping")
        scheme = QuantizationScheme.model_validate({"targets": ["Linear"], **fields})
    except (BadInput, ValueError, TypeError, NotImplementedError) as error:
        reason = " ".join(_said(error).split())[:300]
        expected = "the fields of compressed-tensors' QuantizationScheme, such as weights: {num_bits: 4, type: int, …}"
        raise BadInput(f"{path} is no format to train in ({reason}): expected {expected}.") from None
    for unfit, expected in _rules(scheme):
        if unfit:
            raise BadInput(f"{path} is no format that training can compute: {expected}.")
    return scheme


def _said(error: Exception) -> str:
    """Return an error's message; of pydantic's the fields and what is wrong with each."""
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())


def _rules(scheme: QuantizationScheme):
    """Yield what makes a scheme unfit, whether it does, and what is expected."""
    weights, inputs = scheme.weights, scheme.input_activations
    yield list(scheme.targets) != ["Linear"], "it covers every linear, so leave out targets"
    yield scheme.output_activations is not None, "it rounds weights and input_activations, not output_activations"
    yield weights is None, "it needs weights"
    fits = (*WEIGHTS, *FOUR_BIT_FLOATS)
    yield _kind(weights) not in fits, f"weights are {_shown(_kind(weights))}, but must be one of {_shown(*fits)}"
    yield weights.dynamic, "the scales of weights are stored, so dynamic must be false"
    for args in filter(None, (weights, inputs)):
        yield not args.symmetric, "ranges must be symmetric: zero points are not trained"
        yield bool(args.actorder), "weights are rounded in place, without actorder"
        yield args.observer not in OBSERVERS, "the observer must be minmax: training scales by the largest value"
    sides = weights.block_structure or ()
    yield any(side < 1 or 128 % side for side in sides), "the sides of a block must divide 128"
    presets = [rounding.scheme(name).weights for name in ("nvfp4-a16", "mxfp4")]
    grids = {(preset.strategy, preset.group_size, preset.scale_dtype) for preset in presets}
    own, is_fp4 = (weights.strategy, weights.group_size, weights.scale_dtype), _kind(weights) in FOUR_BIT_FLOATS
    stored = "4-bit floats are stored as NVFP4 (tensor_group of 16) or MXFP4 (group of 32), with their scale_dtype"
    yield is_fp4 and own not in grids, stored
    yield not is_fp4 and weights.scale_dtype is not None, "only 4-bit floats have a scale_dtype"
    if inputs is not None:
        chosen = _kind(inputs)
        yield chosen not in INPUTS, f"input_activations are {_shown(chosen)}, but must be one of {_shown(*INPUTS)}"
        dynamic = "local" if chosen in FOUR_BIT_FLOATS else True
        yield inputs.dynamic != dynamic, f"input_activations of this kind need dynamic: {str(dynamic).lower()}"


def _kind(args: QuantizationArgs) -> tuple[int, str, str]:
    kind, strategy = (getattr(name, "value", name) for name in (args.type, args.strategy))  # enums where defaults
    return args.num_bits, str(kind), str(strategy)


def _shown(*kinds: tuple) -> str:
    return ", ".join(" ".join(map(str, kind)) for kind in kinds)
