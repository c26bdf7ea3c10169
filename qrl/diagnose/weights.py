"""What is in the weights: outliers, how well they round to few bits, and how far training moved them.

The measures are the seed study's, so that its numbers can be reproduced: an outlier is larger than a multiple of the
median, and the 4-bit proxy is `formats.rtn`. Tensors are streamed; a large model never lies in memory as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.errors import BadInput, QrlError
from qrl.formats import rtn

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
Progress = Callable[[int], object]


def measure(
    path: Path | str,
    variant: str,
    *,
    bits: int = 4,
    group_size: int = 128,
    outlier_multiplier: float = 6.0,
    embeddings: bool = False,
    progress: Progress = lambda n: None,
) -> pandas.DataFrame:
    """Statistics of every weight matrix of a full-precision checkpoint.

    Args:
        path: checkpoint folder.
        variant: label of the rows.
        bits: of the round-to-nearest proxy.
        group_size: input channels that share a scale of the proxy.
        outlier_multiplier: an outlier is larger than this times the median.
        embeddings: measure embedding tables, too. An output head always counts, as in the seed study; one that is tied to
            the embedding is the row lm_head.weight, or with embeddings that of the embedding, never both.
        progress: called with 1 after each matrix; `count` gives the total.

    Returns:
        A row per matrix: variant, tensor, layer (-1 outside of the layers), projection, numel, and the measures of `describe`.

    Raises:
        BadInput: a quantized checkpoint.
        QrlError: a matrix holds NaN or infinity; the sentence names it and how many.
    """
    import pandas

    rows = []
    for name, tensor in _matrices(path, embeddings):
        rows.append({"variant": variant, **_place(name), **describe(_finite(name, tensor), bits, group_size, outlier_multiplier)})
        progress(1)
    return pandas.DataFrame(rows)


def describe(weight: Tensor, bits: int = 4, group_size: int = 128, outlier_multiplier: float = 6.0) -> dict[str, float]:
    """The measures of one matrix.

    Args:
        weight: (out_features, in_features), float32.
        bits, group_size: of the round-to-nearest proxy.
        outlier_multiplier: m below.

    Returns:
        numel; max_abs, mean_abs, median_abs, std and rms in the unit of the weights; kurtosis, E[(w - mean)^4] / std^4, 3 for
        a Gaussian; abs_outlier_frac, the share of |w| above m times the median |w|; channel_outlier_frac, the share of output
        channels whose largest |w| is above m times the median of those; w4_relative_mse, w4_snr_db (dB), w4_max_error of the
        proxy. std is the population's; a median of an even number is the lower one. A matrix of zeros has NaN where its
        spread divides.

    Source: the seed study's weight statistics.
    """
    import torch

    size = weight.abs()
    centred = weight - weight.mean(dtype=torch.float64).float()
    variance = centred.square().mean(dtype=torch.float64)
    median = size.median()
    peaks = size.amax(1)
    lossy = rtn.error(weight, bits, group_size) if size.max() > 0 else rtn.Error(*[float("nan")] * 3)
    return {
        "numel": weight.numel(),
        "max_abs": size.max().item(),
        "mean_abs": size.mean(dtype=torch.float64).item(),
        "median_abs": median.item(),
        "std": variance.sqrt().item(),
        "rms": weight.square().mean(dtype=torch.float64).sqrt().item(),
        "kurtosis": (centred.square().square().mean(dtype=torch.float64) / variance.square()).item(),
        "abs_outlier_frac": (size > outlier_multiplier * median).double().mean().item(),
        "channel_outlier_frac": (peaks > outlier_multiplier * peaks.median()).double().mean().item(),
        "w4_relative_mse": lossy.relative_mse,
        "w4_snr_db": lossy.snr_db,
        "w4_max_error": lossy.max_error,
    }


def movement(
    base: Path | str,
    trained: Path | str,
    *,
    bits: int = 4,
    group_size: int = 128,
    embeddings: bool = False,
    progress: Progress = lambda n: None,
) -> pandas.DataFrame:
    """How far training moved every weight matrix, and how many codes of the round-to-nearest proxy that changed.

    Args:
        base, trained: full-precision checkpoint folders of one architecture.
        bits, group_size: of the proxy; each checkpoint is coded under its own scales.
        embeddings: as in `measure`.
        progress: called with 1 after each pair of matrices.

    Returns:
        A row per matrix: tensor, layer, projection, numel, relative_change (the Frobenius norm of the change over that of
        the base) and code_flip_rate (share of weights whose code differs).

    Raises:
        BadInput: a quantized checkpoint, or two that differ in tensors or shapes; the sentence lists the difference.
        QrlError: a matrix holds NaN or infinity.
    """
    import pandas

    _check_same(base, trained)
    rows = []
    for (name, before), (_, after) in zip(_matrices(base, embeddings), _matrices(trained, embeddings), strict=True):
        before, after = _finite(name, before), _finite(name, after)  # noqa: PLW2901
        old, new = (rtn.encode(weight, bits, group_size)[0].flatten(1)[:, : weight.shape[1]] for weight in (before, after))
        change, norm = (after - before).double().norm().item(), before.double().norm().item()
        rows.append(
            {
                **_place(name),
                "numel": before.numel(),
                "relative_change": change / norm if norm else float("nan"),
                "code_flip_rate": (old != new).double().mean().item(),
            }
        )
        progress(1)
    return pandas.DataFrame(rows)


def count(path: Path | str, embeddings: bool = False) -> int:
    """Matrices that `measure` will look at, for a progress bar; read from headers only."""
    return len(_names(path, embeddings))


def summary(frame: pandas.DataFrame) -> dict[str, float]:
    """One number a measure, as the seed study sums up a variant's rows.

    Args:
        frame: rows of one variant from `measure`.

    Returns:
        outlier_frac, channel_outlier_frac, w4_relative_mse and kurtosis as means weighted by size, w4_snr_db as the plain
        mean over matrices, and w4_max_error and max_abs as the largest.
    """
    weights = frame["numel"] / frame["numel"].sum()
    return {
        "outlier_frac": float((frame["abs_outlier_frac"] * weights).sum()),
        "channel_outlier_frac": float((frame["channel_outlier_frac"] * weights).sum()),
        "kurtosis": float((frame["kurtosis"] * weights).sum()),
        "w4_relative_mse": float((frame["w4_relative_mse"] * weights).sum()),
        "w4_snr_db": float(frame["w4_snr_db"].mean()),
        "w4_max_error": float(frame["w4_max_error"].max()),
        "max_abs": float(frame["max_abs"].max()),
    }


def code_flip_rate(moved: pandas.DataFrame) -> float:
    """Share of all weights whose code differs, from the rows of `movement`."""
    return float((moved["code_flip_rate"] * moved["numel"]).sum() / moved["numel"].sum())


def _names(path: Path | str, embeddings: bool) -> dict[str, str]:
    """Matrices to look at, in order: the name to report → the name of the stored tensor."""
    if method := (checkpoint.config(path).get("quantization_config") or {}).get("quant_method"):
        raise BadInput(f"{path} is quantized ({method}): weight statistics are those of a full-precision checkpoint.")
    stored = {
        name: name
        for name, entry in sorted(checkpoint.entries(path).items())
        if len(entry.shape) == 2 and entry.dtype in checkpoint.header.FLOATS
    }
    tables = [name for name in stored if name.endswith(EMBEDDING)]
    if HEAD not in stored and tables and not embeddings:  # a language model without a head of its own uses the embedding as one
        stored[HEAD] = tables[0]
    return {name: source for name, source in sorted(stored.items()) if embeddings or name not in tables}


def _matrices(path: Path | str, embeddings: bool) -> Iterator[tuple[str, Tensor]]:
    wanted = _names(path, embeddings)
    for name, (_, tensor) in zip(wanted, checkpoint.tensors(path, list(wanted.values())), strict=True):
        yield name, tensor


def _finite(name: str, tensor: Tensor) -> Tensor:
    """The matrix in float32, which must hold numbers only."""
    weight = tensor.float()
    broken = weight.numel() - int(weight.isfinite().sum())
    if broken:
        raise QrlError(f"{name} holds {broken:,} values that are NaN or infinite: the training that wrote it went wrong.")
    return weight


def _place(name: str) -> dict[str, object]:
    layer = re.search(r"layers\.(\d+)\.", name)
    return {
        "tensor": name,
        "layer": int(layer.group(1)) if layer else -1,
        "projection": name.removesuffix(".weight").rpartition(".")[2],
    }


def _check_same(base: Path | str, trained: Path | str) -> None:
    shapes = [{name: entry.shape for name, entry in checkpoint.entries(path).items()} for path in (base, trained)]
    differing = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
    if differing:
        shown = ", ".join(f"{name} ({shapes[0].get(name)} and {shapes[1].get(name)})" for name in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise BadInput(f"{base} and {trained} are not one architecture: {shown}{more} differ; compare a model with its own base.")
