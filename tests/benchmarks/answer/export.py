"""Export a sweep's store: outcomes by question, and measures of weights, in files that lie beside the code.

python tests/benchmarks/answer/export.py sqlite:///WORK/store.db WORK/weights OUT
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

import pandas as pd
import tables

from qrl import names
from qrl.tracking import reuse

KEPT = ["question", "correct", "parsed", "n_tokens", "finish_reason"]
FINISHED = "attributes.status = 'FINISHED'"
TAGS = ("mlflow.runName", "mlflow.parentRunId", "mlflow.source.git.commit")  # beside qrl's; others name the machine


def with_checkout() -> str:
    """Return PYTHONPATH with this checkout first."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", ""))))


def cells(store: str) -> dict[tuple[str, int, str, str], object]:
    """Return the newest evaluation of each cell that ended well, by folder of the base model, seed, variant, scheme."""
    from mlflow import MlflowClient

    client, found = MlflowClient(store), {}
    for run in _runs(store, f"{FINISHED} and tags.`{names.TAG_SCHEME}` != '' and tags.`{names.TAG_STEP}` = 'evaluate'"):
        parent = client.get_run(run.data.tags["mlflow.parentRunId"]).data.params
        key = (parent["model"], int(parent["seed"]), run.data.params["variant"], run.data.params["scheme"])
        found[key] = run
    return found


def _runs(store: str, query: str = "") -> Iterator:
    """Yield the runs of a store, the oldest first."""
    from mlflow import MlflowClient

    client, token = MlflowClient(store), None
    while True:
        page = client.search_runs(["0"], query, max_results=1000, order_by=["attributes.start_time"], page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def runs(store: str) -> pd.DataFrame:
    """Return what a store holds of its runs: run, kind, key, value; metrics as they were last logged."""
    work, checkout, rows = Path(store.removeprefix("sqlite:///")).parent, Path(__file__).parents[3], []
    for run in _runs(store):
        seconds = "" if run.info.end_time is None else (run.info.end_time - run.info.start_time) / 1000
        tags = run.data.tags.items()
        kinds = {
            "attribute": {"status": run.info.status, "start_time_ms": run.info.start_time, "seconds": seconds},
            "param": run.data.params,
            "tag": {k: v for k, v in tags if k in TAGS or (k.startswith("qrl.") and k != names.TAG_PID)},
            "metric": run.data.metrics,
        }
        for kind, held in kinds.items():
            for key, value in held.items():
                said = str(value).replace(str(work), "WORK").replace(str(checkout), ".")
                rows.append((run.info.run_id, kind, key, said))
    return pd.DataFrame(rows, columns=["run", "kind", "key", "value"])


def address(store: str, run) -> str:
    """Return the address of the model that a run made, or evaluated."""
    import mlflow

    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"

    mlflow.set_tracking_uri(store)
    return reuse.outputs(run).models["model"]


def quantized(store: str, base: str, seed: int | None) -> dict[tuple[str, str], str]:
    """Return the addresses of a model's quantized forms under a seed, or under any, by variant and scheme."""
    from mlflow import MlflowClient

    client, found = MlflowClient(store), {}
    for run in _runs(
        store, f"{FINISHED} and tags.`{names.TAG_STEP}` = 'quantize' and tags.`{names.TAG_VARIANT}` != ''"
    ):
        parent = client.get_run(run.data.tags["mlflow.parentRunId"]).data.params
        if parent["model"] == base and seed in (None, int(parent["seed"])):
            found[run.data.tags[names.TAG_VARIANT], run.data.tags[names.TAG_SCHEME]] = address(store, run)
    return found


def trained(store: str, variant: str, **asked: str | int) -> str:
    """Return the address of what the newest training of a variant with these parameters made; nothing without one."""
    from mlflow import MlflowClient

    words = [FINISHED, f"tags.`{names.TAG_STEP}` = 'train'", f"tags.`{names.TAG_VARIANT}` = '{variant}'"]
    query = " and ".join([*words, *(f"params.`{key}` = '{value}'" for key, value in asked.items())])
    runs = MlflowClient(store).search_runs(["0"], query, max_results=1)
    return address(store, runs[0]) if runs else ""


def write(store: str, weights: Path, out: Path) -> None:
    """Write a sweep's answers, and the measures of its weights, as an export.

    Args:
        store: address of the sweep's store.
        weights: folder of `diagnose`'s tables, SIZE-SEED.
        out: folder of the export.
    """
    from mlflow.artifacts import download_artifacts

    frames, whole = [], []
    for (base, seed, variant, scheme), run in cells(store).items():
        rows = pd.read_parquet(download_artifacts(f"{run.info.artifact_uri}/{names.QUESTIONS}"), columns=KEPT)
        size = Path(base).name.partition("-")[0]
        labels = {"size": size, "seed": seed, "variant": variant, "scheme": scheme}
        frames.append(rows[["question", "correct"]].assign(**labels))
        rates = {
            "n_tokens": float(rows["n_tokens"].mean()),
            "truncated": float((rows["finish_reason"] == "length").mean()),
            "parsed": float(rows["parsed"].notna().mean()),
        }
        whole.append(labels | {"n": len(rows)} | rates)
    measured = []
    for folder in sorted(weights.glob("*-*")):
        size, _, seed = folder.name.partition("-")
        for file in (names.STORED, names.WEIGHTS, names.BEHAVIOUR):
            if (folder / file).is_file():
                measured.append(pd.read_parquet(folder / file).assign(size=size, seed=int(seed), table=Path(file).stem))
    if frames:
        print(f"{out}: {sum(map(len, frames)):,} answers of {len(frames)} cells", flush=True)
        tables.write(out, pd.concat(frames, ignore_index=True), cells=pd.DataFrame(whole))
    if measured:
        tables.write(out, weights=pd.concat(measured, ignore_index=True))
    tables.write(out, runs=runs(store))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
