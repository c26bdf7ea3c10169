"""What the stored weights keep of an update: measured against its definition, told, and avoidable."""

import json
import math

import pytest
import torch

from qrl import checkpoint, names, recipe, tiny
from qrl.errors import BadInput
from qrl.formats.kept import METRICS, Kept
from qrl.recipe import Train, rules
from qrl.train import kept

SLOW = {
    "train.steps": "1",
    "train.learning_rate": "5e-6",  # of AdamW's first step: each weight moves by at most that
    "train.prompts_per_step": "4",
    "train.questions": "8",
    "device": "cpu",
}


@pytest.mark.parametrize("on_grid", [True, False], ids=["a base in bf16", "a dequantized base"])
@pytest.mark.parametrize("block", [7, 1 << 22])
def test_the_share_is_the_projection_of_the_stored_update_on_the_true_one(block, on_grid, monkeypatch):
    monkeypatch.setattr(kept, "BLOCK", block)
    generator, found = torch.Generator().manual_seed(0), kept.Update("bfloat16")
    matrices = []
    for shape in ((5, 8), (3,)):
        before = torch.randn(shape, generator=generator)
        before = before.bfloat16().float() if on_grid else before
        after = before + 1e-2 * torch.randn(shape, generator=generator)
        after.flatten()[0] = before.flatten()[0]  # one weight stays
        found.add(before, after)
        matrices.append((before.flatten(), after.flatten()))
    old, new = (torch.cat(parts).double() for parts in zip(*matrices, strict=True))
    stored_old, stored_new = (each.bfloat16().double() for each in (old, new))
    delta, stored = new - old, stored_new - stored_old
    assert found.kept.share == pytest.approx(float(stored @ delta / delta.square().sum()), rel=1e-5)
    assert found.residual == pytest.approx(float((stored_new - new).norm() / delta.norm()), rel=1e-5)
    assert found.kept.moved == float((delta != 0).double().mean()) < 1
    assert found.kept.moved_stored == float((stored != 0).double().mean())


def test_an_update_below_the_spacing_of_bf16_is_lost_and_one_far_above_it_is_kept():
    before = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    shares = []
    for scale in (1e-6, 1e-4, 1e-1):
        found = kept.Update("bfloat16")
        found.add(before, before + scale * torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
        shares.append(found.kept.share)
    assert shares[0] < 0.05 < shares[1] < 0.95 < shares[2] < 1.05


def test_the_words_name_the_dtype_the_shares_and_the_way_out():
    lost = Kept(0.0412, 0.99934, 0.0153, "bfloat16")
    assert lost.sentence() == (
        "The stored weights (bf16) keep 4.1 % of the update: training moved 99.9 % of them, and "
        "1.5 % still differ once stored."
    )
    warning = lost.warning("train.store_dtype=fp32")
    for part in ("bf16 rounds 96 % of the update away", "train.store_dtype=fp32", "longer or at a higher rate"):
        assert part in warning
    assert Kept(0.5, 1, 0.5, "bfloat16").warning("x") == ""
    assert Kept(0.499, 1, 0.5, "bfloat16").warning("x")
    assert Kept(math.nan, 0, 0, "bfloat16").warning("x") == ""
    assert set(Kept(math.nan, 0, 0, "bfloat16").metrics()) == {"moved_share", "moved_share_stored"}


def test_an_adapter_is_not_stored_in_a_dtype_of_its_own():
    with pytest.raises(BadInput, match=r"train\.store_dtype = fp32 .*merge\.store_dtype"):
        rules.check_training(Train(method="lora", store_dtype="fp32"))


@pytest.mark.slow
@pytest.mark.process
def test_training_and_merging_tell_what_storage_keeps_and_fp32_keeps_all(store, capsys):
    import mlflow

    from qrl.steps import compare, evaluate
    from qrl.steps import train as step
    from qrl.tracking import contents, lineage, models, reuse

    def newest(name):
        query = f"tags.`{names.TAG_STEP}` = '{name}'"
        return mlflow.search_runs(filter_string=query, order_by=["start_time DESC"], output_format="list")[0]

    def cells():
        query = f"tags.`{names.TAG_STEP}` = 'evaluate' and params.scheme = 'full'"
        return mlflow.search_runs(filter_string=query, output_format="list")

    def told(name, chosen, *rest):
        getattr(step, name)(chosen, *rest)
        return newest(name), capsys.readouterr().err

    def of_training(run):
        return {name: run.data.metrics[f"train/{name}"] for name in METRICS}

    dtypes, lost_model = {"bf16": "bfloat16", "fp32": "float32"}, ""
    for dtype, more in (("bf16", {}), ("fp32", {"train.store_dtype": "fp32"})):
        run, said = told("train", recipe.load("tiny", SLOW | {"train.algorithm": "sft"} | more))
        share = run.data.metrics["train/update_kept"]
        assert run.data.metrics["train/moved_share"] > 0.9 and run.data.params[names.STORED_IN] == dtypes[dtype]
        assert f"The stored weights ({dtype}) keep" in said
        is_lost = dtype == "bf16"
        assert (share < 0.5, "rounds" in said, f"{names.TAG_WATCH}storage" in run.data.tags) == (is_lost,) * 3
        address = reuse.outputs(run).models["model"]
        assert checkpoint.check(models.local_path(address)).dtype == dtypes[dtype]
        step_name, found = lineage.kept(address)
        assert step_name == "train" and found.metrics() == of_training(run) and found.stored_in == dtypes[dtype]
        lost_model = address if is_lost else lost_model
        if is_lost:
            assert "train.store_dtype=fp32" in said and run.data.metrics["train/moved_share_stored"] < 0.5
        else:
            assert share == pytest.approx(1) and run.data.metrics["train/moved_share_stored"] > 0.9

    trained, said = told("train", recipe.load("tiny-lora", SLOW))
    assert "update_kept" not in str(trained.data.metrics) and "keep" not in said  # merging stores the weights
    adapter = f"runs:/{trained.info.run_id}/adapter"
    for dtype, more in (("bf16", {}), ("fp32", {"merge.store_dtype": "fp32"})):
        run, said = told("merge", recipe.load("tiny-lora", SLOW | more), adapter)
        share = run.data.metrics["merge/update_kept"]
        assert (share < 0.5, "merge.store_dtype=fp32" in said) == (dtype == "bf16",) * 2
        assert run.data.params[names.STORED_IN] == dtypes[dtype] and f"({dtype}) keep" in said
        step_name, found = lineage.kept(reuse.outputs(run).models["model"])
        assert (step_name, found.share) == ("merge", share)

    # The table of such a model says it, and that it answers as its base does.
    asked = recipe.load("tiny", {"evaluate.n": "20", "device": "cpu"})
    evaluate.evaluate(asked, f"base:full={tiny.PATH},sft:full={lost_model}")
    compare.compare(asked, [run.info.run_id for run in cells()])
    compared = newest("compare")
    table = contents.artifact(compared.info.run_id, names.TABLE_MD).read_text()
    assert "**Warning:** sft: Storing in bf16 rounds" in table and "The stored weights of sft (bf16) keep" in table
    notes = json.loads(contents.artifact(compared.info.run_id, names.NOTES_JSON).read_text())
    assert any("train.store_dtype=fp32" in note for note in notes)
    assert "Storing in bf16 rounds" in compared.data.tags["mlflow.note.content"]
