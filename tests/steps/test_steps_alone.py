"""Steps run one by one: each prints at its end the command for the next, with its inputs."""

import re

import mlflow
import pytest

from qrl import cli
from qrl.errors import GateRefused

pytestmark = pytest.mark.process

SMALL = [
    "--device",
    "cpu",
    "--train.steps",
    "1",
    "--train.prompts_per_step",
    "2",
    "--train.questions",
    "8",
    "--train.micro_batch",
    "16",
    "--evaluate.n",
    "40",
]


def test_from_an_adapter_to_a_stage_by_what_each_step_says(store, capsys):
    def say(step: str, *words: str) -> str:
        cli.cli.main([step, "--recipe", "tiny-lora", *SMALL, *words], standalone_mode=False)
        return capsys.readouterr().out

    def following(output: str, step: str) -> list[str]:
        """Return the words of the next command, as the previous step printed it."""
        return re.search(rf"^Next .*`{step} ([^`]+)`", output, re.MULTILINE)[1].split()

    merge = following(say("train"), "merge")
    merged = say("merge", *merge)
    variant, address = following(merged, "quantize")[1].split("=")
    assert variant == "grpo" and address.startswith("models:/m-")
    stored = following(say("quantize", "--scheme", "nf4", "--models", f"base=qrl-tiny,{variant}={address}"), "evaluate")
    full = f"base:full=qrl-tiny,grpo:full={address}"
    ids = following(say("evaluate", "--cells", f"{full},{stored[1]}"), "compare")
    assert len(ids[1].split(",")) == 4
    assert "gain survival" in say("compare", *ids)
    promote = following(say("evaluate"), "promote")
    say("promote", "--stage", "base", *promote[2:])
    with pytest.raises(GateRefused, match="Stage grpo is refused"):  # one step on two questions teaches nothing
        say("promote", "--stage", "grpo", "--cell", ids[1].split(",")[1])
    assert int(mlflow.MlflowClient().get_model_version_by_alias("qrl-tiny", "base").version) == 1
