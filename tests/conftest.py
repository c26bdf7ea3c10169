"""What every test shares: no run of somebody else's in the environment, and a store of its own where it wants one."""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

# Tests under `mlflow run -e test` would otherwise join the run that MLflow opened for pytest itself.
for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_URI"):
    os.environ.pop(name, None)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    """MLflow's database with nothing in it; it takes seconds to make, so it is made once and copied."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    folder = tmp_path_factory.mktemp("empty")
    SqlAlchemyStore(f"sqlite:///{folder}/mlflow.db", str(folder / "mlruns"))
    return folder / "mlflow.db"


@pytest.fixture
def store(empty_database, tmp_path, monkeypatch) -> str:
    """The address of a fresh store in a folder of its own, which is also the working directory."""
    import mlflow

    database = tmp_path / "store" / "mlflow.db"
    database.parent.mkdir()
    shutil.copyfile(empty_database, database)
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE experiments SET artifact_location = ?", (f"{database.parent}/mlruns/0",))
    monkeypatch.chdir(database.parent)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    mlflow.set_tracking_uri(f"sqlite:///{database}")
    yield f"sqlite:///{database}"
    while mlflow.active_run():
        mlflow.end_run("FAILED")
    mlflow.set_tracking_uri(None)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A whole checkpoint of a random Qwen2 with a tokenizer and a chat template, 2.5 MB of bf16."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qrl.tiny import tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    words = tokenizer.make(["Tom has 3 apples and buys 4 more. How many does he have? #### 7"] * 20, folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), **shape, **heads, **ends)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder
