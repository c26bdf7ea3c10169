"""Racing promotions and rollbacks, killed at any write: QRL_RACE=1000 makes them as many, QRL_RACE_URI on a server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qrl

ROOT = Path(qrl.__file__).parents[1]


@pytest.mark.process
def test_racing_decisions_leave_one_record_each_and_readers_see_one_version(store):
    """Run them in a process of their own, which may fork: it has no threads yet."""
    address, decisions = os.environ.get("QRL_RACE_URI", store), os.environ.get("QRL_RACE", "16")
    command = [
        sys.executable,
        "-m",
        "tests.registry.race",
        address,
        decisions,
        "8" if "QRL_RACE" in os.environ else "4",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert ", 0 faults" in done.stdout, done.stdout
