"""Racing promotions and rollbacks, killed at any write: QRL_RACE=1000 makes them as many, QRL_RACE_URI on a server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qrl
from tests.tracking import team

ROOT = Path(qrl.__file__).parents[1]


def race(address: str, decisions: str, processes: str, where: Path, *more: Path) -> str:
    """Return what a race tells, in a process of its own, which may fork: it has no threads yet."""
    command = [sys.executable, "-m", "tests.registry.race", address, decisions, processes]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *more)))}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.process
def test_racing_decisions_leave_one_record_each_and_readers_see_one_version(store, tmp_path):
    address, decisions = os.environ.get("QRL_RACE_URI", store), os.environ.get("QRL_RACE", "16")
    told = race(address, decisions, "8" if "QRL_RACE" in os.environ else "4", tmp_path)
    assert ", 0 faults" in told, told


@pytest.mark.slow
@pytest.mark.skipif(not team.postgres(), reason="PostgreSQL's initdb is not installed")
def test_they_do_on_postgresql(tmp_path):
    driver = ["uv", "pip", "install", "-q", "--python", sys.executable, "--target", "driver", team.DRIVER]
    subprocess.run(driver, cwd=tmp_path, check=True)
    with team.database_server() as address:
        told = race(f"{address}/mlflow", "50", "6", tmp_path, tmp_path / "driver")
    assert ", 0 faults" in told, told
    print(told)
