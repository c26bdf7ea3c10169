"""Which schemes are told apart by the rounds of schemes_gpu.py, and which one wins in a mode.

    python tests/benchmarks/schemes_order.py FOLDER    # with the speed-*.parquet that schemes_gpu.py wrote

Of every two schemes in a mode, tokens per second are compared round by round: a t test of the logarithms' differences; then, in
the same way, the median time to the first token, which is the prompts', and the time from there to the last, which is the answers'.
Holm's correction is over all pairs of a mode and figure, so that a winner among eleven is not one of 55 chances. A group leads
where each of it is told apart from every one outside it; a group of one wins.
"""

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl import stats
from qrl.stats.significance import holm

LEVEL = 0.05


def main() -> None:
    """Prints a paragraph a file, mode and figure."""
    for file in sorted(Path(sys.argv[1]).rglob("speed-*.parquet")):
        frame = pd.read_parquet(file)
        if frame["round"].nunique() > 1:
            print(f"\n# {file.stem}, {frame['round'].nunique()} rounds")
            for batch, rows in frame.groupby("batch"):
                for what, logs in figures(rows).items():
                    print(f"\n{batch} at once, {what}: {order(logs)}")


def figures(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Of one mode: figure → logarithms, a row per round and a column per scheme. More is better."""
    keys = ["round", "scheme"]
    seconds = rows.drop_duplicates([*keys, "turn"]).groupby(keys)["turn_s"].sum()
    first = rows.groupby(keys)["first_token_s"].median()
    after = (rows["latency_s"] - rows["first_token_s"]).groupby([rows[key] for key in keys]).median()
    found = {
        "tokens/s": rows.groupby(keys)["new_tokens"].sum() / seconds,
        "1 / s to the first token": 1 / first,
        "1 / s from there to the last": 1 / after,
    }
    return {what: np.log(values).unstack() for what, values in found.items()}


def order(logs: pd.DataFrame) -> str:
    """Who is told apart from whom, in lines."""
    from scipy.stats import t

    names = list(logs.mean().sort_values(ascending=False).index)
    n, pairs = len(logs), list(combinations(names, 2))  # the first is the better one in the mean
    ahead = [logs[a] - logs[b] for a, b in pairs]
    errors = [each.std(ddof=1) / n**0.5 for each in ahead]
    p_values = holm([2 * t.sf(each.mean() / error, n - 1) for each, error in zip(ahead, errors, strict=True)])
    reach = stats.quantile((1 + stats.LEVEL) / 2, n - 1)
    apart, lines = set(), [", ".join(f"{name} {np.exp(logs[name].mean()):,.4g}" for name in names)]
    for pair, each, error, p_value in zip(pairs, ahead, errors, p_values, strict=True):
        if p_value < LEVEL:
            apart.add(pair)
            low, high = np.exp(each.mean() - reach * error), np.exp(each.mean() + reach * error)
            lines.append(
                f"  {' / '.join(pair)}: {np.exp(each.mean()):.2f} [{low:.2f}, {high:.2f}], p = {p_value:.2g} after Holm over {len(pairs)}"
            )
    leads = next(
        (
            names[:size]
            for size in range(1, len(names))
            if {(a, b) for a in names[:size] for b in names[size:]} <= apart
        ),
        [],
    )
    return "\n".join([*lines, f"  leads: {', '.join(leads) or 'no group can be told apart from the rest'}"])


if __name__ == "__main__":
    main()
