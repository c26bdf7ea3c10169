"""Collect what a folder of run.py holds into an export: outcomes by question, facts of cells, measures of weights.

    python tests/benchmarks/answer/real/collect.py WORK/sums,WORK/gsm8k OUT
    python tests/benchmarks/answer/tables.py OUT,OUT JOINED           # of several leases; of a cell, the last is kept

The files are those of `../tables.py`. The task stands where the first answer has a model's size.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import export as stores
import pandas as pd
import tables

from qrl import names

OF_A_CELL = ("quantize/layer_error", "quantize/bits_per_weight")  # metrics of the command that quantized it
WHOLE = "all"  # stands for a projection in measures of whole models
LABELS = ("layer", "tensor", "numel")  # of a matrix
OF_TRAINING = (  # what training changed; `diagnose` writes it beside both models that it compares
    *("change_norm", "relative_change", "unchanged_frac", "delta_sparsity", "code_flip_rate"),
    *("update_survival", "update_cosine", "update_projection", "effective_rank", "effective_rank_stderr"),
)


def write(folder: Path) -> None:
    """Write `export` in the folder of a task, which holds `store.db` and perhaps `weights`; nothing without a store."""
    task, out = folder.name, folder / "export"
    store = f"sqlite:///{folder.resolve()}/store.db"
    if not (folder / "store.db").is_file():
        return
    os.environ["MLFLOW_TRACKING_URI"] = store
    outcomes, cells = answers(store, task)
    measured = measures(store, folder / "weights", task)
    if len(outcomes):
        tables.write(out, outcomes, cells=cells)
    if len(measured):
        tables.write(out, measures=measured)
    tables.write(out, runs=stores.runs(store))


def answers(store: str, task: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row per answer, and a row per cell, of the newest evaluation of each cell."""
    from mlflow.artifacts import download_artifacts

    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    frames, facts = [pd.DataFrame()], []
    for (_, seed, variant, scheme), run in stores.cells(store).items():
        rows = pd.read_parquet(download_artifacts(f"{run.info.artifact_uri}/{names.QUESTIONS}"), columns=stores.KEPT)
        labels = {"size": task, "seed": seed, "variant": variant, "scheme": scheme}
        frames.append(rows[["question", "correct"]].assign(**labels))
        rates = {
            "n_tokens": float(rows["n_tokens"].mean()),
            "truncated": float((rows["finish_reason"] == "length").mean()),
            "parsed": float(rows["parsed"].notna().mean()),
        }
        facts.append(labels | {"n": len(rows)} | rates)
    return pd.concat(frames, ignore_index=True), pd.DataFrame(facts)


def measures(store: str, weights: Path, task: str) -> pd.DataFrame:
    """Return what was measured of each cell: a row for each kind of projection, and for the whole model."""
    parts = [_of_quantizing(store)]
    for folder in sorted(weights.glob("*")):
        for file, table in ((names.WEIGHTS, "weights"), (names.STORED, "stored"), (names.BEHAVIOUR, "behaviour")):
            if (folder / file).is_file():
                parts.append(_of_diagnosis(pd.read_parquet(folder / file), table).assign(seed=int(folder.name)))
    found = without_training_of_base(pd.concat(parts, ignore_index=True))
    return found.assign(size=task) if len(found) else found


def without_training_of_base(found: pd.DataFrame) -> pd.DataFrame:
    """Return measures in which the base, which was not trained, has no change by training."""
    columns = [name for name in OF_TRAINING if name in found]
    if not columns:
        return found
    return found.assign(**{name: found[name].where(found["variant"] != names.BASE) for name in columns})


def _of_quantizing(store: str) -> pd.DataFrame:
    """Return the errors of layers' outputs, as each model was quantized."""
    from mlflow import MlflowClient

    client, rows = MlflowClient(store), []
    for run in stores.finished(store, "quantize", names.TAG_VARIANT):
        parent = client.get_run(run.data.tags["mlflow.parentRunId"]).data.params
        labels = {"seed": int(parent["seed"]), "variant": run.data.tags[names.TAG_VARIANT]}
        labels |= {"scheme": run.data.tags[names.TAG_SCHEME], "table": "quantized", "projection": WHOLE}
        known = {name.partition("/")[2]: run.data.metrics[name] for name in OF_A_CELL if name in run.data.metrics}
        rows.append(labels | known)
    return pd.DataFrame(rows)


def _of_diagnosis(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """Return means over matrices, weighted by their size, by kind of projection; of behaviour the whole model's."""
    frame = frame.assign(table=table, scheme=frame.get("scheme", names.FULL))
    if table == "behaviour":
        return frame[frame["layer"] < 0].drop(columns="layer").assign(projection=WHOLE)
    frame = frame[frame["layer"] >= 0]  # embeddings and the head stay as they are
    keys = ["table", "variant", "scheme", "projection"]
    values = [name for name in frame.select_dtypes("number") if name not in LABELS]
    by_kind = _means(frame, keys, values)
    whole = _means(frame.assign(projection=WHOLE), keys, values)
    return pd.concat([by_kind, whole], ignore_index=True)


def _means(frame: pd.DataFrame, keys: list[str], values: Iterable[str]) -> pd.DataFrame:
    values = list(values)
    sums = frame[values].multiply(frame["numel"], axis=0)
    known = frame[values].notna().multiply(frame["numel"], axis=0)
    labels = [frame[key] for key in keys]
    means = sums.groupby(labels).sum(min_count=1) / known.groupby(labels).sum()
    return means.reset_index()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folders", help="WORK/TASK of run.py, several by comma")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    folders = [Path(part) for part in given.folders.split(",")]
    if absent := [folder for folder in folders if not (folder / "store.db").is_file()]:
        sys.exit(f"{absent[0]} holds no store.db: give the folder of a task below run.py's, such as WORK/sums.")
    parts = []
    for folder in folders:
        write(folder)
        parts.append(folder / "export")
    tables.join(parts, given.out)


if __name__ == "__main__":
    main()
