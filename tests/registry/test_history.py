"""The record of decisions: it is the truth, nobody edits it away, and pointers follow it whatever was killed."""

import dataclasses
import errno
import json
import math
import os
import sqlite3
import time
from datetime import datetime
from types import SimpleNamespace

import mlflow
import pytest
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

from qrl import names, recipe, registry
from qrl.errors import BadInput, GateRefused, QrlError, UnhealthyCell
from qrl.registry import adopt, history, versions
from qrl.steps import evaluate as evaluating
from qrl.steps import history as shown_history
from qrl.steps import promote as promoting
from qrl.tracking import cells
from qrl.workspace import WORK
from tests.registry.made import NAME

WHY = {"run": "r", "reasons": ["it was better."], "bounds": {"gain": 0.1}}


def pointers() -> dict[str, int]:
    return {alias: int(number) for alias, number in mlflow.MlflowClient().get_registered_model(NAME).aliases.items()}


def shown() -> dict[int, str]:
    return {int(mv.version): mv.current_stage for mv in mlflow.MlflowClient().search_model_versions(f"name = '{NAME}'")}


def record() -> history.History:
    return history.read_history(NAME, versions.model_of(NAME))


def denied(*_args: object, **_more: object) -> None:
    raise mlflow.MlflowException("Permission denied", PERMISSION_DENIED)


def database(store: str) -> sqlite3.Connection:
    return sqlite3.connect(store.removeprefix("sqlite:///"))


def test_each_decision_is_one_link_of_a_chain(version):
    version(), version()
    registry.promote(NAME, "grpo", 1, record=WHY)
    registry.promote(NAME, "grpo", 2, record=WHY | {"reasons": ["long " * 5000], "bounds": {"gain": float("nan")}})
    registry.refuse(NAME, "grpo", 1, record={"reasons": ["it was worse."]})
    registry.rollback(NAME, "grpo")
    records = record().records
    assert [(entry.number, entry.action, entry.version) for entry in records] == [
        *((1, "promote", 1), (2, "promote", 2), (3, "refuse", 1), (4, "rollback", 1))
    ]
    assert records[1].reasons == ("long " * 5000,) and records[0].by.count("@") == 1 and records[3].run == "r"
    assert len({entry.previous for entry in records}) == 4 and record().state.aliases() == pointers()
    run = mlflow.get_run(record().run_id)
    assert run.info.status == "FINISHED" and not mlflow.search_runs(filter_string="attributes.status = 'RUNNING'").size


def test_two_writers_of_one_number_are_one_writer_and_one_that_is_told(version):
    version()
    registry.promote(NAME, "base", 1, record=WHY)
    model_history = record()
    assert history.claim_next(model_history, {"action": "refuse", "stage": "grpo", "version": 1})
    same = {"action": "refuse", "stage": "grpo", "version": 1}
    assert not history.claim_next(model_history, same)
    assert len(record().records) == 2


def test_two_hosts_that_begin_a_record_at_once_share_it(version, monkeypatch):
    version()
    model, entries = versions.model_of(NAME), versions.versions_of(NAME)
    first = adopt.begin(model, entries)
    seen = mlflow.get_run(entries[0].run_id)
    stale = mlflow.entities.Run(seen.info, mlflow.entities.RunData())
    monkeypatch.setattr(
        adopt.history, "find_run", lambda run_id: stale
    )  # the other host looked before the first one wrote
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


@pytest.mark.slow
def test_a_pointer_moves_whole_wherever_its_process_is_killed(version, monkeypatch):
    for _ in range(4):
        version()
    registry.promote(NAME, "grpo", 4, record=WHY)
    registry.promote(NAME, "awq", 1, record=WHY)
    registry.promote(NAME, "awq", 2, record=WHY)
    moves = [lambda: registry.rollback(NAME, "awq"), lambda: registry.promote(NAME, "awq", 3, record=WHY)]
    for place in range(20):
        before = record().state
        count_before = len(record().records)
        with monkeypatch.context() as patched:
            killed_at(patched, place // 2)
            try:
                moves[place % 2]()
            except Died:
                pass
            else:
                assert place > 6
        assert len(record().records) > count_before or record().state == before
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
    ("change", "message"),
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
        ("DELETE FROM runs WHERE name LIKE 'decisions on %'", "is gone: restore the database"),
    ],
)
def test_a_record_that_was_edited_in_the_database_is_refused(version, store, change, message):
    version(), version()
    registry.promote(NAME, "base", 1, record=WHY)
    registry.promote(NAME, "base", 2, record=WHY)
    with database(store) as connection:
        assert connection.execute(change).rowcount == 1
    with pytest.raises(QrlError, match=message):
        registry.resolve(NAME, "base")


def test_a_record_that_is_gone_for_good_is_begun_anew(version, store):
    version(), version()
    registry.promote(NAME, "base", 1, record=WHY)
    registry.promote(NAME, "base", 2, record=WHY)
    for _ in range(2):  # the second time it is the new record that is gone
        gone = record().run_id
        with database(store) as connection:  # as `mlflow gc` does
            for table in ("params", "tags", "metrics", "runs"):
                connection.execute(f"DELETE FROM {table} WHERE run_uuid = '{gone}'")
        with pytest.raises(QrlError, match=r"delete the model's tag qrl\.history"):
            registry.resolve(NAME, "base")
        mlflow.MlflowClient().delete_registered_model_tag(NAME, names.TAG_HISTORY)
        assert registry.resolve(NAME, "base").version == 2 and record().run_id != gone
        assert [each.action for each in record().records] == ["adopt"] and record().applied == 1
    assert registry.rollback(NAME, "base").version == 1


def test_a_kill_while_a_record_is_begun_anew_leaves_nothing_to_mend(version, store, monkeypatch):
    version()
    registry.promote(NAME, "base", 1, record=WHY)
    registry.promote(NAME, "base", 1, record=WHY)
    gone = record().run_id
    with database(store) as connection:
        for table in ("params", "tags", "metrics", "runs"):
            connection.execute(f"DELETE FROM {table} WHERE run_uuid = '{gone}'")
    mlflow.MlflowClient().delete_registered_model_tag(NAME, names.TAG_HISTORY)
    log_param = mlflow.MlflowClient.log_param

    def log_and_die(client, *arguments, **options) -> None:
        log_param(client, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(mlflow.MlflowClient, "log_param", log_and_die)
        registry.resolve(NAME, "base")
    assert registry.resolve(NAME, "base").version == 1 and [each.action for each in record().records] == ["adopt"]


def test_a_record_that_somebody_else_wrote_does_not_count(version, monkeypatch):
    version(), version()
    registry.promote(NAME, "awq", 1, record=WHY)
    client, own = mlflow.MlflowClient(), record()
    forged = client.create_run("0")
    forged_record = dataclasses.replace(own.records[0], version=2, digest=registry.resolve(NAME, 2).digest)
    text = json.dumps(dataclasses.asdict(forged_record), default=str)
    client.log_param(forged.info.run_id, "000001", f"x 1 {text}")
    client.log_param(client.get_model_version(NAME, "1").run_id, f"{history.record_param(NAME)}.1", forged.info.run_id)
    for value in (forged.info.run_id, "nowhere", None):
        if value:
            client.set_registered_model_tag(NAME, names.TAG_HISTORY, value)
        else:
            client.delete_registered_model_tag(NAME, names.TAG_HISTORY)
        client.set_model_version_tag(NAME, "2", names.gate_tag("awq"), "passed")
        client.set_registered_model_alias(NAME, "awq", "2")
        with monkeypatch.context() as patched:  # a user who may only read
            patched.setattr(mlflow.MlflowClient, "log_param", denied)
            assert registry.resolve(NAME, "awq").version == 1 and not registry.resolve(NAME, 2).records
        assert registry.resolve(NAME, "awq").version == 1 == pointers()["awq"]
        assert record().run_id == own.run_id == client.get_registered_model(NAME).tags[names.TAG_HISTORY]


def test_a_record_that_was_deleted_is_restored(version):
    version(), version()
    registry.promote(NAME, "base", 1, record=WHY)
    client, run_id = mlflow.MlflowClient(), record().run_id
    client.delete_run(run_id)
    assert registry.promote(NAME, "base", 2, record=WHY).version == 2 and record().run_id == run_id
    client.delete_run(run_id)
    client.delete_registered_model_tag(NAME, names.TAG_HISTORY)
    assert registry.resolve(NAME, "base").version == 2 and client.get_run(run_id).info.lifecycle_stage == "active"
    assert [each.action for each in record().records] == ["promote", "mend", "promote", "mend"]


@pytest.mark.parametrize("clock", ["2001-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"])
def test_another_host_takes_over_by_its_own_clock(version, monkeypatch, clock):
    version(), version()
    registry.promote(NAME, "awq", 1, record=WHY)
    decision = {"action": "promote", "stage": "awq", "version": 2, "declared": str(history.USUAL["awq"])}
    with monkeypatch.context() as patched:
        patched.setattr(history.owners, "this_process", lambda: "elsewhere:1:2")
        elsewhere = type("Clock", (), {"now": lambda zone: datetime.fromisoformat(clock)})
        patched.setattr(history, "datetime", elsewhere)
        assert history.claim_next(record(), decision)
    for _ in range(2):  # what is recorded counts; who recorded it still has time to move the pointers
        assert registry.resolve(NAME, "awq").version == 2 and pointers()["awq"] == 1
    assert list(WORK.glob("registry-*.seen"))
    monkeypatch.setattr(versions, "_seen", {})  # another command of this machine, a minute later
    later = time.monotonic() + 61
    monkeypatch.setattr(versions.time, "monotonic", lambda: later)
    assert registry.resolve(NAME, "awq").version == 2 and pointers() == {"awq": 2, "awq-previous": 1}


def test_a_lock_that_is_not_released_is_a_sentence(version, monkeypatch):
    version()
    monkeypatch.setattr(versions, "WAIT_S", 0.1)
    with versions.locked(NAME), pytest.raises(QrlError, match=r"held the registry's lock .*registry.lock for 0.1 s"):
        registry.promote(NAME, "base", 1, record=WHY)
    assert registry.promote(NAME, "base", 1, record=WHY).version == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (mlflow.MlflowException("Permission denied", PERMISSION_DENIED), "denies this user"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"), "No space left on device.*free the disk"),
        (mlflow.MlflowException("It takes too long."), "cannot be loaded: It takes too long"),
    ],
)
def test_files_that_cannot_be_had_are_not_called_gone(version, monkeypatch, error, message):
    version()

    def failing(*_args: object) -> None:
        raise error

    monkeypatch.setattr(versions.models.ModelsArtifactRepository, "get_underlying_uri", failing)
    with pytest.raises(QrlError, match=message):
        versions.folder(registry.resolve(NAME, 1))


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
    unhealthy, _ = evaluated("base:full", finish_reason="length")
    refused(unhealthy, "truncation_rate is 1.000")
    few = recipe.load(overrides={"registered_name": NAME, "promote.min_n": "21"})
    with pytest.raises(GateRefused, match=r"answered 20 questions, fewer than promote.min_n = 21"):
        promoting.promote(few, ["base"], [evaluated("base:full")[0]], {"registered_name"})


def test_a_cell_that_quantization_made_unhealthy_counts_and_its_gate_refuses_it(evaluated, store):
    free = recipe.load(overrides={"registered_name": NAME, "promote.min_gain": "-1", "promote.max_loss": "1"})
    base, digest = evaluated("base:full")
    trained, own = evaluated("grpo:full", parent=digest, changed="trained")
    promoting.promote(free, ["base", "grpo"], [base, trained], {"registered_name"})
    note = {"finish_reason": "length", "unhealthy": "100 % unfinished, 0 % at full precision"}
    stored, _ = evaluated("grpo:awq", parent=own, changed="stored", **note)
    assert cells.read(stored).broken == ()  # its run has finished
    message = (
        r"Stage awq is refused: Quantization made the answers unhealthy \(100 % unfinished, 0 % at full precision\)"
    )
    with pytest.raises(GateRefused, match=message):
        promoting.promote(free, ["awq"], [stored], {"registered_name"})
    assert "awq" not in pointers()


def test_the_rows_that_an_earlier_stage_rests_on_cannot_be_edited_away(evaluated, store):
    """Lower accuracy of the base would make any gain significant."""
    free = recipe.load(overrides={"registered_name": NAME, "promote.min_gain": "-1"})
    base, digest = evaluated("base:full")
    trained, _ = evaluated("grpo:full", parent=digest, changed="trained")
    promoting.promote(free, ["base"], [base], {"registered_name"})
    frame = cells.rows([base])
    with database(store) as connection:
        connection.execute("DELETE FROM params WHERE key = 'evidence' AND run_uuid = ?", (base,))
    frame.assign(correct=0).to_parquet(cells.contents.artifact(base, names.QUESTIONS))
    with pytest.raises(GateRefused, match=f"Stage base rests on the rows of run {base}, whose record is not the one"):
        promoting.promote(free, ["grpo"], [trained], {"registered_name"})


def test_a_stage_that_moves_says_from_where_and_whether_the_questions_are_others(evaluated, capsys):
    free = recipe.load(overrides={"registered_name": NAME})
    for changed, questions, message in (
        ("", "of the questions", "base is version 1 of qrl-tiny. "),
        ("other", "of the questions", "instead of version 1, to which --rollback returns"),
        ("third", "other ones", "instead of version 2, evaluated on other questions, to which --rollback returns"),
    ):
        run_id, _ = evaluated("base:full", changed=changed, questions=questions)
        promoting.promote(free, ["base"], [run_id], {"registered_name"})
        assert message in capsys.readouterr().err


@pytest.mark.process
def test_a_failed_cell_that_is_declared_finished_is_refused(store):
    settings = {"registered_name": NAME, "device": "cpu", "evaluate.n": "20", "evaluate.max_new_tokens": "4"}
    cut = recipe.load("tiny", settings)
    with pytest.raises(UnhealthyCell):
        evaluating.evaluate(cut, None)
    client = mlflow.MlflowClient()
    step, cell = sorted(client.search_runs(["0"]), key=lambda run: "mlflow.parentRunId" in run.data.tags)
    assert cell.info.status == step.info.status == "FAILED"
    for run in (step, cell):
        client.set_terminated(run.info.run_id, "FINISHED")
    client.log_metric(cell.info.run_id, names.ACCURACY, 0.999)
    with pytest.raises(GateRefused, match=r"evaluation was unhealthy.*eval/truncation_rate"):
        promoting.promote(cut, ["base"], [cell.info.run_id], {"registered_name"})
    assert not versions.model_of(NAME) or not pointers()


def test_records_show_what_was_production_on_a_day(version, store, capsys):
    for _ in range(2):
        version()
    settings = recipe.load(overrides={"registered_name": NAME})
    with pytest.raises(BadInput, match="no decision"):
        shown_history.show(settings, "awq", None)
    registry.promote(NAME, "awq", 1, record=WHY)
    registry.promote(NAME, "awq", 2, record=WHY)
    model_history = record()
    dated = [
        dataclasses.replace(each, time=f"2026-11-{20 + place}T10:00:00+00:00")
        for place, each in enumerate(model_history.records)
    ]
    model_history = dataclasses.replace(model_history, records=tuple(dated))
    for at, expected in (
        ("2026-11-20", "version 1"),
        ("2026-11-21T09:59:59", "version 1"),
        ("2026-11-21", "version 2"),
    ):
        for stage in ("awq", "Production"):
            line = shown_history.at(model_history, stage, at)
            assert expected in line and "it was better." in line and "run r" in line
    assert "no version" in shown_history.at(model_history, "awq", "2026-11-19")
    assert "version 2" in shown_history.at(model_history, "awq", "20261121")  # a date is its end, however it is written
    for wrong in ("yesterday", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00"):
        with pytest.raises(BadInput, match="--at"):
            shown_history.at(model_history, "awq", wrong)
    for stage in ("awq", "Production", "production"):
        shown_history.show(settings, stage, None)
        out = capsys.readouterr().out
        assert out.count("promote") == 2 and "version 2" in out and "it was better." in out
    shown_history.show(settings, "Staging", None)  # which nothing was promoted to
    shown_history.show(settings, "staging", "2999-01-01")
    assert "stage grpo: 0 decisions" in (out := capsys.readouterr().out) and "Staging (stage grpo)" in out
    with pytest.raises(BadInput, match="no stage 'none'"):
        shown_history.show(settings, "none", None)

    capsys.readouterr()
    registry.promote(NAME, "base", 1, record=WHY)
    shown_history.show(settings, None, None)
    out = capsys.readouterr().out
    assert out.count("promote") == 3 and f"{NAME}, all stages: 3 decisions" in out
    shown_history.show(settings, None, "9000-01-01")
    out = capsys.readouterr().out
    assert "base of" in out and "was version 1" in out and "awq of" in out and "was version 2" in out

    # A model that the user did not name is found where it is the only one with decisions.
    other = recipe.load(overrides={"registered_name": "another"})
    shown_history.show(other, None, None, is_chosen=False)
    assert f"{NAME}, all stages" in capsys.readouterr().out
    with pytest.raises(BadInput, match=f"no decision on 'another' yet; the models with decisions here are {NAME}"):
        shown_history.show(other, None, None)


def test_what_an_older_store_did_not_record_is_not_known(version, capsys):
    version()
    client = mlflow.MlflowClient()
    said = {"run": "r", "digest": "d", "reasons": ["it was better."], "time": "2026-01-02T03:04:05+00:00"}
    client.set_model_version_tag(NAME, "1", names.gate_record_tag("awq"), json.dumps(said))
    client.set_model_version_tag(NAME, "1", names.gate_tag("awq"), "passed")
    client.set_registered_model_alias(NAME, "awq", "1")
    assert registry.resolve(NAME, "awq").version == 1
    for day, gates in (("2026-01-01", 0), ("2026-01-02", 1)):
        told = shown_history.at(record(), "production", day)
        assert "is not known" in told and "had no version" not in told and told.count("it was better.") == gates
    assert "was version 1" in shown_history.at(record(), "awq", "2999-01-01")


def test_a_user_who_may_only_read_sees_what_was_decided(version, monkeypatch):
    for _ in range(2):
        version()
    registry.promote(NAME, "awq", 1, record=WHY)
    mlflow.MlflowClient().set_registered_model_alias(NAME, "awq", "2")

    for name in WRITES:
        monkeypatch.setattr(mlflow.MlflowClient, name, denied)
    assert registry.resolve(NAME, "awq").version == 1 and pointers() == {"awq": 2}
    with pytest.raises(BadInput, match="denies this user"):
        registry.promote(NAME, "awq", 2, record=WHY)


def test_a_decision_is_not_dated_before_the_one_that_it_follows():
    ahead = history.Record("promote", time="2999-01-01T00:00:00+00:00")  # the clock was set back since
    before = SimpleNamespace(records=[ahead], chain="")
    assert history._complete(before, 2, {"action": "promote"}).time == ahead.time
