"""A store for versions, and evaluated cells."""

import json
import shutil

import pytest

from qrl import checkpoint, names, recipe
from qrl.tracking import contents, models, runs
from tests.registry import made


@pytest.fixture
def version(store):
    """Return a maker of versions in a fresh store, as `made.version`."""
    return made.version


@pytest.fixture
def evaluated(store, tiny_checkpoint, tmp_path):
    """Return a maker of evaluated cells of somebody's model in the folder my-llama; `changed` makes other weights."""

    def make(
        cell: str, parent: str = "", changed: str = "", chat: str = "", finish_reason: str = "stop",
        questions: str = "of the questions", right: int = 10, unhealthy: str = "", **settings: str,
    ) -> tuple[str, str]:  # fmt: skip
        folder = tmp_path / (changed or "my-llama")
        if not folder.exists():
            shutil.copytree(tiny_checkpoint, folder)
            (folder / "generation_config.json").write_text(json.dumps({"note": changed}))
        variant, scheme = cell.split(":")
        labels, digest = {"variant": variant, "scheme": scheme}, checkpoint.digest(folder)
        tags = {names.TAG_STEP: "evaluate", names.TAG_DIGEST: digest}
        tags |= {names.TAG_VARIANT: variant, names.TAG_SCHEME: scheme}
        metadata = {"parent": parent} if parent else {"source": str(folder)}
        metadata |= {models.CHAT: chat} if chat else {}
        with runs.step("evaluate", recipe.load(overrides=settings)), runs.child(cell, tags=tags) as run:
            facts = {"digest": digest, "task": "arithmetic", "metadata": metadata, **labels}
            uri, _ = models.log_checkpoint(folder, name=f"{variant}-{scheme}", move=False, **facts)
            dataset = contents.log_dataset("arithmetic", digest=questions, context="heldout", n=20, source="")
            numbers = {names.ACCURACY: 0.6, names.ACCURACY_STDERR: 0.01, names.N: 20}
            contents.log_scores(numbers, model_uri=uri, dataset=dataset)
            facts = {"digest": digest} | ({"unhealthy": unhealthy} if unhealthy else {})
            made.log_rows(tmp_path, variant, scheme, right + (variant != "base"), finish_reason, **facts)
        return run.info.run_id, digest

    return make
