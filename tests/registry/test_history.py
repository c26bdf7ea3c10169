"""The record of decisions: it is the truth, nobody edits it away, and pointers follow it whatever was killed."""

import dataclasses
import json
import math
import sqlite3

import mlflow
import pytest
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

from qrl import names, recipe, registry
from qrl.errors import BadInput, GateRefused, QrlError
from qrl.registry import adopt, history, versions
from qrl.steps import promote as promoting
from qrl.tracking import cells, reuse
from tests.registry.made import NAME

WHY = {"run": "r", "reasons": ["it was better."], "bounds": {"gain": 0.1}}


def pointers() -> dict[str, int]:
    return {alias: int(number) for alias, number in mlflow.MlflowClient().get_registered_model(NAME).aliases.items()}


def shown() -> dict[int, str]:
    return {int(mv.version): mv.current_stage for mv in mlflow.MlflowClient().search_model_versions(f"name = '{NAME}'")}


def record() -> history.History:
    return history.read(NAME, versions.model_of(NAME))


def database(store: str) -> sqlite3.Connection:
    return sqlite3.connect(store.removeprefix("sqlite:///"))


def test_each_decision_is_one_link_of_a_chain(version):
    version(), version()
    registry.promote(NAME, "grpo", 1, record=WHY)
    registry.promote(NAME, "grpo", 2, record=WHY | {"reasons": ["long " * 5000], "bounds": {"gain": float("nan")}})
    registry.refuse(NAME, "grpo", 1, record={"reasons": ["it was worse."]})
    registry.rollback(NAME, "grpo")
    said = record().records
    assert [(each.number, each.action, each.version) for each in said] == [
        *((1, "promote", 1), (2, "promote", 2), (3, "refuse", 1), (4, "rollback", 1))
    ]
    assert said[1].reasons == ("long " * 5000,) and said[0].by.count("@") == 1 and said[3].run == "r"
    assert len({each.previous for each in said}) == 4 and record().state.aliases() == pointers()
    run = mlflow.get_run(record().run_id)
    assert run.info.status == "FINISHED" and not mlflow.search_runs(filter_string="attributes.status = 'RUNNING'").size


def test_two_writers_of_one_number_are_one_writer_and_one_that_is_told(version):
    version()
    registry.promote(NAME, "base", 1, record=WHY)
    past = record()
    assert history.claim(past, {"action": "refuse", "stage": "grpo", "version": 1})
    assert not history.claim(past, {"action": "refuse", "stage": "grpo", "version": 1})  # to the letter the same
    assert len(record().records) == 2


def test_two_hosts_that_begin_a_record_at_once_share_it(version, monkeypatch):
    version()
    model, entries = versions.model_of(NAME), versions.versions_of(NAME)
    first = adopt.begin(model, entries)
    seen = mlflow.get_run(entries[0].run_id)
    stale = mlflow.entities.Run(seen.info, mlflow.entities.RunData())
    monkeypatch.setattr(adopt, "_origin", lambda versions: stale)  # the other host looked before the first one wrote
    assert adopt.begin(model, entries) == first
    monkeypatch.undo()
    mlflow.MlflowClient().delete_registered_model_tag(NAME, names.TAG_HISTORY)
    assert registry.promote(NAME, "base", 1, record=WHY).version == 1 and record().run_id == first


WRITES = ("log_param", "set_registered_model_alias", "transition_model_version_stage", "set_registered_model_tag")
WRITES += ("set_model_version_tag", "update_model_version")


class Died(BaseException):
    """What the process is killed with here: nothing catches it."""


def killed_at(monkeypatch, place: int) -> None:
    """Let the process die before its write number `place` from now; another one goes on."""
    left = [place]

    def dying(write):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Died
            return write(*args, **kwargs)

        return call

    for name in WRITES:
        monkeypatch.setattr(mlflow.MlflowClient, name, dying(getattr(mlflow.MlflowClient, name)))


def test_a_pointer_moves_whole_wherever_its_process_is_killed(version, monkeypatch):
    for _ in range(4):
        version()
    registry.promote(NAME, "grpo", 4, record=WHY)
    registry.promote(NAME, "awq", 1, record=WHY)
    registry.promote(NAME, "awq", 2, record=WHY)
    moves = [lambda: registry.rollback(NAME, "awq"), lambda: registry.promote(NAME, "awq", 3, record=WHY)]
    for place in range(20):
        before, decided = record().state, len(record().records)
        with monkeypatch.context() as patched:
            killed_at(patched, place // 2)
            try:
                moves[place % 2]()
            except Died:
                pass
            else:
                assert place > 6
        assert len(record().records) > decided or record().state == before
        now, former = (record().state.aliases()[alias] for alias in ("awq", "awq-previous"))
        if place % 3 == 0:
            assert registry.resolve(NAME, "awq").version == registry.resolve(NAME, "Production").version == now
        elif place % 3 == 1:
            registry.promote(NAME, "grpo", 4, record=WHY)
        else:
            assert registry.rollback(NAME, "awq").version == former != now  # no version was lost
        assert pointers() == record().state.aliases() and record().applied == len(record().records)
        assert [number for number, stage in shown().items() if stage == "Production"] == [record().state.at["awq"]]


def test_what_is_set_by_hand_is_put_back_and_recorded(version, capsys):
    for _ in range(3):
        version()
    registry.promote(NAME, "awq", 1, record=WHY)
    client = mlflow.MlflowClient()
    client.set_registered_model_alias(NAME, "awq", "3")
    client.set_registered_model_alias(NAME, "grpo", "2")
    client.set_registered_model_alias(NAME, "champion", "2")
    registry.promote(NAME, "base", 1, record=WHY)  # another stage: it mirrored version 3 into Production
    assert pointers() == {"base": 1, "awq": 1, "champion": 2} and shown() == {1: "Production", 2: "None", 3: "None"}
    assert "changed by hand" in capsys.readouterr().err
    assert record().records[1].action == "mend" and "awq was version 3" in record().records[1].reasons[0]
    with pytest.warns(FutureWarning):
        client.transition_model_version_stage(NAME, "3", "Production", archive_existing_versions=True)
    client.delete_registered_model_alias(NAME, "awq")
    assert registry.resolve(NAME, "Production").version == 1
    assert shown()[1] == "Production" and shown()[3] == "Archived" and pointers()["awq"] == 1
    client.set_model_version_tag(NAME, "2", "qrl.gate.awq", "passed")
    with pytest.raises(GateRefused, match="No gate let"):
        versions.verify(registry.resolve(NAME, 2))
    client.delete_model_version(NAME, "1")
    with pytest.raises(BadInput, match=r"Version 1 of .* awq, was deleted"):
        registry.resolve(NAME, "awq")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "UPDATE params SET value = replace(value, 'better', 'best') WHERE key = '000001'",
            "decision 2 does not follow",
        ),
        ("UPDATE params SET value = 'x' WHERE key = '000002'", "decision 2 does not follow"),
        (f"UPDATE params SET value = 'x 1 {'[' * 5000}' WHERE key = '000002'", "decision 2 does not follow"),
        (
            f"UPDATE registered_model_tags SET value = '{'9' * 4900}' WHERE key = 'qrl.history.applied'",
            "ends at 2, but",
        ),
        ("DELETE FROM params WHERE key = '000002'", "ends at 1, but 2 were carried out"),
        ("UPDATE registered_model_tags SET value = 'nowhere' WHERE key = 'qrl.history'", "run nowhere, is gone"),
    ],
)
def test_a_record_that_was_edited_in_the_database_is_refused(version, store, change, said):
    version(), version()
    registry.promote(NAME, "base", 1, record=WHY)
    registry.promote(NAME, "base", 2, record=WHY)
    with database(store) as connection:
        assert connection.execute(change).rowcount == 1
    with pytest.raises(QrlError, match=said):
        registry.resolve(NAME, "base")


def test_evidence_that_was_edited_is_refused(evaluated, store, tmp_path):
    free = recipe.load(overrides={"registered_name": NAME})
    client = mlflow.MlflowClient()

    def refused(run_id: str, why: str, error: type[QrlError] = GateRefused) -> None:
        with pytest.raises(error, match=why):
            promoting.promote(free, ["base"], [run_id], {"registered_name"})

    run_id, _ = evaluated("base:full")
    client.log_metric(run_id, names.ACCURACY, 0.999)
    client.log_metric(run_id, names.N, math.nan)
    client.set_tag(run_id, names.TAG_SCHEME, "nf4")  # the seal says which cell it was
    promoting.promote(free, ["base"], [run_id], {"registered_name"})
    tags = registry.resolve(NAME, "base").tags
    assert (tags["accuracy"], tags["n"]) == ("0.5000", "20")
    rows = cells.contents.artifact(run_id, names.QUESTIONS)
    frame = cells.rows([run_id])
    frame.assign(correct=1).to_parquet(rows)
    refused(run_id, "bytes have changed", QrlError)
    with pytest.raises(mlflow.MlflowException, match="not allowed"):
        client.log_param(run_id, "evidence", json.dumps({"rows": "of other rows"}))
    for text in ("{", "[1]"):
        with database(store) as connection:
            connection.execute("UPDATE params SET value = ? WHERE key = 'evidence'", (text,))
        refused(run_id, "evidence of run .* cannot be read", QrlError)
    with database(store) as connection:
        connection.execute("DELETE FROM params WHERE key = 'evidence'")
    refused(run_id, "no record of its rows")
    before, _ = evaluated("base:full")  # as earlier versions recorded it
    with database(store) as connection:
        connection.execute("DELETE FROM params WHERE key = 'evidence'")
    with mlflow.start_run(before):
        reuse.record_outputs(artifacts=[names.QUESTIONS])
    promoting.promote(free, ["base"], [before], {"registered_name"})
    cells.contents.artifact(before, "outputs.json").unlink()
    refused(before, "no record of its rows")
    unhealthy, _ = evaluated("base:full", finish_reason="length")
    refused(unhealthy, "truncation_rate is 1.000")
    few = recipe.load(overrides={"registered_name": NAME, "promote.min_n": "21"})
    with pytest.raises(GateRefused, match=r"answered 20 questions, fewer than promote.min_n = 21"):
        promoting.promote(few, ["base"], [evaluated("base:full")[0]], {"registered_name"})


def test_records_show_what_was_production_on_a_day(version, store, capsys):
    from qrl.steps import history as shown_history

    for _ in range(2):
        version()
    settings = recipe.load(overrides={"registered_name": NAME})
    with pytest.raises(BadInput, match="no decision"):
        shown_history.show(settings, "awq", None)
    registry.promote(NAME, "awq", 1, record=WHY)
    registry.promote(NAME, "awq", 2, record=WHY)
    past = record()
    dated = [
        dataclasses.replace(each, time=f"2026-11-{20 + place}T10:00:00+00:00")
        for place, each in enumerate(past.records)
    ]
    past = dataclasses.replace(past, records=tuple(dated))
    for at, said in (("2026-11-20", "version 1"), ("2026-11-21T09:59:59", "version 1"), ("2026-11-21", "version 2")):
        for stage in ("awq", "Production"):
            line = shown_history.at(past, stage, at)
            assert said in line and "it was better." in line and "run r" in line
    assert "no version" in shown_history.at(past, "awq", "2026-11-19")
    with pytest.raises(BadInput, match="--at"):
        shown_history.at(past, "awq", "yesterday")
    shown_history.show(settings, "awq", None)
    out = capsys.readouterr().out
    assert out.count("promote") == 2 and "version 2" in out and "it was better." in out


def test_a_user_who_may_only_read_sees_what_was_decided(version, monkeypatch):
    for _ in range(2):
        version()
    registry.promote(NAME, "awq", 1, record=WHY)
    mlflow.MlflowClient().set_registered_model_alias(NAME, "awq", "2")

    def denied(*_args: object, **_more: object) -> None:
        raise mlflow.MlflowException("Permission denied", PERMISSION_DENIED)

    for name in WRITES:
        monkeypatch.setattr(mlflow.MlflowClient, name, denied)
    assert registry.resolve(NAME, "awq").version == 1 and pointers() == {"awq": 2}
    with pytest.raises(BadInput, match="denies this user"):
        registry.promote(NAME, "awq", 2, record=WHY)
