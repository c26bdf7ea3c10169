"""Which schemes differ significantly in the rounds of schemes_gpu.py, and which group leads at a batch size.

    python tests/benchmarks/schemes_order.py FOLDER    # with the speed-*.parquet that schemes_gpu.py wrote

Every two schemes at a batch size are compared round by round with a t test of the logarithms' differences: first in
tokens per second, then in the median time to the first token (the prompt's) and from there to the last (the answer's).
p-values are Holm-corrected over all pairs of a batch size and figure, since eleven schemes give 55 pairs. A group leads
if each of its schemes differs significantly from every scheme outside it; a group of one wins.
"""

import sys
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2]))

from qrl import stats
from qrl.stats.significance import holm

LEVEL = 0.05


def main() -> None:
    """Print a paragraph for each file, batch size and figure."""
    for file in sorted(Path(sys.argv[1]).rglob("speed-*.parquet")):
        frame = pd.read_parquet(file)
        if frame["round"].nunique() > 1:
            print(f"\n# {file.stem}, {frame['round'].nunique()} rounds")
            for batch, rows in frame.groupby("batch"):
                for what, logs in figures(rows).items():
                    print(f"\n{batch} at once, {what}: {order(logs)}")


def figures(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return figure → logarithms at one batch size, a row per round and a column per scheme; more is better."""
    keys = ["round", "scheme"]
    seconds = rows.drop_duplicates([*keys, "turn"]).groupby(keys)["turn_s"].sum()
    first = rows.groupby(keys)["first_token_s"].median()
    after = (rows["latency_s"] - rows["first_token_s"]).groupby([rows[key] for key in keys]).median()
    measured = {
        "tokens/s": rows.groupby(keys)["new_tokens"].sum() / seconds,
        "1 / s to the first token": 1 / first,
        "1 / s from there to the last": 1 / after,
    }
    return {what: np.log(values).unstack() for what, values in measured.items()}


def order(logs: pd.DataFrame) -> str:
    """Return a line for each significant difference, and the leading group."""
    from scipy.stats import t

    names = list(logs.mean().sort_values(ascending=False).index)
    n, pairs = len(logs), list(combinations(names, 2))  # the first has the higher mean
    ahead = [logs[a] - logs[b] for a, b in pairs]
    errors = [difference.std(ddof=1) / n**0.5 for difference in ahead]
    p_values = holm([2 * t.sf(lead.mean() / error, n - 1) for lead, error in zip(ahead, errors, strict=True)])
    reach = stats.quantile((1 + stats.LEVEL) / 2, n - 1)
    significant, lines = set(), [", ".join(f"{name} {np.exp(logs[name].mean()):,.4g}" for name in names)]
    for pair, difference, error, p_value in zip(pairs, ahead, errors, p_values, strict=True):
        if p_value < LEVEL:
            significant.add(pair)
            low, high = (np.exp(difference.mean() + sign * reach * error) for sign in (-1, 1))
            ratio = f"{np.exp(difference.mean()):.2f} [{low:.2f}, {high:.2f}]"
            lines.append(f"  {' / '.join(pair)}: {ratio}, p = {p_value:.2g} after Holm over {len(pairs)}")
    splits = ((names[:size], names[size:]) for size in range(1, len(names)))
    leading = next((group for group, rest in splits if set(product(group, rest)) <= significant), [])
    return "\n".join([*lines, f"  leads: {', '.join(leading) or 'no group differs significantly from the rest'}"])


if __name__ == "__main__":
    main()
