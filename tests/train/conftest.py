"""What several tests of training start from."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from qrl import tiny


@pytest.fixture(scope="module")
def away(tmp_path_factory):
    """Return the built-in model with shaken weights: a student that has something to learn from the built-in one."""
    folder = tmp_path_factory.mktemp("away") / "model"
    shutil.copytree(tiny.PATH, folder)
    model = AutoModelForCausalLM.from_pretrained(tiny.PATH, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder
