"""NF4 quantization and AutoAWQ's staging; AutoAWQ itself runs in its own environment, in the study's test."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
import transformers

from qrl import checkpoint, quantize
from qrl.engine import hf
from qrl.errors import BadInput, QrlError
from qrl.quantize import awq, calibration, error, fit, settings, staging
from qrl.recipe import Quantize


def chosen(scheme: str, **recipe) -> settings.Settings:
    return settings.settings_of(scheme, Quantize(**recipe), 0)


@pytest.fixture(scope="module")
def nf4(tiny_checkpoint, tmp_path_factory):
    return quantize.run("nf4", tiny_checkpoint, tmp_path_factory.mktemp("nf4") / "model")


def test_nf4_stores_about_four_bits_a_weight(nf4, tiny_checkpoint):
    assert 4.1 < nf4.bits_per_weight < 4.6  # 4 bits, 8-bit scales of 64, and tables, which count on matrices this small
    assert nf4.bits_per_weight < nf4.bits_per_parameter < 16  # embeddings stay in 16
    assert nf4.bytes < checkpoint.check(tiny_checkpoint).bytes / 2
    assert nf4.calibration_digest is None
    assert checkpoint.check(nf4.path).quantization == "bitsandbytes"


def test_nf4_keeps_head_embeddings_and_the_sources_own_files(nf4, tiny_checkpoint):
    before, after = checkpoint.entries(tiny_checkpoint), checkpoint.entries(nf4.path)
    assert after["model.embed_tokens.weight"].shape == before["model.embed_tokens.weight"].shape
    assert after["model.layers.0.mlp.up_proj.weight"].dtype == "U8"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (nf4.path / name).read_bytes() == (tiny_checkpoint / name).read_bytes()


def test_nf4_values_are_near_the_originals(nf4, tiny_checkpoint):
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(nf4.path, device_map="cpu").dequantize(dtype=torch.float32)
    for name, weight in original.named_parameters():
        stored = model.get_parameter(name)
        tolerance = 0.13 if weight.ndim == 2 and "layers" in name else 0
        assert (stored - weight).norm() <= tolerance * weight.norm(), name


def test_nf4_twice_gives_the_same_bytes(nf4, tiny_checkpoint, tmp_path):
    again = quantize.run("nf4", tiny_checkpoint, tmp_path / "again")
    assert checkpoint.digest(again.path) == checkpoint.digest(nf4.path)
    assert replace(again, path=nf4.path, seconds=nf4.seconds) == nf4


def test_bad_requests_are_refused_before_anything_is_written(nf4, tiny_checkpoint, tmp_path):
    for scheme, source, key in (("int3", tiny_checkpoint, "nf4, int8, awq"), ("nf4", nf4.path, "already quantized")):
        with pytest.raises(BadInput, match=key):
            quantize.run(scheme, source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(BadInput, match="not empty"):
        quantize.run("nf4", tiny_checkpoint, nf4.path)


def test_awq_names_the_environment_it_needs(tiny_checkpoint, tmp_path):
    with pytest.raises(QrlError, match="projects/awq"):
        quantize.run("awq", tiny_checkpoint, tmp_path / "out", calibration=["some text"])


@pytest.mark.parametrize(
    ("texts", "key"), [([], "calibration texts"), ([""], "calibration texts"), (["a b " * 99], "tokens")]
)
def test_awq_refuses_unusable_texts_instead_of_dropping_them(tiny_checkpoint, tmp_path, texts, key):
    limited = chosen("awq", calibration_max_tokens=64)
    with pytest.raises(BadInput, match=key):
        quantize.run("awq", tiny_checkpoint, tmp_path / "out", calibration=texts, settings=limited)


def test_every_text_begins_a_row_and_rows_are_as_long_as_the_longest():
    texts = [[1, 1, 1], [2], [3, 3, 3, 3, 3], [4, 4]]
    assert calibration.rows(texts, 5) == [[1, 1, 1, 2, 3], [2, 3, 3, 3, 3], [3, 3, 3, 3, 3], [4, 4, 1, 1, 1]]
    assert calibration.rows([[1, 2]], 512) == [[1, 2]]


def test_widths_that_groups_do_not_divide_are_refused():
    layers = torch.nn.ModuleList([torch.nn.Linear(192, 64)])
    fit.check_widths(layers, 64, outputs=8)
    with pytest.raises(BadInput, match=r"192 inputs.*128 do not divide: set quantize\.group_size to 64"):
        fit.check_widths(layers, 128, outputs=8)
    with pytest.raises(BadInput, match="do not divide: choose a scheme with a scale per row"):
        fit.check_widths(torch.nn.ModuleList([torch.nn.Linear(200, 64)]), 128, outputs=8)
    by_format = r"Layer 0 has 192 inputs, which groups of 128 .*w4afp8 has such groups by its format.*leave w4afp8 out"
    with pytest.raises(BadInput, match=by_format):
        fit.check_widths(layers, 128, fixed="w4afp8")
    with pytest.raises(BadInput, match="60 outputs"):
        fit.check_widths(torch.nn.ModuleList([torch.nn.Linear(128, 60)]), 128, outputs=8)


def test_the_calibration_digest_depends_on_texts_and_their_order():
    digests = {calibration.digest(texts) for texts in (["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""])}
    assert len(digests) == 4


def test_a_config_of_transformers_5_is_translated_for_4():
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    old = staging.rewrite(
        {"model_type": "qwen2", "dtype": "bfloat16", "rope_parameters": rope, "layer_types": ["full_attention"]}
    )
    assert old["rope_theta"] == 1e6
    assert old["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}
    assert old["torch_dtype"] == "bfloat16"
    assert "dtype" not in old
    plain = {"model_type": "qwen2", "rope_theta": 5e5, "torch_dtype": "float16"}
    assert staging.rewrite(plain) == plain


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_parameters": {"rope_theta": 1e6}, "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_settings_that_4_cannot_express_are_refused(config):
    with pytest.raises(BadInput, match=r"4\.51"):
        staging.rewrite(config)


@pytest.fixture
def stage(tiny_checkpoint, tmp_path):
    """Return a function that loads a staged copy of the tiny model after changes to the staged config."""

    def load(**changes):
        from transformers import AutoModelForCausalLM

        folder = tmp_path / f"staged-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        staging.stage(tiny_checkpoint, folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)

    return load


def logits(model):
    """Return logits of fixed tokens at the last positions, which depend on every rotary angle."""
    ids = torch.randint(model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model.eval()(ids).logits[0, -4:]


def test_the_staged_copy_is_the_same_model(stage, tiny_checkpoint):
    from transformers import AutoModelForCausalLM

    model, loading = stage()
    staging.verify(model, loading, tiny_checkpoint)
    expected = logits(AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32))
    assert torch.allclose(logits(model), expected, atol=1e-4)
    wrong = logits(stage(rms_norm_eps=0.5)[0])
    assert (wrong - expected).norm() > 0.01 * expected.norm()  # the comparison would show a wrong setting


def test_another_rotary_base_or_setting_is_refused(stage, tiny_checkpoint):
    theta = checkpoint.config(tiny_checkpoint)["rope_parameters"]["rope_theta"]
    with pytest.raises(QrlError, match="rotary base"):
        staging.verify(*stage(rope_theta=theta * 100), tiny_checkpoint)
    with pytest.raises(QrlError, match="rms_norm_eps"):
        staging.verify(*stage(rms_norm_eps=0.5), tiny_checkpoint)


def test_weights_that_are_left_over_are_refused(stage, tiny_checkpoint):
    with pytest.raises(QrlError, match="left over"):
        staging.verify(*stage(num_hidden_layers=1, layer_types=["full_attention"]), tiny_checkpoint)


def test_the_staged_tokenizer_gives_the_same_ids_and_chat(tiny_checkpoint):
    from transformers import AutoTokenizer

    ours, theirs = hf.plain_tokenizer(tiny_checkpoint), AutoTokenizer.from_pretrained(tiny_checkpoint)
    chat = [{"role": "user", "content": "Tom has 12 apples.\n\n  How many?"}]
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text
    assert ours(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.eos_token == theirs.eos_token


def test_autoawqs_transformers_reads_a_tokenizer_with_a_list_of_special_tokens(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.51.3")
    tokens = hf.tokenizer(tiny_checkpoint)
    assert json.loads((tiny_checkpoint / "tokenizer_config.json").read_text())["extra_special_tokens"]
    assert type(tokens) is transformers.PreTrainedTokenizerFast and tokens.chat_template and tokens.eos_token


def test_a_scale_search_on_a_cpu_gets_a_copy_of_the_weights_to_restore():
    linear = torch.nn.Linear(8, 8)
    linear.register_state_dict_post_hook(awq.copy_state)
    kept = {name: value.cpu() for name, value in linear.state_dict().items()}
    before = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.mul_(2)
    assert torch.equal(kept["weight"], before)


def test_the_best_clip_is_the_one_that_changes_the_output_least():
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(6, 32, generator=generator), torch.randn(3, 40, 32, generator=generator)
    weight[:, ::16] *= 8  # an outlier in each group that clipping may cut

    def quantized(matrix):
        scales = matrix.reshape(6, -1, 16).abs().amax(-1, keepdim=True) / 7
        return ((matrix.reshape(6, -1, 16) / scales).round() * scales).flatten(1)

    clips = awq.best_clip(weight, inputs, 16, quantized)
    assert clips.shape == (6, 2, 1)
    largest = weight.reshape(6, 2, 16).abs().amax(-1)
    losses = []
    for step in range(10):  # AutoAWQ's own loss: each group's share of the output, before and after
        limit = (largest * (1 - step / 20)).repeat_interleave(16, 1)
        change = quantized(weight.clamp(-limit, limit)) - weight
        shares = torch.einsum("tgi,ogi->tog", inputs.reshape(-1, 2, 16), change.reshape(6, 2, 16))
        losses.append(shares.square().mean(0))
    step = torch.stack(losses).argmin(0)
    assert torch.allclose(clips[..., 0], largest * (1 - step / 20))
    assert 0 < (step > 0).double().mean() < 1


def test_an_error_is_relative_to_what_the_original_computes():
    original = error.Outputs([torch.full((2, 3), 2.0)], torch.full((1, 4), 4.0))
    quantized = error.Outputs([torch.full((2, 3), 3.0)], torch.full((1, 4), 3.0))
    assert error.between(original, quantized) == error.Errors((0.25,), 0.0625)


def test_errors_of_logits_are_those_of_each_texts_last_tokens(tiny_checkpoint):
    model, _ = hf.load(tiny_checkpoint, "cpu", torch.float32)
    row = list(range(5, 5 + 2 * error.LAST_TOKENS))
    with torch.inference_mode():
        expected = model(torch.tensor([row])).logits[0]
    assert torch.equal(error.outputs(model, [row]).logits, expected[-error.LAST_TOKENS :])


def test_the_original_is_computed_once_for_all_schemes_and_again_after_a_change(tiny_checkpoint, tmp_path, monkeypatch):
    source = shutil.copytree(tiny_checkpoint, tmp_path / "source")
    loaded = []
    compute = error._of_folder
    monkeypatch.setattr(error, "_of_folder", lambda folder, *rest: (loaded.append(folder), compute(folder, *rest))[1])
    for _ in range(2):
        assert error.measure(source, tiny_checkpoint, [[5, 6, 7]], "cpu").logits == 0
    assert loaded == [source, tiny_checkpoint, tiny_checkpoint]
    os.utime(source / "config.json", (1, 1))
    error.measure(source, tiny_checkpoint, [[5, 6, 7]], "cpu")
    assert loaded[3:] == [source, tiny_checkpoint]
