"""The command that a step prints at its end."""

import pytest

from qrl import recipe
from qrl.steps import outcome


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
