"""What each number that `diagnose` prints means, in one sentence; README.md defines them."""

from __future__ import annotations

from collections.abc import Iterable

# W is a matrix before training, W' after it; Q is what a scheme, or the proxy, stores of it.
MEANINGS = {
    "outlier_frac": "share of weights above 6 × the median of |w| (diagnose.outlier_multiplier)",
    "channel_outlier_frac": "share of rows with a largest |w| above as many times the median of those",
    "kurtosis": "how heavy the tails of the weights are; 3 for a Gaussian, more for outliers",
    "w4_relative_mse": "squared error of the 4-bit proxy, round to nearest, over the squared weights; less is better",
    "w4_snr_db": "the same error as a ratio of signal to noise, mean over matrices, in decibels; more is better",
    "w4_max_error": "largest error of a single weight under the proxy",
    "max_abs": "largest |w| of all",
    "unchanged_frac": "share of weights that training left equal, bit for bit, as they are stored",
    "delta_sparsity": "share of weights that training moved by at most 1e-5",
    "code_flip_rate": "share of stored codes that differ before and after training",
    "update_survival": "length of the stored update over the true one; rounding alone can make it large, so read it "
    "with update_cosine",
    "update_cosine": "whether what is stored points along the update: 1, it is the update; 0, it is rounding noise",
    "update_projection": "share of the update that is stored: 1, all of it, whatever the noise around it; 0, none",
    "relative_mse": "squared error of the scheme's weights over the squared weights at full precision; less is better",
    "kl": "how far the scheme moves next-token distributions from full precision, in nats a token; 0: not at all",
    "top1_agreement": "share of positions with the same likeliest token as full precision",
    "n": "texts that distributions were compared on",
}
SUFFIXES = "Names that end in _base are of the model before training, those that end in a scheme of what it stores."


def meaning(metric: str) -> tuple[str, str]:
    """Return the measure that a metric is of, without its scheme, and the sentence on it.

    Raises:
        KeyError: no measure of that name has a sentence.
    """
    name = metric.partition("/")[2]
    has_other_bits = name.startswith("rtn_")  # than four, for which there are sentences
    if has_other_bits:
        name = f"w4_{name.removeprefix('rtn_')}"
    candidates = [measure for measure in MEANINGS if name == measure or name.startswith(f"{measure}_")]
    if not candidates:
        raise KeyError(metric)
    measure = max(candidates, key=len)
    sentence = MEANINGS[measure]
    if has_other_bits:
        return measure.replace("w4_", "rtn_"), sentence.replace("4-bit proxy", "proxy")
    return measure, sentence


def glossary(metrics: Iterable[str]) -> list[str]:
    """Return a line for each measure among metrics, `measure: sentence.`, and one on the ends of their names."""
    sentences = dict(meaning(metric) for metric in metrics)
    lines = [f"{measure}: {sentence}." for measure, sentence in sentences.items()]
    return [*lines, SUFFIXES]
