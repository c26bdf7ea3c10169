"""Measure how qrl grows: a store with 10,000 runs, a comparison of a million questions.

python tests/benchmarks/growth.py store                    # SQLite
python tests/benchmarks/growth.py store --postgresql       # with psycopg2-binary beside qrl's environment
python tests/benchmarks/growth.py compare                  # 1,000,000 questions in 12 cells, each in its own process

The store is one small study of ours, made by the code that makes all of them, and copied 1,000 times with new ids by
SQLAlchemy into MLflow's own tables: 10 runs, 100 histories of metrics and 3 models each; the first 333 registered
theirs. Copies share the first study's artifacts.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

COPIED = (
    *("runs", "tags", "params", "metrics", "latest_metrics", "inputs", "registered_model_tags"),
    *("logged_models", "logged_model_tags", "logged_model_params", "logged_model_metrics"),
    *("model_versions", "model_version_tags"),
)
_ID = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{64}|[0-9a-f]{32})(?![0-9a-f])")
NAME, STEPS, ROWS = "qrl-tiny", 10, 200
CELLS = ("base:full", "grpo:full", "grpo:awq")
OVERRIDES = {"promote.min_n": "20", "promote.min_gain": "-0.9", "promote.max_loss": "0.9"}


def study(folder: Path, number: int, cells: Sequence[str] = CELLS) -> list[str]:
    """Make the records of a study without a model's answers, ten runs of three cells; return the runs of its cells.

    Args:
        folder: where its checkpoints are written first.
        number: makes its weights unlike those of other studies.
        cells: `variant:scheme` each.
    """
    import mlflow
    import pandas as pd

    from qrl import checkpoint, names, recipe, tiny
    from qrl.tracking import contents, models, reuse, runs

    settings, evaluated, parent, unique = recipe.load(overrides=OVERRIDES), [], "", uuid.uuid4().hex
    steps = itertools.count()

    def key() -> str:
        return sha256(f"{number} {unique} {next(steps)}".encode()).hexdigest()

    with runs.step("study", settings) as whole:
        contents.log_scores({f"study/{i}": i for i in range(6)})
        for step in ("train", "quantize", "diagnose", "compare", "promote"):
            tags = {names.TAG_STEP: step, names.TAG_CACHE_KEY: key()}
            with runs.child(step, params=settings.flat(), tags=tags):
                for place in range(STEPS if step == "train" else 1):
                    contents.live_log()({f"{step}/{i}": i for i in range(42 if step == "train" else 4)}, place)
                mlflow.log_text("1\n" * 50, "history.csv")
                reuse.record_outputs(artifacts=["history.csv"])
        with runs.child("evaluate", params=settings.flat(), tags={names.TAG_STEP: "evaluate"}):
            for cell in cells:
                variant, scheme = cell.split(":")
                shutil.copytree(tiny.PATH, own := folder / f"{number}-{variant}-{scheme}")
                (own / "generation_config.json").write_text(json.dumps({"note": f"{number} {cell} {unique}"}))
                digest = checkpoint.digest(own)
                labels = {"variant": variant, "scheme": scheme, "digest": digest}
                tags = {names.TAG_STEP: "evaluate", names.TAG_DIGEST: digest, names.TAG_CACHE_KEY: key()}
                tags |= {names.TAG_VARIANT: variant, names.TAG_SCHEME: scheme, names.TAG_TASK: "arithmetic"}
                with runs.child(cell, params=settings.flat("evaluate"), tags=tags) as run:
                    facts = {
                        "metadata": {"parent": parent} if parent else {"source": NAME},
                        "task": "arithmetic",
                        **labels,
                    }
                    uri, _ = models.log_checkpoint(own, name=cell.replace(":", "-"), move=True, **facts)
                    questions = contents.log_dataset("arithmetic", digest="all", context="heldout", n=ROWS, source="")
                    right = [int(i % 3 < 1 + (variant != "base")) for i in range(ROWS)]
                    scores = {names.ACCURACY: sum(right) / ROWS, names.ACCURACY_STDERR: 0.03, names.N: ROWS}
                    scores |= {f"eval/{i}": i for i in range(9)}
                    contents.log_scores(scores, model_uri=uri, dataset=questions)
                    told = {"parsed": "1", "finish_reason": "stop", "leaked": 0, "fault": None, names.ENGINE: "t 5"}
                    rows = pd.DataFrame({"question": [f"q{i}" for i in range(ROWS)], "correct": right})
                    rows.assign(variant=variant, scheme=scheme, **told).to_parquet(folder / names.QUESTIONS)
                    mlflow.log_artifact(str(folder / names.QUESTIONS))
                    reuse.seal(folder / names.QUESTIONS, labels | {"task": "arithmetic"})
                    reuse.record_outputs(models={"model": uri}, artifacts=[names.QUESTIONS], values={"digest": digest})
                evaluated.append(run.info.run_id)
                parent = digest
        contents.log_scores({"study/seconds": 200.0})
    assert whole.info.run_id
    return evaluated


def fill(address: str, copies: int, registered: int) -> None:
    """Copy the one study of a store `copies` times, the first `registered` with their versions and decisions.

    Every id and digest gets a new one in each copy, but for datasets, rows and places of artifacts, which are shared.
    """
    import sqlalchemy
    from mlflow.store.db.base_sql_model import Base
    from mlflow.store.model_registry.dbmodels import models as _registry  # noqa: F401  (fills Base)
    from mlflow.store.tracking.dbmodels import models as _tracking  # noqa: F401

    engine, tables = sqlalchemy.create_engine(address), Base.metadata.tables
    with engine.begin() as connection:
        rows = {name: [dict(row) for row in connection.execute(tables[name].select()).mappings()] for name in COPIED}
        datasets = [row["dataset_uuid"] for row in connection.execute(tables["datasets"].select()).mappings()]
        sealed = [json.loads(row["value"])["rows"] for row in rows["params"] if row["key"] == "evidence"]
        decisions = next(row["value"] for row in rows.pop("registered_model_tags") if row["key"] == "qrl.history")
        record = {row["key"]: row["value"] for row in rows["params"] if row["run_uuid"] == decisions}
        rows = {name: [row for row in own if row.get("run_uuid") != decisions] for name, own in rows.items()}
        kept, models = {*datasets, *sealed, decisions}, len(rows["model_versions"])

        def copy(number: int, name: str, row: dict) -> dict:
            def renamed(found: re.Match) -> str:
                return (
                    found[0]
                    if found[0] in kept
                    else sha256(f"{number}{found[0]}".encode()).hexdigest()[: len(found[0])]
                )

            new = {
                key: _ID.sub(renamed, value) if isinstance(value, str) and "artifact_" not in key else value
                for key, value in row.items()
            }
            if name == "runs":
                new |= {key: row[key] - number * 600_000 for key in ("start_time", "end_time")}
                if number % 20 == 0 and row["name"] in ("train", "study"):
                    new["status"] = "FAILED"
                    failed.append({"key": "qrl.reason", "value": "It failed.", "run_uuid": new["run_uuid"]})
            if "version" in row:
                new["version"] = row["version"] + models * number
                if row.get("key") == "qrl.parent_version":
                    new["value"] = str(int(row["value"]) + models * number)
                if row.get("current_stage", "None") != "None" and number + 1 < registered:
                    new["current_stage"] = "Archived"
            return new

        failed: list[dict] = []
        for name, own in rows.items():
            numbers = range(1, registered if name.startswith("model_version") else copies)
            every = [copy(number, name, row) for number in numbers for row in own]
            for at in range(0, len(every), 5000):
                connection.execute(tables[name].insert(), every[at : at + 5000])
        if failed:
            connection.execute(tables["tags"].insert(), failed)
        versions, aliases = tables["model_versions"], tables["registered_model_aliases"]
        first = versions.c.version <= models
        connection.execute(
            versions.update().where(first, versions.c.current_stage != "None").values(current_stage="Archived")
        )
        held = [dict(row) for row in connection.execute(aliases.select()).mappings()]
        connection.execute(aliases.update().values(version=aliases.c.version + models * (registered - 1)))
        before = [row | {"alias": f"{row['alias']}-previous"} for row in held]
        before = [row | {"version": row["version"] + models * (registered - 2)} for row in before]
        connection.execute(aliases.insert(), before)
        _decide(connection, tables, decisions, record, registered, copy)
        if engine.dialect.name == "postgresql":
            connection.execute(sqlalchemy.text("ANALYZE"))  # as autovacuum does within a minute


def _decide(connection, tables, decisions: str, record: dict[str, str], registered: int, copy: Callable) -> None:
    """Replace the record of one study's decisions by one of `registered` studies, chained as `history.claim` does."""
    chain, former = "", [json.loads(record[key].split(" ", 2)[2]) for key in sorted(record)]
    params = []
    for number in range(len(former) * registered):
        study, place = divmod(number, len(former))
        entry = copy(study, "", former[place]) if study else former[place]
        entry |= {"number": number + 1, "previous": chain, "bounds": former[place]["bounds"]}
        text = json.dumps(entry, ensure_ascii=False)
        chain = sha256(text.encode()).hexdigest()
        params.append({"run_uuid": decisions, "key": f"{number + 1:06}", "value": f"{number:016} 1 {text}"})
    table, applied = tables["params"], tables["registered_model_tags"]
    connection.execute(table.delete().where(table.c.run_uuid == decisions))
    connection.execute(table.insert(), params)
    done = {"value": str(len(params))}
    connection.execute(applied.update().where(applied.c.key == "qrl.history.applied").values(done))


def seconds(what: str, work: Callable[[], object], rounds: int = 3) -> Any:
    """Print the median time of some work, its own CPU time, the statements that it sent, and what it returned."""
    import sqlalchemy

    times, sent = [], []
    count = lambda *_: sent.append(1)  # noqa: E731
    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", count)
    for _ in range(rounds):
        began, own = time.perf_counter(), time.process_time()
        found = work()
        times.append((time.perf_counter() - began, time.process_time() - own))
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "before_cursor_execute", count)
    shown = f"{len(found)} found" if isinstance(found, list) else str(found).partition("\n")[0][:50]
    wall, cpu = sorted(times)[rounds // 2]
    print(f"| {what} | {wall:.3f} | {cpu:.3f} | {len(sent) // rounds} | {shown} |", flush=True)
    return found


def measure(folder: Path) -> None:
    """Print a table of what a step asks of the store that MLFLOW_TRACKING_URI names."""
    import mlflow

    from qrl import names, recipe, registry
    from qrl.registry import pointers
    from qrl.registry.versions import versions_of
    from qrl.steps import promote as promoting
    from qrl.tracking import dead_runs, models, reuse, runs, store

    def tagged(run_id: str) -> dict[str, str]:
        return mlflow.get_run(run_id).data.tags

    def step() -> None:
        with runs.step("diagnose", recipe.load()):
            pass

    def promote(place: int) -> str:
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
            promoting.promote(recipe.load(overrides=OVERRIDES), [names.STAGES[place]], [cells[place]])
        return f"{len(pointers.current(NAME).records)} decisions"

    print("| what | seconds | CPU | statements | result |\n|---|---:|---:|---:|---|")
    seconds("open the store", store.prepare, rounds=1)
    cells = study(folder, 1)
    newest = tagged(cells[-1])
    seconds("the first 100 runs", lambda: mlflow.search_runs(max_results=100, output_format="list"))
    seconds("begin and end a step", step)
    seconds("sweep for dead runs", dead_runs.sweep)
    seconds("find a finished step", lambda: bool(reuse.find("evaluate", newest[names.TAG_CACHE_KEY])))
    seconds("find none", lambda: reuse.find("evaluate", "0" * 64))
    seconds("say what differs", lambda: reuse.changes("train", "0" * 64))
    seconds("find a model by its digest", lambda: models.find(newest[names.TAG_DIGEST]))
    seconds("find no model", lambda: models.find("0" * 64))
    seconds("list the versions", lambda: versions_of(NAME))
    seconds("resolve a stage", lambda: registry.resolve(NAME, "grpo"))
    seconds("resolve a version", lambda: registry.resolve(NAME, 3))
    for place, stage in enumerate(names.STAGES):
        seconds(f"promote a cell to {stage}", lambda place=place: promote(place), rounds=1)
    seconds("promote it again", lambda: promote(2))
    for place, count in enumerate((3, 12, 48), 2):
        several = [f"base:s{i}" for i in range(count)]
        found = seconds(f"the records of a study of {count} cells", lambda s=several, p=place: study(folder, p, s), 1)
        wanted = [tagged(run_id)[names.TAG_CACHE_KEY] for run_id in found]
        seconds(f"find its {count} cells", lambda w=wanted: [reuse.find("evaluate", key) for key in w], 1)


@contextlib.contextmanager
def database(postgresql: bool, folder: Path) -> Iterator[str]:
    """Yield the address of an empty store of MLflow's."""
    if not postgresql:
        yield f"sqlite:///{folder}/mlflow.db"
        return
    from tests.tracking.team import database_server

    with database_server() as address:
        yield f"{address}/mlflow"


def grown(postgresql: bool, copies: int, registered: int) -> None:
    """Make a store, fill it, and measure it from another process."""
    with tempfile.TemporaryDirectory() as place, database(postgresql, folder := Path(place)) as address:
        os.chdir(folder)
        os.environ["MLFLOW_TRACKING_URI"] = address
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        from qrl import names, recipe
        from qrl.steps import promote as promoting

        SqlAlchemyStore(address, f"{folder}/mlruns")
        promoting.promote(recipe.load(overrides=OVERRIDES), list(names.STAGES), study(folder, 0))
        began = time.perf_counter()
        fill(address, copies, registered)
        took, models = time.perf_counter() - began, len(CELLS) * registered
        print(
            f"{copies * 10} runs, {copies * 100} histories, {models} versions, {address[:10]}; filled in {took:.0f} s\n"
        )
        subprocess.run([sys.executable, __file__, "measure", "--folder", str(folder)], check=True)


def questions(path: Path, n: int) -> None:
    """Write the table of a study of two variants in six schemes, with answers of about 120 characters each."""
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from pyarrow import parquet

    rng, file = np.random.default_rng(0), None
    easy, texts = rng.random(n), np.array([" ".join(map(str, rng.integers(0, 999, 34))) for _ in range(4096)])
    for variant, right in (("base", 0.0), ("grpo", 0.2)):
        for scheme in ("full", "nf4", "int8", "awq", "gptq", "fp8"):
            correct = (rng.random(n) * 0.2 + easy * 0.8 < 0.5 + right - 0.02 * (scheme != "full")).astype(int)
            told = {"variant": variant, "scheme": scheme, "dtype": "float32"}
            told |= {"question": [f"arithmetic-heldout-0-{i}" for i in range(n)], "correct": correct}
            told |= {"parsed": rng.integers(0, 999, n).astype(str), "answer": "7", "finish_reason": "stop"}
            told |= {"completion": texts[rng.integers(0, 4096, n)], "leaked": 0, "n_tokens": rng.integers(5, 300, n)}
            told |= {"reached": rng.integers(0, 2, n), "fault": None, "seed": 0, "question_seed": 0}
            told |= {"engine": "transformers 5.17.0", "settings_digest": "" if scheme == "full" else scheme}
            table = pa.Table.from_pandas(pd.DataFrame(told))
            file = file or parquet.ParquetWriter(path, table.schema)
            file.write_table(table)
    file.close()


def compared(n: int) -> None:
    """Print seconds and peak memory of `compare` on n questions in 12 cells."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "questions", "--folder", folder, "--n", str(n)], check=True)
        file, before = Path(folder, "questions.parquet"), resource.getrusage(resource.RUSAGE_CHILDREN)
        command, began = ["-m", "qrl", "compare", "--questions", str(file), "--out", folder], time.perf_counter()
        root = Path(__file__).parents[2]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, cwd=root)
        took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"{n:,} questions x 12 cells, a file of {file.stat().st_size / 2**20:,.0f} MiB: {took:.1f} s, CPU "
            f"{own:.1f} s, peak {after.ru_maxrss / 2**20:.2f} GiB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("store", "compare", "measure", "questions"))
    parser.add_argument("--postgresql", action="store_true")
    parser.add_argument("--copies", type=int, default=1000)
    parser.add_argument("--registered", type=int, default=333)
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.what == "store":
        grown(given.postgresql, given.copies, given.registered)
    elif given.what == "measure":
        measure(given.folder)
    elif given.what == "questions":
        questions(given.folder / "questions.parquet", given.n)
    else:
        compared(given.n)
