"""A quantized copy has the original's output head, whatever library stored it; otherwise nothing is kept."""

import shutil

import pytest
import torch

from qrl import checkpoint, quantize
from qrl.errors import QrlError
from qrl.quantize import error, staging, verify
from tests import odd

TEXTS = [f"Tom has {i} apples and buys {i + 2} more. How many does he have?" for i in range(8)]


@pytest.fixture
def untied(tmp_path):
    """A checkpoint whose head is not its embedding, and says so."""
    return odd.swap_head(odd.copied(tmp_path / "untied"), tied=False)


@pytest.mark.process
@pytest.mark.parametrize("scheme", ["nf4", "gptq", "spinquant", "rtn-int4"])
def test_a_head_of_its_own_stays_the_head(untied, tmp_path, scheme):
    made = quantize.run(scheme, untied, tmp_path / scheme, calibration=TEXTS, probe=TEXTS)
    assert verify.other_row(untied, made.path) is None
    assert 0 < made.logit_error < 0.2
    assert verify.other_row(odd.copied(tmp_path / "tied"), made.path) == min(
        checkpoint.tokens(untied)[digit] for digit in "12"
    )


@pytest.mark.process
def test_a_library_that_drops_the_head_keeps_nothing(untied, tmp_path, monkeypatch):
    from qrl.quantize import bnb  # a second for bitsandbytes, which every worker would wait at the top

    store = bnb.quantize

    def without_head(source, out, **options):
        store(source, out, **options)
        tensors = odd.weights(out)
        del tensors[odd.HEAD]
        odd.write(out, tensors)
        odd.edit(out, "config.json", tie_word_embeddings=True)

    monkeypatch.setattr(bnb, "quantize", without_head)
    with pytest.raises(QrlError, match="another output head than the original, from row"):
        quantize.run("nf4", untied, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rounding_of_the_head_is_no_other_head(untied, tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        out = shutil.copytree(untied, tmp_path / str(dtype))
        tensors = {name: (1.001 * tensor.float()).to(dtype) for name, tensor in odd.weights(untied).items()}
        odd.write(out, tensors)
        assert verify.other_row(untied, out) is None
    tensors[odd.HEAD][7, :16] += 0.1
    odd.write(out, tensors)
    assert verify.other_row(untied, out) == 7
    odd.write(out, tensors | {odd.HEAD: tensors[odd.HEAD][:-1]})
    assert verify.other_row(untied, out) == 0


def test_logits_show_a_head_that_hidden_states_do_not(untied, tmp_path):
    rows = [[5, 6, 7]]
    errors = error.measure(odd.copied(tmp_path / "tied"), untied, rows, "cpu")
    assert max(errors.layers) == 0 and errors.logits > 0


def test_a_staged_model_with_another_head_or_weight_is_refused(untied, tmp_path):
    from transformers import AutoModelForCausalLM

    def staged():
        return AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32, output_loading_info=True)

    model, loading = staged()
    staging.verify(model, loading, untied)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    with pytest.raises(QrlError, match=r"loads lm_head\.weight of .* with other values"):
        staging.verify(model, loading, untied)
    model, loading = staged()
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(QrlError, match=r"loads model\.layers\.3\.mlp\.up_proj\.weight"):
        staging.verify(model, loading, untied)


def test_a_head_of_no_numbers_is_another_head(untied, tmp_path):
    out = shutil.copytree(untied, tmp_path / "out")
    tensors = odd.weights(untied)
    tensors[odd.HEAD][9, 0] = float("nan")
    odd.write(out, tensors)
    assert verify.other_row(untied, out) == 9
