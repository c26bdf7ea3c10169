"""vLLM's plugin for formats that round activations: linears round their inputs, and multiply by the Q(W) they are sent.

Importing this file makes the method known to vLLM in a process. Where qrl is installed, vLLM does so in each of its
processes, through the entry point group `vllm.general_plugins`. From a checkout, an engine in the training process is
created after the import, and a server is started by `rollout_server`, which each of its processes imports. The values
are `formats/fakequant`'s, in one operation of torch. Written for vLLM 0.31.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import PerTensorScaleParameter
from vllm.platforms import current_platform

from qrl.formats.fakequant import fused, operation, rounding


@quantization.register_quantization_config(operation.METHOD)
class FakeQuant(QuantizationConfig):
    """How an engine rounds the inputs of its linears; the output head and the embeddings are not rounded."""

    def __init__(self, spec: str | None, spec_of: Mapping[str, str]) -> None:
        """Set how linears round their inputs.

        Args:
            spec: of all linears; None where linears differ.
            spec_of: linear, as the checkpoint names it → how it rounds; others do not.
        """
        super().__init__()
        self.spec = spec
        self.spec_of = spec_of

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FakeQuant:
        """Read what `operation.engine_config` returned; raise ValueError if another version of qrl did."""
        if config.get("version") != operation.version():
            raise ValueError(
                f"The engine rounds activations with version {operation.version()} of qrl's formats, but the training "
                f"with {config.get('version')}: run both from the same version of qrl."
            )
        return cls(config.get("input_activations"), config.get("linears") or {})

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Rounded | None:
        return Rounded(self._spec(prefix)) if isinstance(layer, LinearBase) else None

    def _spec(self, prefix: str) -> str | None:
        """Return how an engine's linear rounds its inputs; raise ValueError if it fuses linears that differ in that."""
        if not self.spec_of:
            return self.spec
        parent, dot, leaf = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(leaf, [leaf])
        specs = {self.spec_of.get(f"{parent}{dot}{part}") for part in parts}
        if len(specs) > 1:
            raise ValueError(f"vLLM fuses {', '.join(parts)} of {parent}, whose inputs are rounded differently.")
        return specs.pop()

    def get_name(self) -> str:
        return operation.METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


@register_weight_loader_v2_supported_method
class Rounded(LinearMethodBase):
    """An unquantized linear that rounds its inputs first, unless it has no `spec`.

    It is no subclass of vLLM's unquantized linear: some of vLLM's fused kernels take those and would skip the rounding.
    """

    def __init__(self, spec: str | None) -> None:
        self.plain = UnquantizedLinearMethod()
        self.spec = spec
        self.args = operation.arguments(spec) if spec else None

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Create the weight and, where a format calibrates one, a scale for each matrix that vLLM has fused.

        Raises:
            ValueError: tensor parallelism splits rows that share one scale.
        """
        if self.args and self.args.strategy == "token" and input_size_per_partition != input_size:
            raise ValueError("Scales per token need whole rows of inputs: start the engine without tensor parallelism.")
        if current_platform.is_cpu():
            layer._cpu_skip_gemm_dispatch = True  # a packed weight could not be replaced by the next sync
        self.plain.create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )
        if rounding.is_calibrated(self.args):
            initial_scales = torch.ones(len(output_partition_sizes), dtype=torch.float32)  # until the first sync
            loader = extra_weight_attrs["weight_loader"]
            parameter = PerTensorScaleParameter(data=initial_scales, weight_loader=loader)
            layer.register_parameter(operation.SCALE, parameter)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Check the scales and, on a GPU, the kernel: CUDA graphs cannot hold the eager functions.

        Raises:
            ValueError: a scale is missing or NaN, fused linears differ in it, or the kernel does not work here.
        """
        self.plain.process_weights_after_loading(layer)
        scales = getattr(layer, operation.SCALE, None)
        if scales is not None and not ((scales > 0) & (scales < math.inf) & (scales == scales[0])).all():
            values = ", ".join(f"{scale:g}" for scale in scales.tolist())
            raise ValueError(
                f"{layer.prefix} got the activation scales {values}, but needs one positive number: calibrate again."
            )
        weight = layer.weight
        if self.args and weight.is_cuda and not rounding.is_static(self.args):
            inputs = torch.linspace(-8, 8, 4 * weight.shape[1], dtype=weight.dtype, device=weight.device).view(4, -1)
            if not fused.by_kernel(inputs, self.args, self._scale(layer), weight.dtype):
                raise ValueError(
                    "This GPU's kernel for rounded activations differs from compressed-tensors, or Triton is missing "
                    "(the warning above says which): set rollout.engine = transformers."
                )

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        inputs = torch.ops.qrl.rounded(x, self.spec, self._scale(layer)) if self.spec else x
        return self.plain.apply(layer, inputs, bias)

    def _scale(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """Return the scale that fused linears, which have the same inputs, share."""
        scales = getattr(layer, operation.SCALE, None)
        return None if scales is None else scales[:1]


def register() -> None:
    """Do nothing more: vLLM's entry point imports this file, and that has made the method known."""


def rounding_layers(model: torch.nn.Module) -> int:
    """Return how many linears of an engine's model round their inputs."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return sum(isinstance(method, Rounded) and method.spec is not None for method in methods)
