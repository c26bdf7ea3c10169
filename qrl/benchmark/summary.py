"""The results over rounds: a line per model and mode, every number with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from qrl import names
from qrl.stats import LEVEL, Estimate, quantile
from qrl.stats.text import table

ESTIMATES = ("tokens_per_s", "latency_p50_s", "latency_p95_s", "first_token_s")
SIZES = ("stored_bytes", "weights_bytes", "cache_bytes")


@dataclass(frozen=True)
class Line:
    """The results of one model in one mode."""

    variant: str
    scheme: str
    engine: str
    batch: int
    requests: int  # in all rounds
    tokens_per_s: Estimate  # of all prompts of a batch together
    latency_p50_s: Estimate
    latency_p95_s: Estimate
    first_token_s: Estimate  # median
    stored_bytes: int  # of weights on disk
    relative: Estimate | None = None  # tokens per second over the first model's, paired by round; None for the first
    weights_bytes: int | None = None  # of weights in the engine's memory; None: unknown
    cache_bytes: int | None = None  # largest size of keys and values; None: unknown, as for a server

    @property
    def label(self) -> str:
        """The cell's name in the UI."""
        return names.cell_name(self.variant, self.scheme)


def lines(frame: pd.DataFrame) -> list[Line]:
    """Return a line per model and mode of `benchmark.run`: models in the order of their first rows, modes by batch."""
    groups = dict(iter(frame.groupby(["variant", "scheme", "batch"])))
    cells = list(dict.fromkeys(zip(frame["variant"], frame["scheme"], strict=True)))
    first_cell = cells[0]
    lines_of_cells = []
    for cell in cells:
        for batch in sorted(frame["batch"].unique()):
            reference = groups[*first_cell, batch] if cell != first_cell else None
            lines_of_cells.append(_line(groups[*cell, batch], reference))
    return lines_of_cells


def over_rounds(values: Sequence[float]) -> Estimate:
    """Return the geometric mean over rounds with its 95 % t interval, computed on logarithms: times are never below 0.

    Args:
        values: one a round, at least two, all above 0.

    Raises:
        ValueError: there are fewer than two values, which support no interval, or one has no logarithm.

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


def markdown(lines: Sequence[Line], note: str, at_once: str = "batch") -> str:
    """Return the table in Markdown, with a note below it; `at_once` is the heading of the column `Line.batch`."""
    head = [
        "model", at_once, "tokens/s", f"× {lines[0].label}", "latency p50, s", "p95, s", "first token, s",
        "weights on disk, MB", "in memory, MB", "KV cache, MB",
    ]  # fmt: skip
    rows = []
    for line in lines:
        row = [
            line.label,
            str(line.batch),
            text(line.tokens_per_s, 1),
            text(line.relative, 2) if line.relative else "1",
        ]
        row += [text(seconds, 4) for seconds in (line.latency_p50_s, line.latency_p95_s, line.first_token_s)]
        row += [_megabytes(getattr(line, key)) for key in SIZES]
        rows.append(row)
    n = min(line.requests for line in lines)
    rounds = lines[0].tokens_per_s.n
    brackets = f"brackets are 95 % intervals over {rounds} interleaved rounds, n = {n} requests or more a line"
    return "\n".join(table(head, rows)) + f"\n\n{lines[0].engine}; {brackets}. {note}\n"


def metrics(lines: Sequence[Line]) -> dict[tuple[str, str], dict[int, dict[str, float]]]:
    """Return cell → batch → metric name → value; each estimate with its bounds."""
    cells: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for line in lines:
        values = {}
        for key in ESTIMATES:
            estimate = getattr(line, key)
            values[f"serve/{key}"] = estimate.estimate
            values[f"serve/{key}_low"] = estimate.low
            values[f"serve/{key}_high"] = estimate.high
        sizes = {key.replace("cache", "kv_cache"): getattr(line, key) for key in SIZES}
        values |= {f"serve/{key}": size for key, size in sizes.items() if size is not None}
        cells.setdefault((line.variant, line.scheme), {})[line.batch] = values
    return cells


def _megabytes(size: int | None) -> str:
    return "not known" if size is None else f"{size / 1e6:.2f}"


def _line(rows: pd.DataFrame, reference: pd.DataFrame | None) -> Line:
    """Return the line of a model's rows in one mode, compared with the first model's rows; None for the first."""
    speeds = _speeds(rows)
    relative = None
    if reference is not None:
        ratios = [speed / first_speed for speed, first_speed in zip(speeds, _speeds(reference), strict=True)]
        relative = over_rounds(ratios)
    by_round = rows.groupby("round")
    return Line(
        variant=rows["variant"].iloc[0],
        scheme=rows["scheme"].iloc[0],
        engine=rows["engine"].iloc[0],
        batch=int(rows["batch"].iloc[0]),
        requests=len(rows),
        tokens_per_s=over_rounds(speeds),
        relative=relative,
        latency_p50_s=over_rounds(by_round["latency_s"].quantile(0.5).tolist()),
        latency_p95_s=over_rounds(by_round["latency_s"].quantile(0.95).tolist()),
        first_token_s=over_rounds(by_round["first_token_s"].quantile(0.5).tolist()),
        **{key: _largest(rows[key]) for key in SIZES},
    )


def _largest(sizes: pd.Series) -> int | None:
    """Return the largest size in bytes; None if one is unknown."""
    return None if sizes.isna().any() else int(sizes.max())


def _speeds(rows: pd.DataFrame) -> list[float]:
    """Return each round's tokens per second: all new tokens over the wall time of all turns."""
    speeds = []
    for _, of_round in rows.groupby("round", sort=True):
        seconds = of_round.drop_duplicates("turn")["turn_s"].sum()  # every request of a turn has the turn's time
        speeds.append(of_round["new_tokens"].sum() / seconds)
    return speeds


def text(value: Estimate, digits: int) -> str:
    """Return an estimate with its interval."""
    return f"{value.estimate:,.{digits}f} [{value.low:,.{digits}f}, {value.high:,.{digits}f}]"
