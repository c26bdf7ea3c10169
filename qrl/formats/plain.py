"""Quantized checkpoints as plain matrices, for machines without kernels for their codes.

vLLM's product with packed 4-bit weights on x86 (`cpu_gemm_wna16`) is built for AVX512 only: on other CPUs AWQ and GPTQ
checkpoints load and die at the first product. The plain values, in float32, are what evaluation computes with there
too.
"""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.errors import BadInput
from qrl.formats import kind, stored
from qrl.workspace import check_space

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load(path: Path | str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a quantized checkpoint as an ordinary model on the CPU, with the values of its codes.

    Args:
        path: a folder that `checkpoint.check` accepts.
        dtype: of the model; float32 and float16 hold AWQ's values exactly, bfloat16 rounds them.

    Raises:
        BadInput: as for `stored.matrices`, or the tensors do not fit the architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    settings = AutoConfig.from_pretrained(path, trust_remote_code=False)
    del settings.quantization_config
    state = stored.plain_state(path, dtype)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    tied = set()
    if settings.tie_word_embeddings:
        tied = set(getattr(model, "_tied_weights_keys", None) or ())
    misfits = sorted((set(missing) - tied) | set(unexpected))
    if misfits:
        raise BadInput(
            f"{path} does not fit its architecture {settings.model_type}: {misfits[0]} is missing or unknown."
        )
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


def needed(path: Path) -> bool:
    """Return whether vLLM on this machine's CPU can run a checkpoint only as plain matrices."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    cpu_info = Path("/proc/cpuinfo")  # on systems other than Linux vLLM has no such kernel either
    if cpu_info.is_file() and "avx512f" in cpu_info.read_text():
        return False
    quantization = checkpoint.config(path).get("quantization_config") or {}
    return kind.INT4 in kind.of(quantization) or quantization.get("quant_method") == "awq"


def write(path: Path, out: Path, dtype: str = "float32") -> Path:
    """Write a quantized checkpoint's values as an ordinary one in `dtype` to a new folder `out`, and return that.

    Scales of keys and values stay beside them: a cache in FP8 reads them whatever the weights are stored in.

    Raises:
        BadInput: as `load`, or the disk lacks the space.
    """
    import torch
    from safetensors.torch import save_file

    state = stored.plain_state(path, getattr(torch, dtype))
    state |= dict(checkpoint.tensors(path, stored.kv_scales(path)))
    check_space(out, sum(tensor.nbytes for tensor in state.values()), "An unpacked copy of the model")
    out.mkdir()
    save_file(state, out / checkpoint.WEIGHTS, {"format": "pt"})
    removed_keys = ("quantization_config", "torch_dtype")
    settings = {key: value for key, value in checkpoint.config(path).items() if key not in removed_keys}
    settings["dtype"] = dtype
    quantization = checkpoint.config(path)["quantization_config"]
    if kind.has_kv_scales(quantization):
        of_weights = {"config_groups": {}, "ignore": [], "format": "dense", "transform_config": {}}
        settings["quantization_config"] = quantization | of_weights
    (out / "config.json").write_text(json.dumps(settings, indent=1))
    copy_text_files(path, out)
    return out


def copy_text_files(source: Path, out: Path) -> None:
    """Replace the tokenizer, chat template and generation settings of `out` with those of `source`."""
    for name in checkpoint.text_files(out):
        (out / name).unlink()
    for name in ("generation_config.json", *checkpoint.text_files(source)):
        (out / name).unlink(missing_ok=True)
        if (source / name).is_file():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, out / name)
