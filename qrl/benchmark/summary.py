"""What the rounds say: a line per model and mode, every figure with its interval over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qrl import names
from qrl.stats import LEVEL, Estimate, quantile

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Line:
    """One model in one mode."""

    variant: str
    scheme: str
    engine: str
    batch: int
    requests: int  # in all rounds
    tokens_per_s: Estimate  # written by all prompts of a batch together
    relative: Estimate | None  # tokens per second over the first model's, round by round; None: it is the first
    latency_p50_s: Estimate
    latency_p95_s: Estimate
    first_token_s: Estimate  # median
    stored_bytes: int  # of weights on disk
    weights_bytes: int | None  # of weights in the engine's memory; None: not known
    cache_bytes: int | None  # largest that keys and values grew to; None: not known, as of a server

    @property
    def label(self) -> str:
        """As the UI shows a cell."""
        return names.cell_name(self.variant, self.scheme)


def lines(frame: pd.DataFrame) -> list[Line]:
    """A line per model and mode, models in their first order, modes by batch.

    Args:
        frame: of `benchmark.run`.
    """
    order = list(dict.fromkeys(zip(frame["variant"], frame["scheme"], strict=True)))
    return [_line(frame, cell, order[0], batch) for cell in order for batch in sorted(frame["batch"].unique())]


def over_rounds(values: Sequence[float]) -> Estimate:
    """Geometric mean over rounds with its 95 % t interval, both by way of logarithms: a time or a speed is never below 0.

    Args:
        values: one a round, at least two, all above 0.

    Raises:
        ValueError: fewer than two, which support no interval, or one that has no logarithm.

    Source: Fleming and Wallace, How not to lie with statistics (CACM 29, 1986): ratios have a geometric mean.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"{n} round supports no interval: at least 2 are needed")
    if min(values) <= 0:
        raise ValueError(f"a round's value is {min(values)}: expected times and speeds above 0")
    logs = [math.log(value) for value in values]
    mean = math.fsum(logs) / n
    stderr = math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / (n - 1) / n)
    reach = quantile((1 + LEVEL) / 2, n - 1) * stderr
    centre = math.exp(mean)
    return Estimate(centre, centre * stderr, math.exp(mean - reach), math.exp(mean + reach), n, df=n - 1)


def markdown(found: Sequence[Line], note: str, at_once: str = "batch") -> str:
    """The table for people.

    Args:
        found: of `lines`, or `http.lines`.
        note: a sentence below it.
        at_once: what `Line.batch` counts.
    """
    head = (
        "model",
        at_once,
        "tokens/s",
        f"× {found[0].label}",
        "latency p50, s",
        "p95, s",
        "first token, s",
        "weights on disk, MB",
        "in memory, MB",
        "KV cache, MB",
    )
    rows = [
        (
            line.label, str(line.batch), _text(line.tokens_per_s, 1), _text(line.relative, 2) if line.relative else "1",
            _text(line.latency_p50_s, 4), _text(line.latency_p95_s, 4), _text(line.first_token_s, 4),
            *("not known" if size is None else f"{size / 1e6:.2f}" for size in (line.stored_bytes, line.weights_bytes, line.cache_bytes)),
        )
        for line in found
    ]  # fmt: skip
    table = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    rounds = found[0].tokens_per_s.n
    text = f"{found[0].engine}; brackets are 95 % intervals over {rounds} interleaved rounds, n = {min(line.requests for line in found)} requests or more a line."
    return "\n".join(f"| {' | '.join(row)} |" for row in table) + f"\n\n{text} {note}\n"


def metrics(found: Sequence[Line]) -> dict[tuple[str, str], dict[int, dict[str, float]]]:
    """Cell → batch → metric name → value; each estimate with its bounds."""
    values: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for line in found:
        named = {
            names.SERVE_TOKENS_PER_S: line.tokens_per_s,
            names.SERVE_LATENCY_P50: line.latency_p50_s,
            names.SERVE_LATENCY_P95: line.latency_p95_s,
            names.SERVE_FIRST_TOKEN: line.first_token_s,
        }
        flat = {key: value.estimate for key, value in named.items()}
        flat |= {f"{key}_{bound}": getattr(value, bound) for key, value in named.items() for bound in ("low", "high")}
        sizes = {
            "stored_bytes": line.stored_bytes,
            "kv_cache_bytes": line.cache_bytes,
            "weights_bytes": line.weights_bytes,
        }
        flat |= {f"serve/{key}": size for key, size in sizes.items() if size is not None}
        values.setdefault((line.variant, line.scheme), {})[line.batch] = flat
    return values


def _line(frame: pd.DataFrame, cell: tuple[str, str], first: tuple[str, str], batch: int) -> Line:
    own, reference = (_speeds(frame, which, batch) for which in (cell, first))
    rows = _rows(frame, cell, batch)
    by_round = rows.groupby("round")
    return Line(
        *cell,
        engine=rows["engine"].iloc[0],
        batch=int(batch),
        requests=len(rows),
        tokens_per_s=over_rounds(own),
        relative=None if cell == first else over_rounds([a / b for a, b in zip(own, reference, strict=True)]),
        latency_p50_s=over_rounds(by_round["latency_s"].quantile(0.5).tolist()),
        latency_p95_s=over_rounds(by_round["latency_s"].quantile(0.95).tolist()),
        first_token_s=over_rounds(by_round["first_token_s"].quantile(0.5).tolist()),
        **{
            size: None if rows[size].isna().any() else int(rows[size].max())
            for size in ("stored_bytes", "weights_bytes", "cache_bytes")
        },
    )


def _rows(frame: pd.DataFrame, cell: tuple[str, str], batch: int) -> pd.DataFrame:
    return frame[(frame["variant"] == cell[0]) & (frame["scheme"] == cell[1]) & (frame["batch"] == batch)]


def _speeds(frame: pd.DataFrame, cell: tuple[str, str], batch: int) -> list[float]:
    """Tokens per second of each round: all that were written over the wall time of all turns."""
    found = []
    for _, rows in _rows(frame, cell, batch).groupby("round", sort=True):
        found.append(rows["new_tokens"].sum() / rows.drop_duplicates("turn")["turn_s"].sum())
    return found


def _text(value: Estimate, digits: int) -> str:
    return f"{value.estimate:,.{digits}f} [{value.low:,.{digits}f}, {value.high:,.{digits}f}]"
