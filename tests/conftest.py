"""What every test shares: no run of somebody else's in the environment, and a store of its own where it wants one."""

import gc
import importlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from qrl.tracking import signals, warm

# What a worker imports stays until it ends: the garbage collector would look through it a dozen times while it is
# imported, a fourth of the seconds that this takes, and again whenever a test makes many objects.
gc.disable()

settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # a busy core is no error
settings.load_profile("shared machine")

TIERS = ("process", "study", "slow")  # a test with none of these marks is a unit test
HEAVY = {"store", "slurm"}  # fixtures that start or copy something: a test that has one is no unit test

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read as the library is imported: no test waits for a hub

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker a core: one thread each, in the processes that tests start too
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests write to databases thousands of times, and wait for the disk each time, so their files are kept in memory if
# there is enough of it. This is pytest's own variable for the folder of all its temporary ones.
MEMORY, MEMORY_NEEDED = Path("/dev/shm"), 12 << 30
if MEMORY.is_dir() and min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) > MEMORY_NEEDED:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# A shell starts what runs in the background deaf to Ctrl-C, and so would be the processes that tests interrupt.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests under `mlflow run -e test` would otherwise join the run that MLflow opened for pytest itself.
for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_URI"):
    os.environ.pop(name, None)


class _Failures:
    """Prints a failure, or why a test runs again, at once: a run that is cut short never prints its summary."""

    def __init__(self, terminal) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome in ("failed", "rerun"):
            self.terminal.write_line(
                f"\n{report.outcome.upper()} {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}"
            )


@pytest.hookimpl(trylast=True)  # the terminal is set up in such a hook too
def pytest_configure(config: pytest.Config) -> None:
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):
        config.pluginmanager.register(_Failures(terminal))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test without another tier as `unit`; begin with studies, other environments and Slurm.

    Those take longest, and one that a worker begins last keeps the others waiting.
    """
    for item in items:
        if any(item.get_closest_marker(tier) for tier in TIERS):
            continue
        is_heavy = HEAVY & set(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.process if is_heavy else pytest.mark.unit)
    items.sort(key=_rank)


def pytest_collection_finish() -> None:
    """Let the garbage collector work again, and leave out what was imported."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Leave everything out of the collections that pytest and Python make at their end, seconds over such a heap."""
    gc.freeze()


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker("study"):
        return 0
    is_long = {"python_of", "slurm"} & set(getattr(item, "fixturenames", ()))
    return 1 if is_long else 2


@pytest.fixture(autouse=True)
def no_stop_handler_left():
    """Undo what a command that a test runs in this process sets: the next Ctrl-C of any test would end the worker."""
    stop_signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    handlers = {signum: signal.getsignal(signum) for signum in stop_signals}
    unraisable = sys.unraisablehook
    yield
    signal.alarm(0)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    sys.unraisablehook = unraisable
    signals._handler.__init__()


@pytest.fixture(scope="module", autouse=True)
def only_own_garbage():
    """Leave what other files imported and made out of collections: each training ends with one, a second of it."""
    gc.freeze()


@pytest.fixture(autouse=True)
def few_warm_processes(request):
    """Start warm processes in whole studies alone: one imports for seconds what a study that is refused never uses."""
    with pytest.MonkeyPatch.context() as environment:
        if not any(request.node.get_closest_marker(tier) for tier in ("study", "slow")):
            environment.setenv(warm.FOLDER, warm.OFF)
        yield


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    """MLflow's database with nothing in it; it takes seconds to make, so it is made once and copied."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    folder = tmp_path_factory.mktemp("empty")
    SqlAlchemyStore(f"sqlite:///{folder}/mlflow.db", str(folder / "mlruns"))
    return folder / "mlflow.db"


@pytest.fixture
def store(empty_database, tmp_path, monkeypatch) -> str:
    """The address of a fresh store in a folder of its own, which is also the working directory."""
    import mlflow

    database = tmp_path / "store" / "mlflow.db"
    database.parent.mkdir()
    shutil.copyfile(empty_database, database)
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE experiments SET artifact_location = ?", (f"{database.parent}/mlruns/0",))
    monkeypatch.chdir(database.parent)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    yield f"sqlite:///{database}"
    while mlflow.active_run():
        mlflow.end_run("FAILED")
    mlflow.set_tracking_uri(None)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A whole checkpoint of a random Qwen2 with a tokenizer and a chat template, 2.5 MB of bf16."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qrl.tiny import tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    words = tokenizer.make(["Tom has 3 apples and buys 4 more. How many does he have? #### 7"] * 20, folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), **shape, **heads, **ends)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def install(tmp_path_factory) -> Callable[..., Path]:
    """Return a function that installs packages which the environment lacks in a folder of their own."""

    def into_folder(*words: str) -> Path:
        folder = tmp_path_factory.mktemp("library")
        command = ["uv", "pip", "install", "-q", "--python", sys.executable, "--target", str(folder), *words]
        subprocess.run(command, check=True)
        return folder

    return into_folder


@pytest.fixture(scope="session")
def model_signing(install, tmp_path_factory):
    """Install model-signing where the environment lacks it."""
    from qrl.registry import signing

    folder = tmp_path_factory.mktemp("library")
    try:
        importlib.import_module("model_signing.signing")
    except ImportError:
        folder = install(*signing.PACKAGES)
        importlib.invalidate_caches()
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def python_of(tmp_path_factory) -> Callable[[str], str]:
    """Return the Python of an environment under projects/, by folder.

    QRL_VLLM_PYTHON or QRL_AWQ_PYTHON may name one that is there already; else MLflow builds it once.
    """
    from qrl.study import build, launch
    from qrl.tracking import projects

    def find(name: str) -> str:
        if given := os.environ.get(f"QRL_{name.removesuffix('_cpu').upper()}_PYTHON"):
            return given
        project = Path(__file__).parents[1] / "projects" / name
        if build.is_ready(project, "uv"):
            return str(projects.environment(project) / "bin" / "python")
        asking = tmp_path_factory.mktemp(name)
        shutil.copy(
            project / "conda.yaml", asking
        )  # MLflow names environments by these lines, so it is the project's own
        command = """python -c 'import sys; open("python", "w").write(sys.executable)'"""
        (asking / "MLproject").write_text(
            f"name: asking\nconda_env: conda.yaml\nentry_points:\n  main:\n    command: {json.dumps(command)}\n"
        )
        with launch.variables(project):
            run = [sys.executable, "-m", "mlflow", "run", str(asking), "--env-manager", "uv"]
            done = subprocess.run(
                run,
                cwd=asking,
                env=os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{asking}/mlflow.db"},
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, done.stderr[-4000:]
        return (asking / "python").read_text()

    return find
