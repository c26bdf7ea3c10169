"""Which schemes are told apart by the rounds of schemes_gpu.py, and which one wins in a mode.

    python tests/benchmarks/schemes_order.py FOLDER…    # with the speed-*.parquet that schemes_gpu.py wrote

Of every two schemes in a mode, tokens per second are compared round by round: a t test of the logarithms' differences. Holm's
correction is over all pairs of the mode, so that a winner among eleven is not one of 55 chances. A scheme wins where it is told
apart from every other; a group leads where each is told apart from every one outside it.
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
    """Prints a paragraph a file and mode."""
    for folder in sys.argv[1:]:
        for file in sorted(Path(folder).rglob("speed-*.parquet")):
            frame = pd.read_parquet(file)
            if frame["round"].nunique() > 1:
                print(f"\n# {file.stem}, {frame['round'].nunique()} rounds")
                for batch in sorted(frame["batch"].unique()):
                    print(f"\n{batch} at once: {mode(frame[frame['batch'] == batch])}")


def speeds(rows: pd.DataFrame) -> pd.DataFrame:
    """Logarithm of tokens per second: a row per round, a column per scheme, the fastest first."""
    tokens = rows.groupby(["round", "scheme"])["new_tokens"].sum()
    seconds = rows.drop_duplicates(["round", "scheme", "turn"]).groupby(["round", "scheme"])["turn_s"].sum()
    logs = np.log(tokens / seconds).unstack()
    return logs[logs.mean().sort_values(ascending=False).index]


def mode(rows: pd.DataFrame) -> str:
    """What one mode's rounds say, in lines."""
    from scipy.stats import t

    logs = speeds(rows)
    n = len(logs)
    pairs = list(combinations(logs.columns, 2))  # the first is the faster in the mean
    lost = [logs[a] - logs[b] for a, b in pairs]
    errors = [each.std(ddof=1) / n**0.5 for each in lost]
    corrected = dict(zip(pairs, holm([2 * t.sf(abs(each.mean()) / error, n - 1) for each, error in zip(lost, errors, strict=True)]), strict=True))
    reach = stats.quantile((1 + stats.LEVEL) / 2, n - 1)
    lines = [", ".join(f"{name} {np.exp(logs[name].mean()):,.0f}" for name in logs)]
    for (a, b), each, error in zip(pairs, lost, errors, strict=True):
        if corrected[a, b] < LEVEL:
            low, high = np.exp(each.mean() - reach * error), np.exp(each.mean() + reach * error)
            lines.append(f"  {a} / {b}: {np.exp(each.mean()):.2f} [{low:.2f}, {high:.2f}], p = {corrected[a, b]:.2g} after Holm over {len(pairs)}")
    names = list(logs.columns)
    groups = [names[:size] for size in range(1, len(names)) if all(corrected[a, b] < LEVEL for a in names[:size] for b in names[size:])]
    lines.append(f"  leads: {', '.join(groups[0]) if groups else 'no group can be told apart from the rest'}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
