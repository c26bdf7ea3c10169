"""A format of the user's own: a compressed-tensors scheme in a YAML file, and the rules that training makes for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pydantic

from qrl.errors import BadInput
from qrl.formats.fakequant import presets
from qrl.recipe import documents

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

# Bits, type and strategy of what training can compute and compressed-tensors can store.
FOUR_BIT_FLOATS = ((4, "float", "group"), (4, "float", "tensor_group"))  # MXFP4 and NVFP4
STRATEGIES = ("tensor", "channel", "group", "block")
WEIGHTS = (
    *((4, "int", strategy) for strategy in STRATEGIES),
    *((8, "int", strategy) for strategy in STRATEGIES),
    *((8, "float", strategy) for strategy in STRATEGIES),
)
STATIC_INPUTS = ((8, "int", "tensor"), (8, "float", "tensor"))  # one calibrated scale for all inputs of a linear
INPUTS = ((8, "int", "token"), (8, "float", "token"), FOUR_BIT_FLOATS[1], *STATIC_INPUTS)
OBSERVERS = (None, "minmax", "memoryless_minmax", "static_minmax")  # the range that training reads


def read(path: Path) -> QuantizationScheme:
    """Return the scheme of a file; it covers every linear.

    Raises:
        BadInput: there is no file, it holds no scheme, or one that training cannot compute.
    """
    if not path.exists():
        raise BadInput(f"There is no file {path}: expected a format, as train.qat or quantize.format name it.")
    presets.library()
    from compressed_tensors.quantization import QuantizationScheme

    try:
        fields = documents.parse(path, str(path))
        if not fields:
            raise TypeError("it holds no mapping")
        scheme = QuantizationScheme.model_validate({"targets": ["Linear"], **fields})
    except (BadInput, ValueError, TypeError, NotImplementedError) as error:
        reason = " ".join(_message(error).split())[:300]
        raise BadInput(
            f"{path} is no format to train in ({reason}): expected the fields of compressed-tensors' "
            "QuantizationScheme, such as weights: {num_bits: 4, type: int, …}."
        ) from None
    for is_broken, expected in _rules(scheme):
        if is_broken:
            raise BadInput(f"{path} is no format that training can compute: {expected}.")
    return scheme


def _message(error: Exception) -> str:
    """Return an error's message; of pydantic's the fields and what is wrong with each."""
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    messages = []
    for field_error in error.errors():
        field = ".".join(map(str, field_error["loc"]))
        messages.append(f"{field}: {field_error['msg']}")
    return "; ".join(messages)


def _rules(scheme: QuantizationScheme) -> Iterator[tuple[bool, str]]:
    """Yield, for each rule, whether the scheme breaks it, and what is expected.

    The caller stops at the first broken rule, so a rule may rely on those before it.
    """
    weights = scheme.weights
    inputs = scheme.input_activations
    yield list(scheme.targets) != ["Linear"], "it covers every linear, so leave out targets"
    yield scheme.output_activations is not None, "it rounds weights and input_activations, not output_activations"
    yield weights is None, "it needs weights"

    weights_kind = _kind(weights)
    weights_kinds = (*WEIGHTS, *FOUR_BIT_FLOATS)
    yield (
        weights_kind not in weights_kinds,
        f"weights are {_text(weights_kind)}, but must be one of {_text(*weights_kinds)}",
    )
    yield weights.dynamic, "the scales of weights are stored, so dynamic must be false"
    for args in filter(None, (weights, inputs)):
        yield not args.symmetric, "ranges must be symmetric: zero points are not trained"
        yield bool(args.actorder), "weights are rounded in place, without actorder"
        yield args.observer not in OBSERVERS, "the observer must be minmax: training scales by the largest value"
    sides = weights.block_structure or ()
    yield any(side < 1 or 128 % side for side in sides), "the sides of a block must divide 128"

    is_fp4 = weights_kind in FOUR_BIT_FLOATS
    fp4_grids = [_grid(presets.scheme(name).weights) for name in ("nvfp4-a16", "mxfp4")]
    yield (
        is_fp4 and _grid(weights) not in fp4_grids,
        "4-bit floats are stored as NVFP4 (tensor_group of 16) or MXFP4 (group of 32), with their scale_dtype",
    )
    yield not is_fp4 and weights.scale_dtype is not None, "only 4-bit floats have a scale_dtype"

    if inputs is None:
        return
    inputs_kind = _kind(inputs)
    yield (
        inputs_kind not in INPUTS,
        f"input_activations are {_text(inputs_kind)}, but must be one of {_text(*INPUTS)}",
    )
    dynamic: bool | str = inputs_kind not in STATIC_INPUTS
    if inputs_kind in FOUR_BIT_FLOATS:
        dynamic = "local"
    yield inputs.dynamic != dynamic, f"input_activations of this kind need dynamic: {str(dynamic).lower()}"


def _grid(args: QuantizationArgs) -> tuple:
    return args.strategy, args.group_size, args.scale_dtype


def _kind(args: QuantizationArgs) -> tuple[int, str, str]:
    """Return bits, type and strategy; the last two are enums where they are the library's defaults."""
    value_type = getattr(args.type, "value", args.type)
    strategy = getattr(args.strategy, "value", args.strategy)
    return args.num_bits, str(value_type), str(strategy)


def _text(*kinds: tuple) -> str:
    return ", ".join(" ".join(map(str, kind)) for kind in kinds)
