"""A cluster for the tests of this folder."""

import pytest

from tests.cluster import one_machine


@pytest.fixture(scope="module")
def slurm():
    """A real Slurm, its programs in this process's path."""
    cluster = one_machine.Slurm()
    yield cluster
    cluster.stop()
