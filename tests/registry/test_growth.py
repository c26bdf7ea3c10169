"""A promotion costs the same whatever the number of versions: statements and loaded versions are counted."""

from contextlib import contextmanager

import pytest
import sqlalchemy
from mlflow.store.model_registry.dbmodels.models import SqlModelVersion

from qrl import registry
from qrl.registry import versions
from tests.registry.made import NAME

WHY = {"run": "r", "reasons": ["it was better."], "bounds": {"gain": 0.1}}


@contextmanager
def counted():
    """Yield a count of the statements sent and of the versions loaded inside."""
    count = {"statements": 0, "versions": 0}

    def sent(*_):
        count["statements"] += 1

    def loaded(*_):
        count["versions"] += 1

    hooks = (sqlalchemy.engine.Engine, "before_cursor_execute", sent), (SqlModelVersion, "load", loaded)
    for hook in hooks:
        sqlalchemy.event.listen(*hook)
    yield count
    for hook in hooks:
        sqlalchemy.event.remove(*hook)


@pytest.fixture
def two_and_many(version):
    """Return a way to do something at 4 versions and at 14, and what each cost."""

    def costs(work) -> list[dict[str, int]]:
        numbers, found = [], []
        for more in (4, 10):
            numbers += [version("grpo", weights=f"{len(numbers) + i}").version for i in range(more)]
            for number in numbers[-3:-1]:  # so that the stage has had a version before
                registry.promote(NAME, "grpo", number, record=WHY)
            with counted() as count:
                work(numbers[-1])
            found.append(dict(count))
        return found

    return costs


def test_a_promotion_sends_no_more_statements_and_loads_no_more_versions_for_many_versions(two_and_many):
    few, many = two_and_many(lambda number: registry.promote(NAME, "grpo", number, record=WHY))
    assert few == many and many["versions"] < 40


@pytest.mark.parametrize("what", ["grpo", "Staging", 3])
def test_a_stage_and_a_number_are_resolved_without_the_other_versions(two_and_many, what):
    few, many = two_and_many(lambda _: registry.resolve(NAME, what))
    assert few == many and many["versions"] < 12


def test_a_version_is_registered_without_the_others(version):
    for i in range(3):
        version(weights=str(i))
    with counted() as few:
        version(weights="three")
    for i in range(8):
        version(weights=f"more {i}")
    with counted() as many:
        version(weights="twelve")
    assert few["statements"] == many["statements"]
    assert many["versions"] - few["versions"] == 9  # once each: MLflow reads them to find the new one's number


def test_a_page_lists_the_newest_children_of_a_base(version, monkeypatch):
    monkeypatch.setattr("qrl.registry.pages._CHILDREN", 3)
    for i in range(6):
        version("grpo" if i else "base", weights=str(i), parent=1 if i else None)
    page = versions.version_of(NAME, 1).description
    assert [f"[version {number}]" in page for number in range(2, 7)] == [False, False, True, True, True]
