"""Which cells may be subtracted from each other: those that one engine answered, with weights quantized in one way.

`evaluate` records both in two columns, `engine` and `settings_digest`; tables without them are not checked.
"""

import pandas as pd

from qrl import names
from qrl.errors import BadInput


def check(frame: pd.DataFrame) -> None:
    """Reject cells that differ in more than their training.

    Args:
        frame: columns variant, scheme, and optionally seed, engine, settings_digest.

    Raises:
        BadInput: there are two engines, or a scheme was applied in two ways within one training run.
    """
    engine(frame)
    if names.SETTINGS not in frame:
        return
    seeds = frame["seed"].astype(str) if "seed" in frame else pd.Series("", index=frame.index)
    cells = frame[["variant", "scheme"]].assign(settings=frame[names.SETTINGS].fillna("").astype(str), seed=seeds)
    cells = cells.drop_duplicates()
    is_base = cells["variant"] == names.BASE
    for (scheme, seed), trained in dict(list(cells[~is_base].groupby(["scheme", "seed"]))).items():
        base = cells[is_base & (cells["scheme"] == scheme)]
        own = base[base["seed"] == seed]
        if len(set(trained["settings"]) | set((own if len(own) else base)["settings"])) > 1:
            raise BadInput(
                f"The cells of scheme {scheme}{f' and seed {seed}' if seed else ''} were not stored in the same way: "
                "settings, libraries or calibration questions differ, or are unknown for one of them, so their "
                "difference would not measure training alone. Quantize all variants in one `quantize --scheme … "
                "--models base=…,grpo=…` and evaluate again."
            )


def engine(frame: pd.DataFrame) -> str:
    """Return the engine that answered every row, such as "vllm 0.31.0"; empty if that is unknown for some rows.

    Raises:
        BadInput: there are several engines, or several versions of one: their arithmetic differs. Rows without a
            version match any version.
    """
    if names.ENGINE not in frame:
        return ""
    engines = sorted(frame[names.ENGINE].dropna().astype(str).unique())
    programs = {engine.partition(" ")[0] for engine in engines}
    versions = {engine.partition(" ")[2] for engine in engines} - {""}
    if max(len(programs), len(versions)) > 1:
        raise BadInput(
            f"The cells were answered by different engines ({', '.join(engines)}) with different arithmetic, so they "
            "cannot be compared: evaluate all of them with one evaluate.engine."
        )
    return max(engines, key=len, default="") if bool(frame[names.ENGINE].notna().all()) else ""


def full_with_dtype(frame: pd.DataFrame) -> str:
    """Return how tables show the scheme `full`: `full (fp32)` if all its rows name that one dtype, else `full`."""
    dtypes = frame.loc[frame["scheme"] == names.FULL, names.DTYPE] if names.DTYPE in frame else ()
    return names.shown(names.FULL, dtypes)
