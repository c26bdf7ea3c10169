"""The command that a step prints at its end."""

import dataclasses
import re

import pytest

from qrl import recipe
from qrl.steps import outcome
from qrl.tracking import cells


@pytest.mark.parametrize(
    ("name", "changes", "scheme"),
    [
        ("tiny", {}, "nf4"),
        ("tiny", {"train.qat": "mxfp4"}, "rtn-mxfp4"),
        ("tiny", {"train.qat": "int4", "quantize.schemes": "awq"}, "rtn-int4"),
        ("qad-int4", {}, "rtn-int4"),
        ("tiny", {"train.qat": "formats/own.yaml"}, "rtn-file --quantize.format formats/own.yaml"),
    ],
)
def test_a_trained_model_is_quantized_next_by_the_scheme_that_it_was_trained_for(name, changes, scheme, capsys):
    outcome.print_model(recipe.load(name, changes), "models:/m-1")
    assert f"quantize --scheme {scheme} --models base=qrl-tiny," in capsys.readouterr().out


@pytest.mark.parametrize(
    ("labels", "together"),
    [
        ("base:full grpo:full base:nf4 grpo:nf4", "base:full grpo:full base:nf4 grpo:nf4"),
        ("base:full grpo:full base:nf4 grpo:nf4 grpo:awq", "base:full grpo:full base:nf4 grpo:nf4"),
        ("grpo:nf4 base:full grpo:full", "base:full grpo:full"),
        ("base:full base:nf4 grpo:nf4", ""),
        ("grpo:full qat:full", ""),
        ("", ""),
    ],
)
def test_cells_are_compared_as_far_as_one_table_can_hold_them(labels, together):
    run_ids = {cell: f"run of {cell}" for cell in labels.split()}
    assert outcome.comparable_cells(run_ids) == {cell: f"run of {cell}" for cell in together.split()}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"n": 8}, r"answered 8 questions, and gates admit no cell with fewer than 20 \(promote\.min_n\)"),
        ({"unhealthy": "16 % unfinished"}, "not healthy"),
    ],
)
def test_a_promotion_that_every_gate_must_refuse_is_not_recommended(changes, reason, monkeypatch, capsys):
    def printed(write, *arguments) -> str:
        write(recipe.load("tiny"), *arguments)
        return capsys.readouterr().out

    base = cells.Evaluated("r1", "base", "full", "d", "", "models:/m-1", 0.5, 0.05, 100, ())
    grpo = dataclasses.replace(base, run_id="r2", variant="grpo", **changes)
    monkeypatch.setattr(outcome.cells, "read", {"r1": base, "r2": grpo}.__getitem__)
    compared = printed(outcome.print_compared, ["r1", "r2"])
    assert f"promote --stage {'base' if changes else 'base,grpo'} " in compared
    assert bool(re.search(reason, compared))

    monkeypatch.setattr(outcome.cells, "read", {"r1": dataclasses.replace(base, **changes)}.__getitem__)
    evaluated = printed(outcome.print_evaluated, {"base:full": "m"}, {"base:full": "r1"})
    assert ("promote --stage base --cell r1" in evaluated) == (not changes)
    assert re.search(reason, evaluated)
