"""Weight statistics, each against its definition by another route, and movement between two checkpoints."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file, save_file

from qrl import checkpoint
from qrl.diagnose import movement as moving
from qrl.diagnose import rank, schemes, sweep, weights
from qrl.errors import BadInput
from qrl.formats import decode, proxy
from qrl.recipe.sections import Diagnose


def change(source: Path, folder: Path, edit) -> Path:
    """Return a copy of a checkpoint with `edit` applied to its tensors."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def describe(folder: Path, matrix: torch.Tensor, **settings) -> dict[str, float]:
    """Return what `measure` finds in a checkpoint of this one matrix."""
    save_file({"lm_head.weight": matrix}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return weights.measure(folder, "base", Diagnose(**settings)).iloc[0].to_dict()


@pytest.fixture(scope="module")
def frame(tiny_checkpoint):
    return weights.measure(tiny_checkpoint, "base")


def test_measures_follow_their_definitions(tmp_path):
    matrix = torch.randn(32, 200, generator=torch.Generator().manual_seed(0))
    matrix[3, 5], matrix[7, 0] = 9.0, -11.0
    measured, w = describe(tmp_path, matrix, outlier_multiplier=5.0), matrix.numpy().astype(np.float64)
    lower = np.sort(np.abs(w), axis=None)[(w.size - 1) // 2]
    peaks = np.abs(w).max(1)
    assert measured["median_abs"] == pytest.approx(lower)
    assert measured["kurtosis"] == pytest.approx(scipy.stats.kurtosis(w, axis=None, fisher=False), rel=1e-5)
    assert measured["std"] == pytest.approx(w.std(), rel=1e-6)
    assert measured["rms"] == pytest.approx(np.sqrt((w**2).mean()), rel=1e-6)
    assert measured["max_abs"] == 11.0
    assert measured["abs_outlier_frac"] == pytest.approx((np.abs(w) > 5 * lower).mean())
    assert measured["channel_outlier_frac"] == pytest.approx((peaks > 5 * np.sort(peaks)[15]).mean())
    groups = proxy.grouped(matrix.float(), 128)
    squared, _ = proxy.scan(groups, groups.abs().amax(-1, keepdim=True))
    assert measured["w4_snr_db"] == pytest.approx(proxy.snr_db(squared / (w**2).sum()), rel=1e-12)


def by_definition(w: np.ndarray, multiplier: float = 6.0, group_size: int = 128) -> dict[str, float]:
    """Compute every measure from its definition in float64, by another route: sorting, numpy, a loop over groups."""
    size, peaks = np.abs(w), np.abs(w).max(1)
    median, middle = np.sort(size, axis=None)[(w.size - 1) // 2], np.sort(peaks)[(len(peaks) - 1) // 2]
    errors = []
    for first in range(0, w.shape[1], group_size):
        group = w[:, first : first + group_size]
        scale = np.abs(group).max(1, keepdims=True) / 7
        errors.append(group - np.clip(np.rint(group / np.where(scale, scale, 1)), -7, 7) * scale)
    error = np.concatenate(errors, 1)
    relative = (error**2).mean() / (w**2).mean()
    return {
        "numel": w.size,
        "max_abs": size.max(),
        "mean": w.mean(),
        "mean_abs": size.mean(),
        "median_abs": median,
        "std": w.std(),
        "rms": np.sqrt((w**2).mean()),
        "kurtosis": ((w - w.mean()) ** 4).mean() / w.var() ** 2,
        "abs_outlier_frac": (size > multiplier * median).mean(),
        "channel_outlier_frac": (peaks > multiplier * middle).mean(),
        "w4_relative_mse": relative,
        "w4_snr_db": -10 * np.log10(relative),
        "w4_max_error": np.abs(error).max(),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("embeddings", [False, True])
def test_a_sharded_checkpoint_in_any_dtype_gives_the_references_numbers(tmp_path, monkeypatch, dtype, embeddings):
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "model.embed_tokens": (301, 200),
        "model.layers.0.mlp.up_proj": (97, 200),
        "model.layers.1.mlp.down_proj": (200, 97),
    }
    tensors = {f"{name}.weight": 0.02 * torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    tensors["model.layers.1.mlp.down_proj.weight"] += 0.3  # a mean far from 0
    for tensor in tensors.values():
        tensor[5] *= 9
        tensor[:, 7][::11] *= 30
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for i, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor, f"norm{i}": torch.ones(3)}, tmp_path / f"{i}.safetensors")
    index = {"weight_map": {name: f"{i}.safetensors" for i, name in enumerate(tensors)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    monkeypatch.setitem(sweep.BLOCK, "cpu", 1500)  # blocks and pieces that do not come out even
    monkeypatch.setattr(sweep, "PIECE", 7000)
    measured = weights.measure(tmp_path, "base", Diagnose(embeddings=embeddings)).set_index("tensor")
    table = "model.embed_tokens.weight" if embeddings else "lm_head.weight"
    assert set(measured.index) == {table, *list(tensors)[1:]}
    for name, tensor in tensors.items():
        row = measured.loc[table if "embed" in name else name]
        for key, value in by_definition(tensor.double().numpy()).items():
            assert row[key] == pytest.approx(value, rel=1e-6, abs=1e-12), (name, key)
        sizes = np.sort(np.abs(tensor.double().numpy()), axis=None)
        for key, share in (("abs_q99", 0.99), ("abs_q999", 0.999), ("abs_q9999", 0.9999)):
            exact = sizes[int(np.ceil(share * sizes.size)) - 1]
            assert exact * (1 - (dtype == torch.float32) / 256) <= row[key] <= exact, (name, key)
    alike = measured["numel"] / measured["numel"].sum()
    total = weights.summary(measured)
    assert total["w4_snr_db"] == pytest.approx(measured["w4_snr_db"].sum() / 3)
    for key, column in (
        ("outlier_frac", "abs_outlier_frac"),
        ("channel_outlier_frac",) * 2,
        ("kurtosis",) * 2,
        ("w4_relative_mse",) * 2,
    ):
        assert total[key] == pytest.approx((measured[column] * alike).sum(), rel=1e-12)


def test_threads_change_nothing(tiny_checkpoint, frame):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        again = weights.measure(tiny_checkpoint, "base")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert np.allclose(again.select_dtypes("number"), frame.select_dtypes("number"), rtol=1e-12, atol=0)


def test_a_planted_outlier_counts_once_and_a_planted_channel_too(tmp_path):
    matrix = torch.ones(16, 64)
    matrix[2, 9] = 100.0
    measured = describe(tmp_path, matrix, outlier_multiplier=6.0)
    assert measured["abs_outlier_frac"] == 1 / matrix.numel()
    assert measured["channel_outlier_frac"] == 1 / 16


def test_a_matrix_of_zeros_is_described_without_a_crash(tmp_path):
    measured = describe(tmp_path, torch.zeros(4, 8))
    assert measured["max_abs"] == 0
    assert np.isnan(measured["w4_relative_mse"])


def test_every_matrix_of_the_layers_and_the_tied_head_have_a_row(frame, tiny_checkpoint):
    stored = {name for name, entry in checkpoint.entries(tiny_checkpoint).items() if len(entry.shape) == 2}
    assert set(frame["tensor"]) == stored - {"model.embed_tokens.weight"} | {"lm_head.weight"}
    assert len(frame) == len(weights.matrices(tiny_checkpoint))
    row = frame.set_index("tensor").loc["model.layers.1.mlp.down_proj.weight"]
    assert (row["variant"], row["layer"], row["projection"], row["numel"]) == ("base", 1, "down_proj", 256 * 512)
    assert frame.set_index("tensor").loc["lm_head.weight", "layer"] == -1


def test_embeddings_on_request_and_a_tied_table_once(frame, tiny_checkpoint):
    named = set(weights.measure(tiny_checkpoint, "base", Diagnose(embeddings=True))["tensor"])
    assert "model.embed_tokens.weight" in named
    assert "lm_head.weight" not in named


def test_the_summary_weighs_by_size_but_takes_the_mean_snr(frame):
    measured = weights.summary(frame)
    assert measured["w4_relative_mse"] == pytest.approx(np.average(frame["w4_relative_mse"], weights=frame["numel"]))
    assert measured["outlier_frac"] == pytest.approx(np.average(frame["abs_outlier_frac"], weights=frame["numel"]))
    assert measured["w4_snr_db"] == pytest.approx(frame["w4_snr_db"].mean())


def test_progress_counts_every_matrix(tiny_checkpoint):
    steps = []
    weights.measure(tiny_checkpoint, "base", progress=steps.append)
    assert sum(steps) == len(weights.matrices(tiny_checkpoint))


def test_columns_of_the_proxy_say_w4_for_four_bits_only(tiny_checkpoint, frame):
    three = weights.measure(tiny_checkpoint, "base", Diagnose(bits=3))
    assert not any("w4" in name for name in [*three, *weights.summary(three)])
    assert not any("rtn" in name for name in [*frame, *weights.summary(frame)])
    for name in ("relative_mse", "max_error"):
        assert (three[f"rtn_{name}"] > frame[f"w4_{name}"]).all()
    assert weights.summary(three)["rtn_relative_mse"] == pytest.approx(
        np.average(three["rtn_relative_mse"], weights=three["numel"])
    )
    assert weights.summary(three)["rtn_snr_db"] == pytest.approx(three["rtn_snr_db"].mean())


def test_nothing_moves_between_a_checkpoint_and_itself(tiny_checkpoint):
    moved = moving.movement(tiny_checkpoint, tiny_checkpoint)
    assert (moved[["relative_change", "code_flip_rate", "effective_rank"]] == 0).all().all()
    assert moving.totals(moved)["code_flip_rate"] == 0
    assert (moved[["unchanged_frac", "delta_sparsity"]] == 1).all().all()
    assert moved[["update_survival", "update_cosine", "update_projection"]].isna().all().all()


def test_movement_is_measured_where_it_happened(tiny_checkpoint, tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"

    def negate(tensors):
        tensors[name] = -tensors[name]

    moved = moving.movement(tiny_checkpoint, change(tiny_checkpoint, tmp_path / "moved", negate)).set_index("tensor")
    codes = proxy.encode(dict(checkpoint.tensors(tiny_checkpoint))[name])[0]
    assert moved.loc[name, "relative_change"] == pytest.approx(2.0)
    assert moved.loc[name, "code_flip_rate"] == pytest.approx((codes != 0).double().mean().item())
    assert (moved.drop(index=name)["relative_change"] == 0).all()


def test_scaling_all_weights_moves_them_but_flips_no_code(tiny_checkpoint, tmp_path):
    def double(tensors):
        for name in tensors:
            tensors[name] = tensors[name] * 2

    moved = moving.movement(tiny_checkpoint, change(tiny_checkpoint, tmp_path / "doubled", double))
    assert np.allclose(moved["relative_change"], 1)
    assert moving.totals(moved)["code_flip_rate"] == 0


def test_movement_follows_its_definitions(tiny_checkpoint, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    noise = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)) * (torch.arange(512) % 4 == 0)

    def train(tensors):
        tensors[name] = (tensors[name].float() + 0.004 * noise).bfloat16()

    trained = change(tiny_checkpoint, tmp_path / "trained", train)
    measured = moving.movement(tiny_checkpoint, trained).set_index("tensor").loc[name]
    old, new = (dict(checkpoint.tensors(path))[name].double() for path in (tiny_checkpoint, trained))
    coded = [proxy.encode(matrix) for matrix in (old, new)]
    moved = proxy.decode(*coded[1], 512).double() - proxy.decode(*coded[0], 512).double()
    energy = torch.linalg.svdvals(new - old).square()
    share = (energy / energy.sum())[energy > 0]
    assert measured["unchanged_frac"] == (old == new).double().mean().item() > 0.74
    assert measured["delta_sparsity"] == ((old - new).abs() <= 1e-5).double().mean().item()
    assert measured["code_flip_rate"] == (coded[0][0] != coded[1][0]).double().mean().item()
    assert measured["update_survival"] == pytest.approx((moved.norm() / (new - old).norm()).item(), rel=1e-6)
    assert measured["update_cosine"] == pytest.approx(
        ((moved * (new - old)).sum() / moved.norm() / (new - old).norm()).item(), rel=1e-6
    )
    assert measured["effective_rank"] == pytest.approx(torch.exp(-(share * share.log()).sum()).item(), rel=1e-6)
    assert measured["update_projection"] == pytest.approx(
        (moved.mul(new - old).sum() / (new - old).square().sum()).item(), rel=1e-6
    )
    total = moving.totals(moving.movement(tiny_checkpoint, trained))
    assert total["update_survival"] == pytest.approx(measured["update_survival"])
    assert total["update_cosine"] == pytest.approx(measured["update_cosine"])
    assert total["update_projection"] == pytest.approx(measured["update_projection"])


def spectrum(values: torch.Tensor, columns: int = 400) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, len(values), generator=generator))[0] for n in (len(values), columns))
    return left * values @ right.T


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(200),
        torch.arange(1, 201.0) ** -0.5,
        torch.exp(-torch.arange(200) / 15),
        torch.tensor([30.0] + 199 * [1.0]),
    ],
    ids=["flat", "power law", "exponential", "one spike"],
)
def test_estimated_ranks_lie_within_their_stated_error(values):
    exact, none = rank.effective(spectrum(values))
    share = values.square() / values.square().sum()
    assert (exact, none) == (pytest.approx(torch.exp(-(share * share.log()).sum()).item(), rel=1e-4), 0)
    estimate, stderr = rank.effective(spectrum(values), exact=0)
    assert abs(estimate - exact) <= 3 * stderr + 0.01 * exact
    assert stderr < 0.2 * exact


def test_ranks_of_low_rank_and_of_nothing():
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(300, 1, generator=generator) @ torch.randn(1, 700, generator=generator)
    assert rank.effective(low)[0] == pytest.approx(1, rel=1e-3)
    assert rank.effective(torch.zeros(4, 9)) == (0, 0)


def awq_like(source: Path, folder: Path, seed: int = 0) -> tuple[Path, dict[str, torch.Tensor]]:
    """Make a checkpoint in AutoAWQ's layout: scales folded into norms and linears, then rounding with zero points.

    Returns the folder and, by matrix, the values of its codes with the folded scales removed.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    columns, rows = {}, {}
    for layer in range(2):
        block = f"model.layers.{layer}"
        for norm, fed in (("input_layernorm", ("q", "k", "v")), ("post_attention_layernorm", ("gate", "up"))):
            scale = torch.exp(torch.randn(256, generator=generator) / 2)
            state[f"{block}.{norm}.weight"] /= scale
            part = "self_attn" if norm == "input_layernorm" else "mlp"
            columns |= {f"{block}.{part}.{name}_proj.weight": scale for name in fed}
        scale = torch.exp(torch.randn(512, generator=generator) / 2)
        columns[f"{block}.mlp.down_proj.weight"], rows[f"{block}.mlp.up_proj.weight"] = scale, 1 / scale
    out, true = {}, {}
    for name, tensor in state.items():
        if tensor.ndim != 2 or "layers" not in name:
            out[name] = tensor.half()
            continue
        by, of = columns.get(name, torch.ones(tensor.shape[1])), rows.get(name, torch.ones(tensor.shape[0]))
        groups = (tensor * by * of[:, None]).view(tensor.shape[0], -1, 128)
        low, high = groups.amin(-1), groups.amax(-1)
        step = ((high - low) / 15).half()
        zero = torch.round(-low / step.float()).clamp(0, 15)
        codes = (torch.round(groups / step.float()[..., None]) + zero[..., None]).clamp(0, 15)
        true[name] = (
            ((codes - zero[..., None]) * step.float()[..., None]).half().float().view(tensor.shape) / by / of[:, None]
        )
        prefix = name.removesuffix(".weight")
        parts = {"qweight": packed(codes.view(tensor.shape).T), "qzeros": packed(zero.T), "scales": step.T.contiguous()}
        out |= {f"{prefix}.{part}": value for part, value in parts.items()}
    shutil.copytree(source, folder)
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, true


def packed(values: torch.Tensor) -> torch.Tensor:
    """Pack as AutoAWQ does: nibble i of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[i] of eight."""
    eight = values.to(torch.int64).view(values.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    words = (eight << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def test_awqs_error_is_measured_with_its_scales_removed(tiny_checkpoint, tmp_path):
    folder, true = awq_like(tiny_checkpoint, tmp_path / "awq")
    measured = schemes.measure({"base": tiny_checkpoint}, {"base": folder}, "awq").set_index("tensor")
    original = load_file(tiny_checkpoint / "model.safetensors")
    assert set(measured.index) == set(true)
    for name, values in true.items():
        off = ((values - original[name].float()).square().sum() / original[name].float().square().sum()).item()
        fitted = any(kind in name for kind in ("v_proj", "o_proj", "up_proj", "down_proj"))
        assert measured.loc[name, "relative_mse"] == pytest.approx(off, rel=0.06 if fitted else 1e-3), name
    assert (
        measured["relative_mse"].max() < 0.1
    )  # of 4 bits; with the scales left in, columns are off by their whole size
    assert "code_flip_rate" not in measured


def test_a_scheme_keeps_what_its_two_checkpoints_store(tiny_checkpoint, tmp_path):
    def train(tensors):
        for name in tensors:
            if "down_proj" in name:
                noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(2))
                tensors[name] = (tensors[name].float() + 0.005 * noise).bfloat16()

    full = {"base": tiny_checkpoint, "grpo": change(tiny_checkpoint, tmp_path / "trained", train)}
    stored = [awq_like(full[variant], tmp_path / f"awq-{variant}") for variant in full]
    frame = schemes.measure(full, {variant: folder for variant, (folder, _) in zip(full, stored, strict=True)}, "awq")
    assert frame.groupby("variant")["tensor"].count().to_dict() == {"base": 14, "grpo": 14}
    trained = frame.query("variant == 'grpo'").set_index("tensor")
    still = trained[~trained.index.str.contains("down_proj")]
    assert (still["code_flip_rate"] == 0).all() and still["update_survival"].isna().all()
    name = "model.layers.0.mlp.down_proj.weight"
    old, new = (load_file(path / "model.safetensors")[name].float() for path in full.values())
    moved = stored[1][1][name] - stored[0][1][name]
    assert trained.loc[name, "update_survival"] == pytest.approx((moved.norm() / (new - old).norm()).item(), rel=0.05)
    cosine = torch.nn.functional.cosine_similarity(moved.flatten(), (new - old).flatten(), dim=0).item()
    assert trained.loc[name, "update_cosine"] == pytest.approx(cosine, abs=0.02)
    assert 0.05 < trained.loc[name, "code_flip_rate"] < 1
    assert schemes.totals(frame, "grpo")["update_cosine"] == pytest.approx(
        trained.loc[trained.index.str.contains("down_proj"), "update_cosine"].mean(), abs=0.02
    )


def test_another_models_quantized_weights_are_refused(tiny_checkpoint, tmp_path):
    folder, _ = awq_like(tiny_checkpoint, tmp_path / "awq")

    def forget(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]

    smaller = change(tiny_checkpoint, tmp_path / "smaller", forget)
    with pytest.raises(BadInput, match=r"model\.layers\.1\.mlp\.up_proj\.weight, which .* does not"):
        schemes.measure({"base": smaller}, {"base": folder}, "awq")
    with pytest.raises(BadInput, match="quantized"):
        weights.measure(folder, "base")


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_flips_of_packed_codes_are_those_of_the_codes_themselves(bits):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    draw, shape = torch.Generator().manual_seed(bits), (7, 40)  # 40 codes do not fill their last word
    limits = -(2 ** (bits - 1)), 2 ** (bits - 1)
    before, after = (torch.randint(*limits, shape, generator=draw).to(torch.int8) for _ in range(2))
    packed = [decode.Stored(codes.float(), helpers.pack_to_int32(codes, bits)) for codes in (before, after)]
    assert schemes._flips(*packed) == int((before != after).sum()) > 0
    assert schemes._flips(packed[0], packed[0]) == 0


def test_the_error_of_a_rank_is_the_jackknifes(monkeypatch):
    sums = torch.randn(2, rank.VECTORS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    monkeypatch.setattr(rank, "_quadrature", lambda *_: sums)
    monkeypatch.setattr(rank, "_from_sums", lambda of_all: of_all[0].item())  # a mean, whose error is known
    estimate, stderr = rank.effective(torch.ones(4, 9), exact=0)
    assert estimate == pytest.approx(sums[0].mean().item())
    assert stderr == pytest.approx(sums[0].std().item() / rank.VECTORS**0.5)
