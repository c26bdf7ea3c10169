"""A checkpoint folder is accepted if it is safe and complete; otherwise a sentence names the file that is not."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qrl import checkpoint
from qrl.errors import BadInput


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Path:
    """Return a copy that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def edit(file: Path, **changes) -> None:
    document = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def test_a_whole_checkpoint_is_described(folder):
    checked = checkpoint.check(folder)
    assert (checked.dtype, checkpoint.shards(folder), checked.quantization) == ("bfloat16", ["model.safetensors"], None)
    assert checked.bytes == (folder / "model.safetensors").stat().st_size
    assert checked.digest == checkpoint.digest(folder)
    assert len(checked.digest) == 64


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 512}, "hidden_size = 512, but its weights have 256"),
        ({"vocab_size": 100}, "vocab_size = 100, but its weights have \\d+"),
        ({"num_hidden_layers": 1}, "num_hidden_layers = 1, but its weights have 2"),
        ({"num_hidden_layers": 6}, "num_hidden_layers = 6, but its weights have 2"),
        ({"hidden_size": "big"}, "hidden_size = 'big', but a whole number above 0"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0, but a whole number above 0"),
        ({"num_key_value_heads": True}, "num_key_value_heads = True, but a whole number above 0"),
        ({"model_type": []}, r"model_type = \[\], but a name was expected"),
    ],
)
def test_a_configuration_of_another_model_is_refused(folder, changes, says):
    edit(folder / "config.json", **changes)
    with pytest.raises(BadInput, match=rf"config\.json says {says}"):
        checkpoint.check(folder)


def test_layers_that_predict_further_tokens_count_apart(folder):
    edit(folder / "config.json", num_hidden_layers=1, num_nextn_predict_layers=1)
    assert checkpoint.check(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "modeling_evil.py", "old/optimizer.pt", "a.pth", "a.PKL"])
def test_pickles_and_code_are_refused_by_name(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    with pytest.raises(BadInput, match=name):
        checkpoint.check(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused(folder, name):
    edit(folder / name, auto_map={"AutoModel": "evil.Model"})
    with pytest.raises(BadInput, match=f"{name}.*auto_map"):
        checkpoint.check(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_part_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(BadInput, match=name):
        checkpoint.check(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_config_that_is_no_object_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(BadInput, match=r"config\.json"):
        checkpoint.check(folder)


def test_an_adapter_is_refused_with_advice_to_merge_it(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match="merge"):
        checkpoint.check(folder)


def test_a_chat_template_is_required_only_where_it_is_needed(folder):
    edit(folder / "tokenizer_config.json", chat_template=None)
    checkpoint.check(folder, need_chat_template=False)
    with pytest.raises(BadInput, match="chat template"):
        checkpoint.check(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    checkpoint.check(folder)


def test_weights_alone_need_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert checkpoint.check(folder, need_tokenizer=False).bytes > 0


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_told_from_a_truncated_file(folder, name):
    size = (folder / name).stat().st_size
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {size}\n"
    (folder / name).write_text(pointer)
    with pytest.raises(BadInput, match=rf"{re.escape(name)} is a pointer of Git LFS.*git lfs pull"):
        checkpoint.check(folder)


@pytest.mark.parametrize("left", [0, 4, 8, 300, -1])
def test_a_truncated_file_is_reported_with_its_size(folder, left):
    file = folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, left % size)
    with pytest.raises(BadInput, match=rf"model\.safetensors is truncated.*{left % size:,}"):
        checkpoint.check(folder)


def test_bytes_too_many_and_headers_of_nonsense_are_refused(folder):
    file = folder / "model.safetensors"
    with open(file, "ab") as stream:
        stream.write(b"\0")
    with pytest.raises(BadInput, match="too long"):
        checkpoint.check(folder)
    file.write_bytes((4).to_bytes(8, "little") + b"nono")
    with pytest.raises(BadInput, match="not safetensors"):
        checkpoint.check(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": [8, 256]}, "do not fit"),
        ({"shape": [-256, 256]}, "do not fit"),
        ({"shape": ["256", "256"]}, "do not fit"),
        ({"dtype": "F32"}, "do not fit"),
        ({"data_offsets": [0, 256 * 256 * 2]}, "does not begin where the tensor before it ends"),
    ],
)
def test_a_header_that_would_read_anothers_bytes_is_refused(folder, change, says):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    header["model.layers.1.self_attn.q_proj.weight"] |= change
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])
    with pytest.raises(BadInput, match=rf"model\.safetensors is not safetensors.*{says}"):
        checkpoint.check(folder)


def split(folder: Path) -> list[str]:
    """Split the weight file into two with an index, and return their names."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    place = {name: shards[i % 2] for i, name in enumerate(names)}
    for shard in shards:
        save_file({name: tensors[name] for name in names if place[name] == shard}, folder / shard, {"format": "pt"})
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": place}))
    (folder / "model.safetensors").unlink()
    return shards


def test_shards_are_read_as_one_checkpoint(folder, tiny_checkpoint):
    shards = split(folder)
    assert checkpoint.check(folder) and checkpoint.shards(folder) == list(shards)
    whole, parts = dict(checkpoint.tensors(tiny_checkpoint)), dict(checkpoint.tensors(folder))
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    assert [name for name, _ in checkpoint.tensors(folder, ["model.norm.weight"])] == ["model.norm.weight"]


def test_a_tensor_in_two_shards_is_refused(folder):
    """transformers would use the last of a, b in this order, vLLM the last of part-2, part-10."""
    *_, last = split(folder)
    weights = load_file(folder / last)
    more = dict(checkpoint.tensors(folder, ["model.norm.weight"])) | weights
    save_file(more, folder / last)
    first = next(name for name in checkpoint.shards(folder) if name != last)
    save_file(more | load_file(folder / first), folder / first)
    with pytest.raises(BadInput, match=r"both hold .*loaders differ"):
        checkpoint.check(folder)


def test_a_missing_shard_or_tensor_is_named(folder):
    shards = split(folder)
    index = json.loads((folder / checkpoint.INDEX).read_text())
    index["weight_map"]["ghost.weight"] = shards[0]
    (folder / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(BadInput, match=r"ghost\.weight"):
        checkpoint.check(folder)
    (folder / shards[1]).unlink()
    with pytest.raises(BadInput, match=shards[1]):
        checkpoint.check(folder)


def test_an_index_may_not_point_out_of_the_folder(folder):
    split(folder)
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(BadInput, match=r"\.\./model\.safetensors.*beside the index"):
        checkpoint.check(folder)


def test_the_digest_holds_through_copies_links_and_readmes(folder, tmp_path):
    digest = checkpoint.digest(folder)
    shutil.copytree(folder, tmp_path / "linked", copy_function=os.link)
    (tmp_path / "linked" / "README.md").write_text("a model")
    (tmp_path / "linked" / "MLmodel").write_text("flavors: {}")
    assert checkpoint.digest(tmp_path / "linked") == digest


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_the_digest_changes_with_what_decides_the_output(folder, name):
    digest = checkpoint.digest(folder)
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    assert checkpoint.digest(folder) != digest


def test_the_digest_changes_with_a_name(folder):
    digest = checkpoint.digest(folder)
    (folder / "generation_config.json").rename(folder / "special_tokens_map.json")
    assert checkpoint.digest(folder) != digest


def test_quantization_is_read_from_the_config(folder):
    edit(folder / "config.json", quantization_config={"quant_method": "awq"})
    assert checkpoint.check(folder).quantization == "awq"


def test_a_quantization_without_a_method_is_refused(folder):
    edit(folder / "config.json", quantization_config={"load_in_4bit": True})  # transformers would pack while it loads
    with pytest.raises(BadInput, match="without a quant_method"):
        checkpoint.check(folder)


@pytest.mark.parametrize(
    "name",
    [
        "additional_chat_templates/default.jinja",
        "additional_chat_templates/tool_use.jinja",
        "processor_config.json",
        "spiece.model",
        "tekken.json",
        "tokenizer.model.v3",
        "hf_quant_config.json",
        "quantize_config.json",
        "sentence_bert_config.json",
        "params.json",
    ],
)
def test_a_file_that_some_loader_reads_is_in_the_digest(folder, name):
    digest = checkpoint.digest(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    assert checkpoint.digest(folder) != digest and name in checkpoint.files(folder)


def test_the_digest_covers_every_vocabulary_file_that_transformers_knows():
    """A new version of transformers may bring new names: this test lists those of decoders' tokenizers."""
    from fnmatch import fnmatch

    import transformers

    places = Path(transformers.__file__).parent.glob("models/*/tokenization*.py")
    named = {
        name
        for file in places
        for name in re.findall(r'"(?:vocab|tokenizer|merges|spm)_file": "(.+?)"', file.read_text())
    }
    others = {"prophetnet.tokenizer", "byte_maps.json"}  # of encoders, and of bytes
    missing = {name for name in named - others if not any(fnmatch(name, each) for each in checkpoint.TEXTS)}
    assert {"tokenizer.json", "spiece.model"} <= named and not missing


def test_an_unreadable_file_is_refused_by_its_name(folder, monkeypatch):
    real = Path.open

    def denied(path: Path, *how):
        if path.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied")
        return real(path, *how)

    monkeypatch.setattr(Path, "open", denied)  # root may read every file
    for read in (checkpoint.digest, checkpoint.check):
        with pytest.raises(BadInput, match=r"tokenizer\.json cannot be read: Permission denied\."):
            read(folder)


@pytest.mark.parametrize("name", ["extra.safetensors", "consolidated.safetensors", "a.gguf", "adapter_config.json"])
def test_weights_that_one_loader_reads_and_another_does_not_are_refused(folder, name):
    (folder / name).write_text("{}")
    for read in (checkpoint.digest, checkpoint.check):
        with pytest.raises(BadInput, match=rf"{name}|merge"):
            read(folder)


def test_weights_that_no_loader_reads_beside_an_index_change_nothing_but_what_vllm_prefers_is_refused(folder):
    split(folder)
    digest = checkpoint.check(folder).digest
    for name in ("mtp.safetensors", "model.fp16.safetensors"):
        (folder / name).write_text("{}")
    assert checkpoint.check(folder).digest == digest
    (folder / "consolidated.safetensors").write_text("{}")
    with pytest.raises(BadInput, match=r"consolidated\.safetensors is not part of the model .* move it out"):
        checkpoint.check(folder)


def test_shards_beside_a_whole_file_are_refused(folder, tmp_path):
    """Transformers would read the whole file, vLLM the shards that the index lists."""
    whole = tmp_path / "whole.safetensors"
    shutil.copy(folder / "model.safetensors", whole)
    split(folder)
    shutil.move(whole, folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"not part of the model in model\.safetensors"):
        checkpoint.check(folder)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"transformers_weights": "other.safetensors"}),
        ("config.json", {"speculators_config": {"verifier": {"name_or_path": "/other"}}}),
        ("config.json", {"configuration_files": ["config.4.0.0.json"]}),
        ("config.json", {"attn_implementation": "someone/kernel"}),
        ("config.json", {"text_config": {"_attn_implementation": "someone/kernel"}}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}),
    ],
)
def test_a_configuration_that_leads_to_other_files_is_refused(folder, name, changes):
    edit(folder / name, **changes)
    with pytest.raises(BadInput, match=f"{name}.*({'|'.join(changes)}|_attn_implementation)"):
        checkpoint.check(folder)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("config.json", 476 << 20),
        ("chat_template.jinja", 50 << 20),
        ("tokenizer_config.json", 50 << 20),
        ("tokenizer.json", 1 << 30),
        ("additional_chat_templates/default.jinja", 2 << 20),
    ],
)
def test_sizes_are_looked_at_before_files_are_read(folder, name, size):
    (folder / name).parent.mkdir(exist_ok=True)
    with open(folder / name, "wb") as file:
        file.truncate(size)
    with pytest.raises(BadInput, match=rf"{name} is larger than expected"):
        checkpoint.check(folder)


@pytest.mark.parametrize("changes", [{"num_nextn_predict_layers": "x"}, {"intermediate_size": 10**9}, {"n_layer": 1e9}])
def test_sizes_that_no_model_has_are_refused(folder, changes):
    edit(folder / "config.json", **changes)
    with pytest.raises(BadInput, match=rf"config\.json says {next(iter(changes))} = "):
        checkpoint.check(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_json_nested_200000_deep_is_refused(folder, name):
    text = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    (folder / name).write_bytes(len(text).to_bytes(8, "little") + text if name.endswith("tensors") else text)
    with pytest.raises(BadInput, match=name):
        checkpoint.check(folder)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": 5, "shape": [], "data_offsets": [0, 0]}},
        {"a": {"dtype": "BF16", "shape": [], "data_offsets": []}},
        {"a": {"dtype": "BF16", "shape": [], "data_offsets": {}}},
        {"a": {"dtype": "BF16", "shape": [], "data_offsets": [-2, 0]}},
        {"a": {"dtype": "BF16", "shape": [0] * 10**5, "data_offsets": [0, 0]}},
        {"a": {"dtype": "BF16", "shape": [10**4000], "data_offsets": [0, 10**4000]}},
        {"a": {"dtype": "BF16", "shape": {}, "data_offsets": [True, 1]}},
        {"a": 5},
        {"__metadata__": 5},
        {"__metadata__": {"a": 5}},
        [],
    ],
    ids=lambda header: str(header)[:40],
)
def test_a_header_of_other_types_is_refused(folder, header):
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(BadInput, match=r"model\.safetensors is"):
        checkpoint.check(folder)


def test_a_name_cannot_forge_a_line_of_the_manifest(folder):
    split(folder)
    (folder / "a\n0  b.safetensors").write_text("")
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a": "a\n0  b.safetensors"}}))
    with pytest.raises(BadInput, match="control characters in its name"):
        checkpoint.digest(folder)


def test_a_disk_is_not_searched_for_code():
    with pytest.raises(BadInput, match=r"/ has no config\.json"):
        checkpoint.check("/")


def test_a_folder_of_too_many_files_is_refused(folder, monkeypatch):
    monkeypatch.setattr(checkpoint.reading, "MOST_FILES", 2)
    with pytest.raises(BadInput, match="holds more than 2 files"):
        checkpoint.check(folder)
