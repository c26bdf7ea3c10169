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


WORKS = {  # what is done, and how many versions it loads at most
    "resolve grpo": (lambda _: registry.resolve(NAME, "grpo"), 12),
    "resolve Staging": (lambda _: registry.resolve(NAME, "Staging"), 12),
    "resolve 3": (lambda _: registry.resolve(NAME, 3), 12),
    "promote": (lambda number: registry.promote(NAME, "grpo", number, record=WHY), 40),
}


@pytest.mark.slow
def test_nothing_sends_more_statements_or_loads_more_versions_for_many_versions(version):
    numbers: list[int] = []
    found: dict[str, list[dict[str, int]]] = {work: [] for work in WORKS}
    for more in (4, 10):
        numbers += [version("grpo", weights=f"{len(numbers) + i}").version for i in range(more)]
        for number in numbers[-3:-1]:  # so that the stage has had a version before
            registry.promote(NAME, "grpo", number, record=WHY)
        for work, (do, _) in WORKS.items():
            with counted() as count:
                do(numbers[-1])
            found[work].append(dict(count))
    for work, (few, many) in found.items():
        assert few == many and many["versions"] < WORKS[work][1], work


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
