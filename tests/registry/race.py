"""Processes that promote and roll back at once, each killed now and then at one of its writes, and a reader.

python -m tests.registry.race sqlite:////tmp/new.db 1000
python -m tests.registry.race http://127.0.0.1:5000 1000 8
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STAGES = {"grpo": (1, 2, 3), "awq": (4, 5, 6)}  # stage → versions that race for it
MIRRORED = {"grpo": "Staging", "awq": "Production"}
WRITES = ("log_param", "set_registered_model_alias", "transition_model_version_stage", "set_registered_model_tag")
WRITES += ("set_model_version_tag", "update_model_version")
AGAIN_S = 0.1  # a waiter looks at the lock every 0.05 s; without a pause the same process takes it again and again
MORTALITY = 0.01  # chance to be killed before a write, and after it


@dataclass
class Outcome:
    """What a race left."""

    decisions: int = 0  # that their callers heard of
    killed: int = 0
    records: int = 0
    reads: int = 0
    seconds: float = 0.0
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = f"{self.decisions} decisions and {self.killed} kills in {self.seconds:.0f} s: {self.records} records"
        return "\n  ".join([f"{told}, {self.reads} reads, {len(self.faults)} faults", *self.faults])


def race(address: str, folder: Path, decisions: int, processes: int = 8, limit: int = 3600, seed: int = 0) -> Outcome:
    """Let processes under two temporary folders decide until enough was decided; return what was seen.

    Args:
        address: of the store.
        folder: for the racers' notes and temporary folders.
        decisions: promotions and rollbacks that must have been acknowledged.
        processes: that race at a time; one that was killed is replaced.
        limit: seconds after which it ends with what was decided by then.
        seed: of what they do and where they die.
    """
    os.environ["MLFLOW_TRACKING_URI"] = address
    _fork(_prepare)[1]()
    reader, stop_reader = _fork(_read, folder / "reads.json")
    racers: dict[int, Path] = {}
    began, made, killed, faults = time.time(), 0, 0, []
    while True:
        done = sum(path.read_text().count("done") for path in folder.glob("racer-*"))
        if done >= decisions or time.time() > began + limit:
            break
        while len(racers) < processes:
            notes = folder / f"racer-{made}"
            notes.touch()
            pid, _ = _fork(_decide, notes, folder / f"tmp{made % 2}", seed * 100_000 + made)
            racers[pid] = notes
            made += 1
        time.sleep(0.05)
        for pid in list(racers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                killed += died
                faults += [] if died else [f"{racers[pid].name} ended: {racers[pid].read_text()[-1500:]}"]
                del racers[pid]
                if not died:
                    decisions = 0
    for pid in racers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    seconds = time.time() - began
    os.kill(reader, signal.SIGTERM)
    stop_reader()
    _fork(_judge, folder)[1]()
    judged, reads = (json.loads((folder / name).read_text()) for name in ("judged.json", "reads.json"))
    faults += [*reads["faults"], *judged["faults"]]
    return Outcome(done, killed, judged["records"], reads["reads"], seconds, tuple(faults[:20]))


def _fork(work: Callable[..., None], *given: object) -> tuple[int, Callable[[], None]]:
    """Run something in a forked process, which has the imports already; return its pid, and how to await it."""
    if pid := os.fork():

        def wait() -> None:
            assert os.waitpid(pid, 0)[1] == 0, f"{work.__name__} failed"

        return pid, wait
    try:
        work(*given)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _prepare() -> None:
    """Make six versions, and give each stage one, so that there is something to read."""
    from qrl import registry
    from qrl.tracking import store
    from tests.registry import made

    store.prepare()
    for place in range(1, 7):
        made.version("grpo", weights=f"weights {place}")
    for stage, numbers in STAGES.items():
        for number in numbers[:2]:
            registry.promote(made.NAME, stage, number, record={"run": f"first-{stage}-{number}"})


def _decide(notes: Path, temporary: Path, seed: int) -> None:
    """Promote and roll back at random until killed; note each decision before it and once it is acknowledged."""
    import mlflow

    from qrl import registry
    from tests.registry.made import NAME

    temporary.mkdir(exist_ok=True)
    tempfile.tempdir = str(temporary)
    chance = random.Random(seed)

    def die() -> None:
        if chance.random() < MORTALITY:
            os.kill(os.getpid(), signal.SIGKILL)

    def mortal(write: Callable) -> Callable:
        def call(*given: object, **more: object) -> object:
            die()
            answer = write(*given, **more)
            die()
            return answer

        return call

    for name in WRITES:
        setattr(mlflow.MlflowClient, name, mortal(getattr(mlflow.MlflowClient, name)))
    with notes.open("a", buffering=1) as said:
        for place in range(1_000_000):
            stage, marker = chance.choice(list(STAGES)), f"{notes.name}-{place}"
            try:
                if chance.random() < 0.3:
                    said.write("try rollback\n")
                    registry.rollback(NAME, stage)
                    said.write("done rollback\n")
                else:
                    said.write(f"try {marker}\n")
                    registry.promote(NAME, stage, chance.choice(STAGES[stage]), record={"run": marker})
                    said.write(f"done {marker}\n")
            except BaseException:
                said.write(traceback.format_exc())
                raise
            time.sleep(AGAIN_S)


def _read(path: Path) -> None:
    """Look at aliases and at MLflow's stages until told to stop; note whoever saw none or two."""
    import mlflow

    from tests.registry.made import NAME

    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    client, reads, faults = mlflow.MlflowClient(), 0, []
    while not stopped:
        for stage, numbers in STAGES.items():
            held = int(client.get_model_version_by_alias(NAME, stage).version)
            shown = client.search_model_versions(f"name = '{NAME}'")
            at = [int(entry.version) for entry in shown if entry.current_stage == MIRRORED[stage]]
            if held not in numbers or len(at) != 1:
                faults.append(f"read {reads}: alias {stage} is {held}, {MIRRORED[stage]} are {at}")
            reads += 1
        time.sleep(0.01)
    path.write_text(json.dumps({"reads": reads, "faults": faults}))


def _judge(folder: Path) -> None:
    """Hold the record against the racers' notes, and the pointers, after one more command, against the record."""
    import mlflow

    from qrl import registry
    from qrl.registry import history, versions
    from tests.registry.made import NAME

    tried = [line.split() for path in folder.glob("racer-*") for line in path.read_text().splitlines()]
    now = registry.resolve(NAME, "awq").version
    model = versions.model_of(NAME)
    model_history = history.read_history(NAME, model)  # which checks the chain
    faults = []
    state = history.State()
    for record in model_history.records:
        if record.action == "rollback" and record.version != state.before.get(record.stage):
            faults.append(f"decision {record.number} returned {record.stage} to version {record.version}")
        state = state.after(record)
        if record.action not in ("promote", "rollback"):
            faults.append(f"decision {record.number}: {record.action} {record.reasons}")
    promoted_markers = [record.run for record in model_history.records if record.action == "promote"]
    rollbacks = sum(record.action == "rollback" for record in model_history.records)
    for marker in {word[1] for word in tried if word[0] == "try"} - {"rollback"}:
        acknowledged = ["done", marker] in tried
        if not acknowledged <= promoted_markers.count(marker) <= 1:
            faults.append(f"{marker}, {acknowledged=}, has {promoted_markers.count(marker)} records")
    if not tried.count(["done", "rollback"]) <= rollbacks <= tried.count(["try", "rollback"]):
        faults.append(f"{tried.count(['done', 'rollback'])} rollbacks have {rollbacks} records")
    aliases = {alias: int(number) for alias, number in model.aliases.items()}
    if aliases != model_history.state.aliases() or now != model_history.state.at["awq"]:
        faults.append(f"aliases are {aliases}, decided {model_history.state.aliases()}")
    shown = {int(entry.version): entry.current_stage for entry in mlflow.MlflowClient().search_model_versions()}
    shown = {version: stage for version, stage in shown.items() if stage in MIRRORED.values()}
    if shown != model_history.state.shown():
        faults.append(f"stages are {shown}, decided {model_history.state.shown()}")
    (folder / "judged.json").write_text(json.dumps({"records": len(model_history.records), "faults": faults}))


if __name__ == "__main__":
    import importlib

    for module in ("model_registry.sqlalchemy_store", "tracking.sqlalchemy_store", "tracking.rest_store"):
        importlib.import_module(f"mlflow.store.{module}")  # the forked ones have it then
    importlib.import_module("qrl.registry")

    with tempfile.TemporaryDirectory() as place:
        print(race(sys.argv[1], Path(place), int(sys.argv[2]), *map(int, sys.argv[3:])))
