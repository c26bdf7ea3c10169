"""AWQ in 4 bits with AutoAWQ: scales that protect the channels with large activations, then clipping.

Runs in the environment of projects/awq: AutoAWQ 0.2.9 is archived and needs transformers 4.51. `_autoawq` and
`calibration.rows` work around some of its defects; the method and its search grids are unchanged.
Source: Lin et al., AWQ (arXiv 2306.00978).
"""

import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from qrl import checkpoint
from qrl.errors import BadInput, QrlError
from qrl.formats import stored
from qrl.quantize import error, staging
from qrl.quantize.settings import Settings

CLIP_STEPS = 20  # of AutoAWQ's grid; its search uses the first half


def quantize(source: Path, out: Path, *, settings: Settings, rows: Sequence[Sequence[int]], device: str) -> None:
    """Write `source` in AWQ's W4 with zero points, GEMM layout, to `out`; arguments as in `_family`.

    The search draws nothing at random, but several threads of a CPU may add up in another order (README.md). It uses a
    GPU wherever there is one.

    Raises:
        BadInput: AutoAWQ does not know the architecture.
        QrlError: this is not the environment of projects/awq, or the staged copy is not the same model.
    """
    architectures, settings_class, quantizer_class = _autoawq()
    model_type = checkpoint.config(source).get("model_type")
    if model_type not in architectures:
        raise BadInput(
            f"AutoAWQ does not know the architecture '{model_type}': expected one of {', '.join(architectures)}."
        )
    with _staged(source, out, device) as model:
        wrapped = architectures[model_type](model, model_type, False, model.config, settings_class(), None)
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
            wrapped.quantize(
                quant_config={"zero_point": True, "q_group_size": settings.group_size, "w_bit": 4, "version": "GEMM"},
                quantizer_cls=quantizer_class,
                calib_data=[list(row) for row in rows],
                tokenizer=None,  # the rows are tokens already
                max_calib_samples=len(rows),
                max_calib_seq_len=len(rows[0]),
            )
        model.half()  # norms and embeddings; codes are integers and scales are float16 already
        wrapped.save_quantized(str(out))
        config = checkpoint.config(source)  # transformers 5 and vLLM read rotary settings from it
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = "float16"
        config["quantization_config"] = wrapped.quant_config.to_transformers_dict()
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def measure(source: Path, out: Path, rows: Sequence[Sequence[int]], device: str) -> error.Errors:
    """Return `error.between` of two checkpoint folders, with the stored values loaded into the staged model.

    transformers 4.51 misreads the folder `out` itself.
    """
    with _staged(source, out, device) as model:
        original = error.outputs(model, rows)
        model.load_state_dict(stored.plain_state(out, torch.float16), strict=False)
        quantized = error.outputs(model, rows)
        return error.between(original, quantized)


def _autoawq() -> tuple[dict[str, type], type, type]:
    """Return AutoAWQ's architectures, its settings class, and its quantizer with both searches corrected.

    The search for scales restores weights from a copy made by `.cpu()`, which on a CPU is no copy: the first scale
    stays in the weights and distorts every later trial (on qrl-tiny AWQ lost 0.029 ± 0.004 of accuracy instead of 0.008
    ± 0.003; 2,000 questions, paired). The search for clips is replaced by `best_clip`.
    """
    try:
        with warnings.catch_warnings(record=True):  # a long notice of its end of life, at every import
            from awq.models._config import AwqConfig
            from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP
            from awq.quantize.quantizer import AwqQuantizer
    except ImportError as error:
        raise QrlError(
            f"AutoAWQ cannot be imported here ({error}): run this step in the environment of projects/awq."
        ) from None

    class Quantizer(AwqQuantizer):
        def _compute_best_scale(self, x, w_mean, x_mean, module2inspect, *rest):
            hook = module2inspect.register_state_dict_post_hook(copy_state)
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *rest)
            finally:
                hook.remove()

        def _compute_best_clip(self, w, input_feat):
            def quantize_matrix(matrix: Tensor) -> Tensor:
                return self.pseudo_quantize_tensor(matrix)[0]

            return best_clip(w, input_feat, self.group_size, quantize_matrix)

    return AWQ_CAUSAL_LM_MODEL_MAP, AwqConfig, Quantizer


@contextlib.contextmanager
def _staged(source: Path, out: Path, device: str) -> Iterator[PreTrainedModel]:
    """Yield the staged copy, verified in float32; in float32 on a CPU, in AutoAWQ's float16 on a GPU."""
    with tempfile.TemporaryDirectory(dir=out) as staged:
        staging.stage(source, Path(staged))
        model, loading = AutoModelForCausalLM.from_pretrained(
            staged,
            torch_dtype=torch.float32,
            device_map=device,
            trust_remote_code=False,
            use_safetensors=True,
            use_cache=False,
            output_loading_info=True,
        )
        staging.verify(model, loading, source)
        model.eval().requires_grad_(False)
        yield model if device == "cpu" else model.half()


def best_clip(weight: Tensor, inputs: Tensor, group_size: int, quantize_matrix: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the largest |w| to keep in each group, (O, I/S, 1), so that a linear's output changes least.

    AutoAWQ's grid, from the largest weight down to half of it in steps of a twentieth, and its loss, the mean squared
    change of each group's share of the output. With C = XᵀX/T of a group's inputs, that loss is dᵀCd for a change d of
    its weights. No output has to be computed, so the search uses every token instead of 512, in a hundredth of the
    time.

    Args:
        weight: (O, I); the result has its dtype.
        inputs: (..., I), the linear's inputs in calibration; T tokens in all.
        group_size: S, which divides I.
        quantize_matrix: (O, I) → (O, I), to few bits and back.

    Source: AutoAWQ 0.2.9, AwqQuantizer._compute_best_clip.
    """
    groups = weight.float().reshape(len(weight), -1, group_size)
    tokens = inputs.to(weight.device).float().reshape(-1, groups.shape[1], group_size)
    products = torch.einsum("tgi,tgj->gij", tokens, tokens) / len(tokens)
    largest = groups.abs().amax(-1, keepdim=True)
    best_limit = largest
    best_loss = torch.full_like(largest, torch.inf)
    for step in range(CLIP_STEPS // 2):
        limit = largest * (1 - step / CLIP_STEPS)
        change = quantize_matrix(groups.clamp(-limit, limit).flatten(1)).reshape_as(groups) - groups
        loss = (torch.einsum("ogi,gij->ogj", change, products) * change).sum(-1, keepdim=True)
        best_limit = torch.where(loss < best_loss, limit, best_limit)
        best_loss = torch.minimum(loss, best_loss)
    return best_limit.to(weight.dtype)


def copy_state(module: torch.nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    """Replace every tensor of a state dict with a copy; a hook for `state_dict`."""
    for name, value in state.items():
        state[name] = value.clone()
