"""A promotion is the next command of a step only if a gate could let it in."""

import re

import pytest

from qrl import recipe
from qrl.steps import outcome

REFUSALS = [
    (20, "", ""),
    (21, "", r"answered 20 questions, and gates admit no cell with fewer than 21 \(promote\.min_n\)"),
    (20, "16 % unfinished", "not healthy"),
]


@pytest.mark.parametrize(("min_n", "unhealthy", "reason"), REFUSALS)
def test_a_base_that_every_gate_must_refuse_is_not_promoted_next(evaluated, min_n, unhealthy, reason, capsys):
    base, _ = evaluated("base:full", unhealthy=unhealthy)
    capsys.readouterr()
    settings = recipe.load("tiny", {"promote.min_n": str(min_n)})
    outcome.print_evaluated(settings, {"base:full": "m"}, {"base:full": base})
    printed = capsys.readouterr().out
    assert (f"promote --stage base --cell {base}" in printed) == (not reason)
    assert re.search(reason, printed)


@pytest.mark.parametrize(("min_n", "unhealthy", "reason"), REFUSALS)
def test_stages_are_promoted_next_up_to_the_first_that_must_be_refused(evaluated, min_n, unhealthy, reason, capsys):
    base, digest = evaluated("base:full")
    grpo, _ = evaluated("grpo:full", parent=digest, changed="trained", unhealthy=unhealthy)
    capsys.readouterr()
    outcome.print_compared(recipe.load("tiny", {"promote.min_n": str(min_n)}), [base, grpo])
    printed = capsys.readouterr().out
    stages = {"": "base,grpo", "not healthy": "base"}.get(reason)
    assert ("promote --stage " in printed) == bool(stages)
    assert not stages or f"promote --stage {stages} --cell " in printed
    assert re.search(reason, printed)
