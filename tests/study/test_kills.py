"""Kill any process of a study at a random moment: the next command finishes it, as if nothing had happened.

One finished study is copied for every case. The case forgets what one step made, runs the study again, and sends a
signal while that step runs: to the study, to the step, to what the step started, or to all of them.

    QRL_KILLS=200            number of cases, by default 8, one for each step; QRL_KILLS_FROM is the first one's
    QRL_KILLS_CASES=34,58    these cases instead
    QRL_KILLS_FINISHED=DIR   keeps the finished study there for the next time
    QRL_KILLS_LOG=FILE       gets a line of JSON a case
    QRL_KILLS_MANAGER=uv     runs the study under `mlflow run`, with AWQ in an environment of its own
    QRL_KILLS_ENGINE=1       with it, vLLM answers (on a CPU without a GPU), and its engine's process is killed too
"""

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import qrl
from qrl import names, workspace

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's processes")]

ROOT = Path(qrl.__file__).parents[1]
MANAGER = os.environ.get("QRL_KILLS_MANAGER", "")
ENGINE = bool(MANAGER and os.environ.get("QRL_KILLS_ENGINE"))
SCHEMES = "nf4,awq" if MANAGER else "nf4"
SMALL = {
    "recipe": "tiny-lora",
    "train.steps": "2",
    "train.prompts_per_step": "2",
    "train.questions": "8",
    "train.micro_batch": "16",
    "train.save_every": "1",
    "quantize.schemes": SCHEMES,
    "quantize.calibration_samples": "4",
    "evaluate.n": "20",
    "promote.min_gain": "-1",
    "promote.max_loss": "1",
}
SMALL |= {"evaluate.engine": "vllm", "evaluate.unpacked": "true"} if ENGINE else {}
STEPS = ("train", "merge", "quantize", "evaluate", "diagnose", "compare", "promote", "study")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
WHOM = ("study", "step", "child", "group")  # the child is what the step started, if it started something
WHOM += ("engine",) if ENGINE else ()  # vLLM's own process, or else as "child"
GONE_S = 20  # within which every process must have ended, for each process that waits for a core; the goal is 10
STARTING_S = 20.0  # of a study, before its first step
MARK = "QRL_KILLS_CASE"  # in the environment of a case's processes
FINISHED = os.environ.get("QRL_KILLS_FINISHED")
FIRST, COUNT = int(os.environ.get("QRL_KILLS_FROM", "0")), int(os.environ.get("QRL_KILLS", len(STEPS)))
CASES = [int(each) for each in os.environ.get("QRL_KILLS_CASES", "").split(",") if each] or range(FIRST, FIRST + COUNT)


def case(number: int) -> tuple[str, signal.Signals, str, float]:
    """Return which step is hit, by which signal, whom it is sent to, and when, as a share of the step's time."""
    draw = random.Random(number)
    step = STEPS[number % len(STEPS)]
    whom = draw.choice(WHOM if step != "study" else ("study", "group"))
    return step, draw.choice(SIGNALS), whom, draw.uniform(0, 1.05)


def command() -> list[str]:
    if not MANAGER:
        return [
            sys.executable,
            "-m",
            "qrl",
            "study",
            *(word for pair in SMALL.items() for word in (f"--{pair[0]}", pair[1])),
        ]
    given = [word for pair in SMALL.items() for word in ("-P", "=".join(pair))]
    return [sys.executable, "-m", "mlflow", "run", str(ROOT), "--env-manager", MANAGER, *given]


class Study:
    """The small study in a folder with a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"sqlite:///{folder}/mlflow.db"

    @functools.cached_property
    def client(self):
        """A client of the store, made once the study has made the store: it would put artifacts into its own folder."""
        import mlflow

        return mlflow.MlflowClient(self.address)

    def start(self) -> subprocess.Popen:
        ours = {"MLFLOW_TRACKING_URI": self.address, "PYTHONPATH": str(ROOT), MARK: str(self.folder)}
        ours |= {"OMP_NUM_THREADS": "2", "QRL_FOLDER": str(self.folder)}  # two processes answer the cells
        with (self.folder / "terminal.txt").open("w") as terminal:
            how = {"stdout": terminal, "stderr": subprocess.STDOUT, "start_new_session": True}
            return subprocess.Popen(command(), cwd=self.folder, env=os.environ | ours, **how)

    def told(self) -> str:
        return (self.folder / "terminal.txt").read_text(errors="replace")

    def runs(self, query: str = "") -> list:
        return self.client.search_runs(["0"], query, max_results=1000)

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this case, zombies aside."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def copy(self, folder: Path) -> "Study":
        """Copy the store: artifacts as links, and the database with the paths that it holds."""
        shutil.copytree(self.folder / "mlruns", folder / "mlruns", copy_function=os.link)
        shutil.copyfile(self.folder / "mlflow.db", folder / "mlflow.db")
        with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database, database:
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for table in tables:
                for _, column, kind, *_ in list(database.execute(f"PRAGMA table_info('{table}')")):
                    if kind.upper().startswith(("VARCHAR", "TEXT")):
                        database.execute(
                            f'UPDATE "{table}" SET "{column}" = replace("{column}", ?, ?) WHERE instr("{column}", ?)',
                            (str(self.folder), str(folder), str(self.folder)),
                        )
        return Study(folder)

    def forget(self, step: str) -> None:
        """Delete what a step left, so that it must run again."""
        for run in self.runs(f"tags.`{names.TAG_STEP}` = '{step}'"):
            self.client.delete_run(run.info.run_id)

    def table(self) -> dict:
        newest = self.runs(f"tags.`{names.TAG_STEP}` = 'study' and attributes.status = 'FINISHED'")[0]
        return json.loads(Path(newest.info.artifact_uri.removeprefix("file://"), names.TABLE_JSON).read_text())

    def registered(self) -> dict[str, tuple[str, str, str]]:
        """Return each stage's version, digest and MLflow stage."""
        aliases = self.client.get_registered_model("qrl-tiny").aliases
        versions = {alias: self.client.get_model_version("qrl-tiny", number) for alias, number in aliases.items()}
        return {a: (v.version, v.tags[names.TAG_DIGEST], v.current_stage) for a, v in versions.items()}

    def step_process(self, step: str) -> psutil.Process | None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "qrl" in words and words[words.index("qrl") + 1 :][:1] == [step]:
                    return process
        return None


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Study, dict[str, float]]:
    """A finished study, and the seconds that each of its steps took."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a background job ignores, its studies would too
    study = Study(Path(FINISHED or tmp_path_factory.mktemp("finished")))
    study.folder.mkdir(exist_ok=True)
    if not (study.folder / "mlflow.db").exists():
        assert study.start().wait() == 0, study.told()[-4000:]
    steps = [run for run in study.runs("tags.`mlflow.parentRunId` != ''") if names.TAG_STEP in run.data.tags]
    took = {}
    for run in steps:
        seconds = (run.info.end_time - run.info.start_time) / 1000
        step = run.data.tags[names.TAG_STEP]
        took[step] = max(took.get(step, 0.0), seconds)
    took["study"] = STARTING_S
    return study, took


@pytest.mark.parametrize(
    "number", [number if number == 0 else pytest.param(number, marks=pytest.mark.long) for number in CASES]
)
def test_a_study_that_was_killed_is_finished_by_the_next_command(number, finished, tmp_path):
    reference, took = finished
    step, signum, whom, share = case(number)
    study = reference.copy(tmp_path)
    if step not in ("promote", "study"):
        study.forget(step)
    began, running = time.monotonic(), study.start()
    outcome = {"case": number, "step": step, "signal": signum.name, "whom": whom, "share": round(share, 3)}
    try:
        outcome["hit"] = hit(study, running, step, signum, whom, share * took[step])
        sent = time.monotonic()
        within = GONE_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        while ((left := study.processes()) or running.poll() is None) and time.monotonic() - sent < within:
            time.sleep(0.1)
        outcome["gone_s"], outcome["load"] = round(time.monotonic() - sent, 1), round(os.getloadavg()[0], 1)
        outcome["left"] = [" ".join(process.cmdline())[:120] for process in left if process.is_running()]
        if running.wait(600) == 0:  # what was hit had ended before, so that the study went on
            outcome["gone_s"], outcome["left"] = None, []
        outcome["code"], outcome["told"] = running.returncode, study.told()[-6000:]
        problems = told_wrong(study.told(), running.returncode, signum, whom)
        problems += [f"left: {each}" for each in outcome["left"]]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        outcome["killed_s"] = round(time.monotonic() - began, 1)
        again = study.start()
        code = again.wait()
        outcome["seconds"] = round(time.monotonic() - began, 1)
        problems += [f"again ended with {code}: {study.told()[-2500:]}"] if code else []
        # On several threads AWQ's search is not the same to the last bit, so its weights may be another version.
        problems += wrong(study, reference, versions=not (MANAGER and step == "quantize")) if not code else []
    finally:
        for process in study.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
    outcome["problems"] = problems
    if log := os.environ.get("QRL_KILLS_LOG"):
        with open(log, "a") as lines:
            lines.write(json.dumps(outcome) + "\n")
    assert not problems, json.dumps(outcome, indent=1)


def hit(study: Study, running: subprocess.Popen, step: str, signum: int, whom: str, wait: float) -> str:
    """Send the signal when the step has run for a while, or when the study has, if it is none of its steps.

    Returns the command that got it; "study" or "group" if those did.
    """
    target = None
    while step != "study" and target is None and running.poll() is None:
        target = study.step_process(step)
        time.sleep(0.02)
    time.sleep(wait)
    # A step may have several processes, one after the other: AWQ's comes after the other schemes'.
    target = study.step_process(step) or target or psutil.Process(running.pid)
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        if whom == "group":
            os.killpg(running.pid, signum)
        elif whom == "study":
            os.kill(running.pid, signum)
        else:
            children = target.children(recursive=True) if whom in ("child", "engine") else []
            engines = [each for each in children if "EngineCore" in " ".join([each.name(), *each.cmdline()])]
            children = engines if whom == "engine" and engines else children
            target = random.choice(children) if children else target
            named = " ".join(target.cmdline())[:120]
            target.send_signal(signum)
            return named
    return whom


def told_wrong(told: str, code: int, signum: int, whom: str) -> list[str]:
    """Return what is wrong with the end of a command that got a signal."""
    if code == 0:
        return []  # it was over, or did not need what was killed
    problems = ["a traceback"] if "Traceback" in told else []
    if whom in ("study", "group") and signum != signal.SIGKILL:
        if not MANAGER and code not in (128 + signum, -signum):
            problems.append(f"exit code {code}")
        if "Stopped by" not in told:
            problems.append("it does not say that it was stopped")
    elif whom in ("step", "child") and not re.search(r"^qrl: \S.*\.\s*$", told, re.MULTILINE):
        problems.append("the study does not say what happened")
    return problems


def wrong(study: Study, reference: Study, *, versions: bool) -> list[str]:
    """Return what is wrong with a store after the command that finished its study; `versions` are compared if asked."""
    problems = []
    for run in study.runs():
        ended, reason = run.info.status, run.data.tags.get(names.TAG_REASON)
        if ended == "RUNNING" or (ended != "FINISHED" and not reason):
            problems.append(f"run {run.info.run_name} is {ended}, reason {reason}")
    if study.table() != reference.table():
        problems.append("another table")
    if versions and study.registered() != reference.registered():
        problems.append(f"stages are {study.registered()}, not {reference.registered()}")
    made, usual = (each.client.search_model_versions("name = 'qrl-tiny'") for each in (study, reference))
    if versions and len(made) != len(usual):
        problems.append(f"there are {len(made)} versions")
    models = study.client.search_logged_models(["0"], max_results=1000)
    problems += [f"model {model.name} is pending" for model in models if str(model.status) == "PENDING"]
    stays = ("environment", workspace.LOCKS)
    left = [path.name for path in (study.folder / ".qrl").iterdir() if not path.name.startswith(stays)]
    return problems + [f".qrl holds {name}" for name in left]
