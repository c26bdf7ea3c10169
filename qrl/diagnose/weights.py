"""Statistics of the weights: outliers, and the error of rounding to few bits.

The statistics are study 000's, so that its numbers can be reproduced: an outlier is larger than a multiple of the
median, and the proxy of quantization is `formats.proxy`. Tensors are streamed; a large model is never in memory as a
whole.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pandas

from qrl import checkpoint
from qrl.diagnose.patterns import ExactMedian
from qrl.diagnose.scan import Scan, Scratch, proxy_prefix
from qrl.diagnose.sweep import Sources, sweep
from qrl.errors import BadInput
from qrl.recipe.sections import Diagnose

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


def measure(
    path: Path | str,
    variant: str,
    settings: Diagnose = Diagnose(),
    *,
    device: str = "cpu",
    progress: Callable[[int], object] = lambda n: None,
) -> pandas.DataFrame:
    """Measure every weight matrix of a full-precision checkpoint.

    Args:
        path: checkpoint folder.
        variant: label of the rows.
        settings: of the proxy and of outliers. With `embeddings` embedding tables have rows too. An output head always
            counts, as in study 000; one that is tied to the embedding is the row lm_head.weight, or with
            embeddings the embedding's row, never both.
        device: "cpu" or "cuda".
        progress: called with 1 after each of `matrices`.

    Returns:
        A row per matrix: variant, tensor, layer (-1 outside of the layers), projection, proxy_bits, numel, and the
        measures that README.md defines, up to those of the proxy: `w4_…` for 4 bits, else `rtn_…`. A median of an even
        number is the lower one. A matrix of zeros has NaN where its spread divides.

    Raises:
        BadInput: the checkpoint is quantized or has no matrix of floats, or a tensor contains NaN or infinity.

    Source: study 000's weight statistics.
    """
    named_sources = matrices(path, settings.embeddings)
    if not named_sources:
        raise BadInput(f"{path} holds no matrix of floating-point weights: expected the weights of a language model.")
    _check_vectors(path)

    scratch = Scratch()
    unfinished = {}  # scans of float32 matrices, with a median that needs a second pass
    statistics = {}

    def start_scan(_name: str) -> Scan:
        return Scan(settings.bits, settings.group_size, scratch)

    for name, scan in sweep(named_sources, start_scan, Scan.add, device=device):
        check_finite(name, path, scan.sizes.broken)
        if scan.sizes.exact:
            statistics[name] = scan.result(settings.outlier_multiplier)
        else:
            unfinished[name] = scan
        progress(1)

    # Float32 weights have too many values to count each: the first pass found where the median is, this one finds it.
    def start_median(name: str) -> ExactMedian:
        return ExactMedian(unfinished[name].sizes, settings.outlier_multiplier)

    second_pass = [(name, sources) for name, sources in named_sources if name in unfinished]
    for name, median in sweep(second_pass, start_median, ExactMedian.add, device=device):
        statistics[name] = unfinished[name].result(settings.outlier_multiplier, median)

    rows = [
        {"variant": variant, **tensor_labels(name), "proxy_bits": settings.bits, **statistics[name]}
        for name, _ in named_sources
    ]
    return pandas.DataFrame(rows)


def summary(frame: pandas.DataFrame) -> dict[str, float]:
    """Summarize the rows of one variant from `measure`, as study 000 does.

    Returns:
        outlier_frac, channel_outlier_frac, kurtosis and the proxy's relative_mse as means weighted by size, its snr_db
        as the plain mean over matrices, and its max_error and max_abs as the largest. A matrix of zeros, with NaN as
        error and kurtosis, counts in neither.
    """

    def mean(column: str) -> float:
        sizes = frame["numel"].where(frame[column].notna())
        return float((frame[column] * sizes).sum(min_count=1) / sizes.sum(min_count=1))

    prefix = proxy_prefix(4 if "w4_snr_db" in frame else 0)
    relative_mse = f"{prefix}_relative_mse"
    snr_db = f"{prefix}_snr_db"
    max_error = f"{prefix}_max_error"
    return {
        "outlier_frac": mean("abs_outlier_frac"),
        "channel_outlier_frac": mean("channel_outlier_frac"),
        "kurtosis": mean("kurtosis"),
        relative_mse: mean(relative_mse),
        snr_db: float(frame[snr_db].mean()),
        max_error: float(frame[max_error].max()),
        "max_abs": float(frame["max_abs"].max()),
    }


def check_finite(name: str, checkpoints: object, broken: int) -> None:
    """Raise BadInput if a tensor contains NaN or infinity; `broken` is how many."""
    if broken:
        raise BadInput(
            f"{name} of {checkpoints} holds {broken:,} values that are NaN or infinite: the training that wrote it "
            "diverged."
        )


def _check_vectors(path: Path | str) -> None:
    """Check norms and biases for NaN and infinity: they are not measured, but break a model as well."""
    vectors = sorted(name for name, entry in checkpoint.entries(path).items() if _is_float(entry, 1))
    for name, values in checkpoint.tensors(path, vectors):
        check_finite(name, path, int((~values.isfinite()).sum()))


def _is_float(entry: checkpoint.Entry, dimensions: int) -> bool:
    return len(entry.shape) == dimensions and entry.dtype in checkpoint.header.FLOATS


def matrices(path: Path | str, embeddings: bool = False) -> list[tuple[str, Sources]]:
    """Return the matrices to measure, from headers only: the name to report, and where it is stored, for `sweep`."""
    quantization = checkpoint.config(path).get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method:
        raise BadInput(f"{path} is quantized ({method}): weight statistics need a full-precision checkpoint.")
    entries = {name: entry for name, entry in checkpoint.entries(path).items() if _is_float(entry, 2) and entry.numel}
    embedding_names = sorted(name for name in entries if name.endswith(EMBEDDING))
    if not embeddings:
        if HEAD not in entries and embedding_names:  # tied: the model uses the embedding as its head
            entries[HEAD] = entries[embedding_names[0]]
        for name in embedding_names:
            del entries[name]
    return [(name, [(path, entries[name])]) for name in sorted(entries)]


def tensor_labels(name: str) -> dict[str, object]:
    """Return a tensor's name, its layer (-1: none) and its projection."""
    layer = -1
    if match := re.search(r"layers\.(\d+)\.", name):
        layer = int(match[1])
    projection = name.removesuffix(".weight").rpartition(".")[2]
    return {"tensor": name, "layer": layer, "projection": projection}
