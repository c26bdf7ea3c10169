"""Weight statistics, each against its definition by another route, and movement between two checkpoints."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file, save_file

from qrl import checkpoint
from qrl.diagnose import weights
from qrl.errors import BadInput, QrlError
from qrl.formats import rtn


def change(source: Path, folder: Path, edit) -> Path:
    """A copy of a checkpoint with `edit` applied to its tensors."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def frame(tiny_checkpoint):
    return weights.measure(tiny_checkpoint, "base")


def test_measures_follow_their_definitions():
    matrix = torch.randn(32, 200, generator=torch.Generator().manual_seed(0))
    matrix[3, 5], matrix[7, 0] = 9.0, -11.0
    found, w = weights.describe(matrix, outlier_multiplier=5.0), matrix.numpy().astype(np.float64)
    lower = np.sort(np.abs(w), axis=None)[(w.size - 1) // 2]
    peaks = np.abs(w).max(1)
    assert found["median_abs"] == pytest.approx(lower)
    assert found["kurtosis"] == pytest.approx(scipy.stats.kurtosis(w, axis=None, fisher=False), rel=1e-5)
    assert found["std"] == pytest.approx(w.std(), rel=1e-6)
    assert found["rms"] == pytest.approx(np.sqrt((w**2).mean()), rel=1e-6)
    assert found["max_abs"] == 11.0
    assert found["abs_outlier_frac"] == pytest.approx((np.abs(w) > 5 * lower).mean())
    assert found["channel_outlier_frac"] == pytest.approx((peaks > 5 * np.sort(peaks)[15]).mean())
    assert found["w4_snr_db"] == rtn.error(matrix).snr_db


def test_a_planted_outlier_counts_once_and_a_planted_channel_too():
    matrix = torch.ones(16, 64)
    matrix[2, 9] = 100.0
    found = weights.describe(matrix, outlier_multiplier=6.0)
    assert found["abs_outlier_frac"] == 1 / matrix.numel()
    assert found["channel_outlier_frac"] == 1 / 16


def test_a_matrix_of_zeros_is_described_without_a_crash():
    found = weights.describe(torch.zeros(4, 8))
    assert found["max_abs"] == 0
    assert np.isnan(found["w4_relative_mse"])


def test_every_matrix_of_the_layers_and_the_tied_head_have_a_row(frame, tiny_checkpoint):
    stored = {name for name, entry in checkpoint.entries(tiny_checkpoint).items() if len(entry.shape) == 2}
    assert set(frame["tensor"]) == stored - {"model.embed_tokens.weight"} | {"lm_head.weight"}
    assert len(frame) == weights.count(tiny_checkpoint)
    row = frame.set_index("tensor").loc["model.layers.1.mlp.down_proj.weight"]
    assert (row["variant"], row["layer"], row["projection"], row["numel"]) == ("base", 1, "down_proj", 256 * 512)
    assert frame.set_index("tensor").loc["lm_head.weight", "layer"] == -1


def test_embeddings_on_request_and_a_tied_table_once(frame, tiny_checkpoint):
    named = set(weights.measure(tiny_checkpoint, "base", embeddings=True)["tensor"])
    assert "model.embed_tokens.weight" in named
    assert "lm_head.weight" not in named


def test_the_summary_weighs_by_size_but_takes_the_mean_snr(frame):
    found = weights.summary(frame)
    assert found["w4_relative_mse"] == pytest.approx(np.average(frame["w4_relative_mse"], weights=frame["numel"]))
    assert found["outlier_frac"] == pytest.approx(np.average(frame["abs_outlier_frac"], weights=frame["numel"]))
    assert found["w4_snr_db"] == pytest.approx(frame["w4_snr_db"].mean())


def test_progress_is_told_of_every_matrix(tiny_checkpoint):
    told = []
    weights.measure(tiny_checkpoint, "base", progress=told.append)
    assert sum(told) == weights.count(tiny_checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_named_and_counted(tiny_checkpoint, tmp_path, value):
    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][0, :3] = value

    broken = change(tiny_checkpoint, tmp_path / "broken", spoil)
    with pytest.raises(QrlError, match=r"layers\.0\.mlp\.up_proj\.weight holds 3 values"):
        weights.measure(broken, "base")


def test_nothing_moves_between_a_checkpoint_and_itself(tiny_checkpoint):
    moved = weights.movement(tiny_checkpoint, tiny_checkpoint)
    assert (moved[["relative_change", "code_flip_rate"]] == 0).all().all()
    assert weights.code_flip_rate(moved) == 0


def test_movement_is_measured_where_it_happened(tiny_checkpoint, tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"

    def negate(tensors):
        tensors[name] = -tensors[name]

    moved = weights.movement(tiny_checkpoint, change(tiny_checkpoint, tmp_path / "moved", negate)).set_index("tensor")
    codes = rtn.encode(dict(checkpoint.tensors(tiny_checkpoint))[name])[0]
    assert moved.loc[name, "relative_change"] == pytest.approx(2.0)
    assert moved.loc[name, "code_flip_rate"] == pytest.approx((codes != 0).double().mean().item())
    assert (moved.drop(index=name)["relative_change"] == 0).all()


def test_scaling_all_weights_moves_them_but_flips_no_code(tiny_checkpoint, tmp_path):
    def double(tensors):
        for name in tensors:
            tensors[name] = tensors[name] * 2

    moved = weights.movement(tiny_checkpoint, change(tiny_checkpoint, tmp_path / "doubled", double))
    assert np.allclose(moved["relative_change"], 1)
    assert weights.code_flip_rate(moved) == 0


def test_two_architectures_are_refused_with_their_difference(tiny_checkpoint, tmp_path):
    def shrink(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:100].clone()

    other = change(tiny_checkpoint, tmp_path / "other", shrink)
    with pytest.raises(BadInput, match=r"model\.norm\.weight.*256.*100"):
        weights.movement(tiny_checkpoint, other)
