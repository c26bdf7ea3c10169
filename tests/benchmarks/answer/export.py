"""Export a sweep's store: outcomes by question, and measures of weights, in files that lie beside the code.

    python tests/benchmarks/answer/export.py sqlite:///WORK/store.db OUT --weights WORK/weights

OUT/cells.parquet also has the number of parameters of each base model that is still where it was.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
sys.path.insert(0, str(Path(__file__).parent))

import pandas as pd
import tables

from qrl import checkpoint, names
from qrl.errors import BadInput
from qrl.tracking import addresses, reuse
from qrl.tracking import store as stores

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
    for run in finished(store, "evaluate", names.TAG_SCHEME):
        parent = client.get_run(run.data.tags["mlflow.parentRunId"]).data.params
        key = (parent["model"], int(parent["seed"]), run.data.params["variant"], run.data.params["scheme"])
        found[key] = run
    return found


def finished(store: str, step: str, tag: str) -> Iterator:
    """Yield the runs of a step that ended well and have a tag, the oldest first."""
    yield from _runs(store, f"{FINISHED} and tags.`{names.TAG_STEP}` = '{step}' and tags.`{tag}` != ''")


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
    for run in finished(store, "quantize", names.TAG_VARIANT):
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


def sizes(bases: Iterable[str]) -> dict[str, str]:
    """Return the name of each base model: its folder's, or the hub's; a `-pretrained` control has its base's.

    Raises:
        BadInput: two of them would have one name.
    """
    named: dict[str, str] = {}
    for base in bases:
        name = Path(base).name
        if other := next((each for each in named if each != base and Path(each).name == name), ""):
            raise BadInput(f"{other} and {base} have the same name: export them from stores of their own.")
        named[base] = name.removesuffix("-pretrained")
    return named


def parameters(base: str) -> float:
    """Return a base model's number of parameters; nan if it is no longer where it was."""
    try:
        return float(sum(entry.numel for entry in checkpoint.entries(addresses.folder(base)).values()))
    except (BadInput, OSError):
        return float("nan")


def write(store: str, weights: Path, out: Path) -> None:
    """Write a sweep's answers, and the measures of its weights, as an export.

    Args:
        store: address of the sweep's store.
        weights: folder of `diagnose`'s tables, SIZE-SEED.
        out: folder of the export.

    Raises:
        BadInput: two base models have the same name.
    """
    from mlflow.artifacts import download_artifacts

    frames, whole, found = [], [], cells(store)
    counts = {base: parameters(base) for base, *_ in found}
    named = sizes(counts)
    for (base, seed, variant, scheme), run in found.items():
        rows = pd.read_parquet(download_artifacts(f"{run.info.artifact_uri}/{names.QUESTIONS}"), columns=KEPT)
        labels = {"size": named[base], "seed": seed, "variant": variant, "scheme": scheme}
        frames.append(rows[["question", "correct"]].assign(**labels))
        rates = {
            "n_tokens": float(rows["n_tokens"].mean()),
            "truncated": float((rows["finish_reason"] == "length").mean()),
            "parsed": float(rows["parsed"].notna().mean()),
        }
        whole.append(labels | {"n": len(rows), "parameters": counts[base]} | rates)
    measured = []
    for folder in sorted(weights.glob("*-*")):
        size, _, seed = folder.name.rpartition("-")
        for file in (names.STORED, names.WEIGHTS, names.BEHAVIOUR):
            if (folder / file).is_file():
                measured.append(pd.read_parquet(folder / file).assign(size=size, seed=int(seed), table=Path(file).stem))
    if frames:
        print(f"{out}: {sum(map(len, frames)):,} answers of {len(frames)} cells", flush=True)
        tables.write(out, pd.concat(frames, ignore_index=True), cells=pd.DataFrame(whole))
    if measured:
        tables.write(out, weights=pd.concat(measured, ignore_index=True))
    tables.write(out, runs=runs(store))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("store", help="address: sqlite:///PATH, or http://HOST:PORT")
    parser.add_argument("out", type=Path, help="folder of the export")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder of diagnose's tables, SIZE-SEED")
    given = parser.parse_args()
    file = Path(given.store.removeprefix("sqlite:///"))
    if "://" not in given.store or (given.store.startswith("sqlite:///") and not file.is_file()):
        sys.exit(f"{given.store} is no store: expected sqlite:///PATH of a file that exists, or http://HOST:PORT.")
    os.environ["MLFLOW_TRACKING_URI"] = given.store
    try:
        stores.prepare()
        if not cells(given.store):
            sys.exit(f"{given.store} has no finished evaluation of a study or a sweep.")
        write(given.store, given.weights, given.out)
    except BadInput as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
