"""Which cells may be subtracted from each other: those that one engine answered, from weights stored in one way.

A table of answers says so in two columns that `evaluate` writes, `engine` and `settings_digest`; tables without them are
taken at their word.
"""

from __future__ import annotations

import pandas as pd

from qrl import names
from qrl.errors import BadInput


def check(frame: pd.DataFrame) -> None:
    """Refuses cells whose difference would not be their weights' alone.

    Args:
        frame: columns variant, scheme, and optionally seed, engine, settings_digest.

    Raises:
        BadInput: two engines, or a scheme that was applied in two ways within one training run.
    """
    engine(frame)
    if names.SETTINGS not in frame:
        return
    seeds = frame["seed"].astype(str) if "seed" in frame else pd.Series("", index=frame.index)
    table = (
        frame[["variant", "scheme"]]
        .assign(settings=frame[names.SETTINGS].fillna("").astype(str), seed=seeds)
        .drop_duplicates()
    )
    for (scheme, seed), trained in table[table["variant"] != names.BASE].groupby(["scheme", "seed"]):
        base = table[(table["variant"] == names.BASE) & (table["scheme"] == scheme)]
        own = base[base["seed"] == seed]
        ways = set(trained["settings"]) | set((own if len(own) else base)["settings"])
        if len(ways) > 1:
            raise BadInput(
                f"The cells of scheme {scheme}{f' and seed {seed}' if seed else ''} were not stored in the same way: settings, "
                "libraries or calibration questions differ, or are not known of one of them, so their difference would not be "
                "training's alone. Quantize all variants in one `quantize --scheme … --models base=…,grpo=…` and evaluate again."
            )


def engine(frame: pd.DataFrame) -> str:
    """The one engine that answered every row, "vllm 0.31.0" say; empty where the rows do not tell.

    Raises:
        BadInput: there are several, or several versions of one: their arithmetic differs. Rows that name no version agree with any.
    """
    if names.ENGINE not in frame:
        return ""
    found = sorted(frame[names.ENGINE].dropna().astype(str).unique())
    if (
        len({each.partition(" ")[0] for each in found}) > 1
        or len({each.partition(" ")[2] for each in found} - {""}) > 1
    ):
        raise BadInput(
            f"The cells were answered by different engines ({', '.join(found)}), whose arithmetic differs, so they cannot be "
            "subtracted: evaluate all of them with one evaluate.engine."
        )
    return max(found, key=len, default="") if frame[names.ENGINE].notna().all() else ""
