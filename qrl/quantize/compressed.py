"""The schemes of llm-compressor and round-to-nearest, stored as compressed-tensors; vLLM and transformers read both.

Schemes that round weights only need no forward pass. AWQ, GPTQ, AutoRound and ranges of activations, keys and values
need calibration texts; on a CPU that pass runs in float32 (bfloat16 took ten times as long where the CPU has no units
for it), and the result is stored in the source's own dtype. A range is the largest value of all texts. Source: GPTQ:
Frantar et al. (arXiv 2210.17323). AWQ: Lin et al. (arXiv 2306.00978). AutoRound: Cheng et al. (arXiv 2309.05516).
SpinQuant: Liu et al. (arXiv 2405.16406), with fixed Hadamard rotations instead of learned ones. Others: the presets of
compressed-tensors.

`quantize` loads the model, has llm-compressor's `oneshot` apply a list of modifiers (`_recipe`), and saves it. A new
scheme of llm-compressor's is an entry in `_PRESETS`, or a modifier in `_recipe`.
"""

import contextlib
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from qrl import checkpoint, names, process
from qrl.engine import pretrained
from qrl.errors import BadInput, QrlError
from qrl.formats import groups, layers
from qrl.formats.fakequant import linears, presets, rounding
from qrl.quantize.fit import HEAD
from qrl.quantize.settings import GPTQ, GROUPED, SEARCHED, Settings

BATCH = 16  # calibration rows in one forward pass
_AS_NAMED = (names.NVFP4, names.NVFP4A16, names.MXFP4A16, names.MXFP8, names.W8A8, names.FP8_BLOCK, names.W4AFP8)
# Scheme → preset of compressed-tensors.
_PRESETS = {names.FP8: "FP8_DYNAMIC", **{scheme: scheme.upper().replace("-", "_") for scheme in _AS_NAMED}}
_STATIC = {names.FP8_STATIC: "fp8-static", names.W8A8_STATIC: "int8-a8-static"}  # scheme → our own preset
# What llm-compressor calibrates: scales of inputs, NVFP4's too, and of keys and values.
_CALIBRATED_SCALES = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")


def quantize(source: Path, out: Path, *, settings: Settings, rows: Sequence[Sequence[int]], device: str) -> None:
    """Write `source` under one of `names.COMPRESSED` or `names.ROUNDED` to `out`; arguments as in `_family`.

    Raises:
        QrlError: llm-compressor is not installed here.
    """
    with _oneshot_on(device) as oneshot:
        if settings.scheme in names.ROUNDED:
            model = _rounded(oneshot, source, settings, rows)
        else:
            model = _compressed(oneshot, source, settings, rows, device)
        model.save_pretrained(out, save_compressed=True)
    (out / "recipe.yaml").unlink(missing_ok=True)  # llm-compressor's record; ours holds more


def _compressed(oneshot: Callable, source: Path, settings: Settings, rows: Sequence, device: str) -> PreTrainedModel:
    calibrates_on_cpu = settings.uses_texts and device == "cpu"
    model, stored_dtype = _load(source, in_float32=calibrates_on_cpu)
    batch_size = 1 if settings.scheme == names.AUTOROUND else BATCH  # AutoRound makes batches of its own
    oneshot(model=model, recipe=_recipe(settings, model), dataset=_batches(rows, batch_size))
    if calibrates_on_cpu and settings.scheme not in SEARCHED:
        # The ranges come from the pass in float32. The scales of weights must come from the stored weights, as where
        # nothing is calibrated, so the model is quantized again in its own dtype.
        state = model.state_dict()
        calibrated_scales = {name: scale for name, scale in state.items() if name.endswith(_CALIBRATED_SCALES)}
        model, _ = _load(source, in_float32=False)
        oneshot(model=model, recipe=_recipe(settings, model), dataset=_batches(rows[:1]))
        model.load_state_dict(calibrated_scales, strict=False)
    _cast(model, stored_dtype)
    return model


def _rounded(oneshot: Callable, source: Path, settings: Settings, rows: Sequence) -> PreTrainedModel:
    """Round to nearest in a format of `train.qat`, in float32, as training does with its masters.

    What is not quantized keeps the source's dtype. Training stores the calibrated scales of activations with its
    masters; `rows` calibrate them where it did not, and those of keys and values.
    """
    from compressed_tensors.offload import update_offload_parameter
    from llmcompressor.modifiers.quantization import QuantizationModifier

    name = settings.rounding
    model = pretrained.load(source, dtype=torch.float32).eval()
    own_scheme = rounding.scheme(name, settings.group_size or groups.USUAL)
    groups_of_linears = _config_groups(settings, model, own_scheme)
    recipe = QuantizationModifier(config_groups=groups_of_linears, ignore=[], kv_cache_scheme=_kv_scheme(settings))
    has_input_scales = linears.needs_calibration(name)
    trained_scales = linears.read_activation_scales(source) if has_input_scales else None
    if trained_scales is not None:
        plan = layers.plan_of(model, name, settings.layers)
        _check_scales(trained_scales, plan.by_format.get(name, []), source)
    calibrates_inputs = has_input_scales and trained_scales is None
    if calibrates_inputs or settings.kv_cache:
        oneshot(model=model, recipe=recipe, dataset=_batches(rows))
    else:
        oneshot(model=model, recipe=recipe, pipeline="datafree")
    for path, scale in (trained_scales or {}).items():
        linear = model.get_submodule(path)  # offloaded on a GPU, where reading a parameter gives a copy
        stored_name = linears.stored_scale(own_scheme)
        update_offload_parameter(linear, stored_name, torch.full_like(getattr(linear, stored_name), scale))
    _cast_unquantized(model, getattr(torch, checkpoint.main_dtype(checkpoint.entries(source))))
    return model


def _check_scales(trained_scales: Collection[str], paths: Collection[str], source: Path) -> None:
    """Raise BadInput if training calibrated the inputs of other linears than those that are stored in its format."""
    in_only_one = sorted(set(trained_scales) ^ set(paths))
    if in_only_one:
        raise BadInput(
            f"{source} was trained with other linears in few bits than quantize.layers names ({in_only_one[0]} is in "
            "only one): set quantize.layers to the train.qat_layers of its training."
        )


def _config_groups(settings: Settings, model: PreTrainedModel, own_scheme) -> dict[str, Any]:
    """Return llm-compressor's groups of linears: a scheme for each format, with its linears as targets, by name."""
    plan = layers.plan_of(model, settings.own_format, settings.layers)
    config_groups = {}
    for number, (name, paths) in enumerate(plan.by_format.items()):
        scheme = own_scheme
        if name != settings.own_format:
            scheme = rounding.scheme(name, settings.layers_group_size or groups.USUAL)
        config_groups[f"group_{number}"] = scheme.model_copy(update={"targets": paths})
    return config_groups


@contextlib.contextmanager
def _oneshot_on(device: str) -> Iterator[Callable]:
    """Yield llm-compressor's `oneshot`, without bars, on "cpu" or "cuda"; on its own it uses any GPU that it finds."""
    oneshot = quiet_oneshot()
    from compressed_tensors.utils import patch_attr
    from llmcompressor.modifiers.transform.spinquant import base as spinquant
    from llmcompressor.pipelines.cache import IntermediatesCache
    from llmcompressor.pipelines.data_free import pipeline as data_free
    from llmcompressor.pipelines.sequential import pipeline as sequential

    target = torch.device(device, 0) if device == "cuda" else torch.device(device)
    with contextlib.ExitStack() as patches, contextlib.redirect_stderr(io.StringIO()):
        for pipeline in (data_free, sequential):
            patches.enter_context(patch_attr(pipeline, "get_main_device", lambda: target))
        # It centers embeddings, which LayerNorm would ignore; models of `ROTATABLE` have RMSNorm and would change.
        patches.enter_context(patch_attr(spinquant, "center_embeddings", lambda embedding: None))
        if not torch.accelerator.is_available():  # there is nothing to pin memory for, and AWQ would die of it
            do_nothing = classmethod(lambda cls, value: None)
            patches.enter_context(patch_attr(IntermediatesCache, "_pin_intermediate", do_nothing))
        yield oneshot


def quiet_oneshot() -> Callable:
    """Return llm-compressor's `oneshot`, with its log turned off."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # of its log; its own switch breaks its GPTQ
            from llmcompressor import oneshot
            from loguru import logger
    except ImportError as error:
        raise QrlError(
            f"llm-compressor cannot be imported here ({error}): run "
            f"{process.environment_command('quantize')}, whose environment has it, or choose nf4 or int8."
        ) from None
    logger.disable("llmcompressor")
    logger.disable("compressed_tensors")
    return oneshot


def _load(source: Path, *, in_float32: bool) -> tuple[PreTrainedModel, torch.dtype]:
    """Return the model, and the dtype for unquantized tensors: the source's own, or bfloat16 for float32 masters."""
    is_float16 = checkpoint.main_dtype(checkpoint.entries(source)) == "float16"
    stored_dtype = torch.float16 if is_float16 else torch.bfloat16
    model = pretrained.load(source, dtype=torch.float32 if in_float32 else stored_dtype)
    return model.eval(), stored_dtype


def _recipe(settings: Settings, model: PreTrainedModel) -> list:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform import SpinQuantModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    if settings.scheme in _STATIC:
        scheme = rounding.scheme(_STATIC[settings.scheme])
    elif settings.scheme in GROUPED:
        default_bits = 8 if settings.scheme == names.W8A16 else 4
        weights = QuantizationArgs(
            type="int",
            num_bits=settings.bits or default_bits,
            symmetric=settings.symmetric is not False,
            strategy="group",
            group_size=settings.group_size,
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    else:
        scheme = preset_name_to_scheme(_PRESETS[settings.scheme], ["Linear"])
    if settings.scheme == names.W4AFP8:
        scheme.format = "pack-quantized"  # what vLLM reads; by default each code would take a byte

    config_groups = _config_groups(settings, model, scheme) if settings.layers else {"group_0": scheme}
    scope = {"config_groups": config_groups, "ignore": [HEAD], "kv_cache_scheme": _kv_scheme(settings)}
    if settings.scheme in GPTQ:
        return [GPTQModifier(**scope)]
    if settings.scheme == names.AUTOROUND:
        from llmcompressor.modifiers.autoround import AutoRoundModifier

        return [AutoRoundModifier(**scope, enable_torch_compile=False)]  # it would compile each layer anew
    modifiers: list = []
    if settings.scheme == names.AWQ_CT:
        modifiers.append(AWQModifier())
    if settings.scheme == names.SPINQUANT:
        hidden_size = model.config.hidden_size
        largest_power_of_two = hidden_size & -hidden_size  # that divides the hidden size
        modifiers.append(SpinQuantModifier(transform_block_size=largest_power_of_two))
    modifiers.append(QuantizationModifier(**scope))
    return modifiers


def _kv_scheme(settings: Settings) -> Any:
    """Return how keys and values are rounded, one scale per layer for each; None where nothing is stored for them."""
    return presets.static_inputs("float") if settings.kv_cache else None


def _batches(rows: Sequence[Sequence[int]], size: int = BATCH):
    """Return a loader of N calibration rows of L token ids, `size` at a time; None if there are none."""
    if not rows:
        return None
    ids = map(torch.tensor, rows)
    samples = [{"input_ids": row, "attention_mask": torch.ones(len(row), dtype=torch.long)} for row in ids]
    return torch.utils.data.DataLoader(samples, batch_size=size)


def _cast_unquantized(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert what no linear quantizes to the checkpoint's dtype: embeddings, norms, the head, and biases.

    Quantized weights and their scales stay in float32 until they are stored as codes, which are those of training.
    """
    for module in model.modules():
        is_quantized = hasattr(module, "quantization_scheme")
        for name, tensor in module.named_parameters(recurse=False):
            if tensor.dtype is torch.float32 and (not is_quantized or name == "bias"):
                tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert all tensors to the checkpoint's dtype, except NVFP4's global scales, which are float32 by definition."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype is torch.float32 and not name.endswith("global_scale"):
            tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
