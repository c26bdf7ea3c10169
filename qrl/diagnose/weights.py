"""What is in the weights: outliers, and how well they round to few bits.

The measures are the seed study's, so that its numbers can be reproduced: an outlier is larger than a multiple of the
median, and the 4-bit proxy is `formats.rtn`. Tensors are streamed; a large model never lies in memory as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint
from qrl.diagnose.exact_median import Closer
from qrl.diagnose.scan import Scan, Scratch
from qrl.diagnose.sweep import sweep
from qrl.errors import BadInput
from qrl.formats.header import Entry

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
    device: str = "cpu",
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
        device: "cpu" or "cuda".
        progress: called with 1 after each matrix; `count` gives the total.

    Returns:
        A row per matrix: variant, tensor, layer (-1 outside of the layers), projection, proxy_bits, numel, and the measures of
        `describe`, where `w4_` stands for the proxy whatever its bits, since 4 are the seed study's.

    Raises:
        BadInput: a quantized checkpoint, or one without a matrix of floats; or a matrix or vector holds NaN or infinity; the
            sentence names it and how many.
    """
    import pandas

    wanted = matrices(path, embeddings)
    if not wanted:
        raise BadInput(f"{path} holds no matrix of floating-point weights: expected the weights of a language model.")
    _check_vectors(path)
    scans, results, scratch = {}, {}, Scratch()
    for name, scan in sweep(
        wanted, lambda _: Scan(bits, group_size, scratch), lambda to, first, block: to.add(block, first), device=device
    ):
        if scan.sizes.broken:
            raise _broken(name, path, scan.sizes.broken)
        if scan.exact():
            results[name] = scan.result(outlier_multiplier)
        else:
            scans[name] = scan
        progress(1)
    again = [(name, sources) for name, sources in wanted if name in scans]
    for name, closer in sweep(
        again,
        lambda name: Closer(scans[name].sizes, outlier_multiplier),
        lambda to, _, block: to.add(block),
        device=device,
    ):
        results[name] = scans[name].result(outlier_multiplier, closer)
    return pandas.DataFrame(
        {"variant": variant, **place(name), "proxy_bits": bits, **results[name]} for name, _ in wanted
    )


def describe(weight: Tensor, bits: int = 4, group_size: int = 128, outlier_multiplier: float = 6.0) -> dict[str, float]:
    """The measures of one matrix.

    Args:
        weight: (out_features, in_features), any float dtype.
        bits, group_size: of the round-to-nearest proxy.
        outlier_multiplier: m below.

    Returns:
        numel; max_abs, mean, mean_abs, median_abs, abs_q99, abs_q999, abs_q9999 (quantiles of |w|; of float32 up to 1/256 too
        small, else exact), std and rms in the unit of the weights; kurtosis, E[(w - mean)^4] / std^4,
        3 for a Gaussian; abs_outlier_frac, the share of |w| above m times the median |w|; channel_outlier_frac, the share of
        output channels whose largest |w| is above m times the median of those; w4_relative_mse, w4_snr_db (dB), w4_max_error of
        the proxy. std is the population's; a median of an even number is the lower one. A matrix of zeros has NaN where its
        spread divides.

    Source: the seed study's weight statistics.
    """
    scan = Scan(bits, group_size)
    scan.add(weight)
    closer = None
    if not scan.exact():
        closer = Closer(scan.sizes, outlier_multiplier)
        closer.add(weight)
    return scan.result(outlier_multiplier, closer)


def count(path: Path | str, embeddings: bool = False) -> int:
    """Matrices that `measure` will look at, for a progress bar; read from headers only."""
    return len(_names(path, embeddings))


def summary(frame: pandas.DataFrame) -> dict[str, float]:
    """One number a measure, as the seed study sums up a variant's rows.

    Args:
        frame: rows of one variant from `measure`.

    Returns:
        outlier_frac, channel_outlier_frac, w4_relative_mse and kurtosis as means weighted by size, w4_snr_db as the plain
        mean over matrices, and w4_max_error and max_abs as the largest. A matrix of zeros, whose error and kurtosis are NaN,
        counts in neither.
    """

    def mean(column: str) -> float:
        sizes = frame["numel"].where(frame[column].notna())
        return float((frame[column] * sizes).sum(min_count=1) / sizes.sum(min_count=1))

    return {
        "outlier_frac": mean("abs_outlier_frac"),
        "channel_outlier_frac": mean("channel_outlier_frac"),
        "kurtosis": mean("kurtosis"),
        "w4_relative_mse": mean("w4_relative_mse"),
        "w4_snr_db": float(frame["w4_snr_db"].mean()),
        "w4_max_error": float(frame["w4_max_error"].max()),
        "max_abs": float(frame["max_abs"].max()),
    }


def _check_vectors(path: Path | str) -> None:
    """Refuses norms and biases that hold NaN or infinity: they are not measured, but a model is broken by one as well."""
    vectors = sorted(
        name
        for name, entry in checkpoint.entries(path).items()
        if len(entry.shape) == 1 and entry.dtype in checkpoint.header.FLOATS
    )
    for name, values in checkpoint.tensors(path, vectors):
        if broken := int((~values.isfinite()).sum()):
            raise _broken(name, path, broken)


def _broken(name: str, path: Path | str, count: int) -> BadInput:
    return BadInput(
        f"{name} of {path} holds {count:,} values that are NaN or infinite: the training that wrote it went wrong."
    )


def _names(path: Path | str, embeddings: bool) -> dict[str, str]:
    """Matrices to look at, in order: the name to report → the name of the stored tensor."""
    if method := (checkpoint.config(path).get("quantization_config") or {}).get("quant_method"):
        raise BadInput(f"{path} is quantized ({method}): weight statistics are those of a full-precision checkpoint.")
    stored = {
        name: name
        for name, entry in sorted(checkpoint.entries(path).items())
        if len(entry.shape) == 2 and 0 not in entry.shape and entry.dtype in checkpoint.header.FLOATS
    }
    tables = [name for name in stored if name.endswith(EMBEDDING)]
    if (
        HEAD not in stored and tables and not embeddings
    ):  # a language model without a head of its own uses the embedding as one
        stored[HEAD] = tables[0]
    return {name: source for name, source in sorted(stored.items()) if embeddings or name not in tables}


def matrices(path: Path | str, embeddings: bool = False) -> list[tuple[str, list[tuple[Path | str, Entry]]]]:
    """Matrices to look at, as `sweep` takes them: the name to report, and where it is stored."""
    found = checkpoint.entries(path)
    return [(name, [(path, found[source])]) for name, source in _names(path, embeddings).items()]


def place(name: str) -> dict[str, object]:
    """A tensor's name, the layer it belongs to (-1: none) and its projection."""
    layer = re.search(r"layers\.(\d+)\.", name)
    return {
        "tensor": name,
        "layer": int(layer.group(1)) if layer else -1,
        "projection": name.removesuffix(".weight").rpartition(".")[2],
    }
