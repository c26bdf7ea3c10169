"""qrl: does RL post-training change how cleanly a model quantizes?

    import qrl

    graded = qrl.grade("answers.jsonl", task="gsm8k")  # a verdict on each completion, as a table
    qrl.compare(graded.frame)  # gains, gain survival and verdicts, as tables
    model, tokenizer = qrl.load("qrl-tiny", stage="awq")  # a transformers model; gate and digest are checked
    version = qrl.resolve("qrl-tiny", stage="Production")  # number, digest, address; nothing is loaded
    qrl.study("tiny")  # train, quantize, evaluate, compare: what `mlflow run .` does

`examples/verdict.ipynb` is a notebook from answers to a verdict. In a script, keep such calls below
`if __name__ == "__main__":`, as in every script that starts processes. Importing the package imports nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qrl.compare.build import compare as compare
    from qrl.registry.versions import Version
    from qrl.study.face import study as study
    from qrl.tasks.files import grade as grade

__version__ = "0.1.0"
__all__ = ["compare", "grade", "load", "resolve", "study"]


class Room(ModuleType):
    """A folder of the package that is a function too: `qrl.compare(frame)` calls `qrl.compare.compare`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:  # where `help` and notebooks find the signature
        return vars(self)[self.__name__.rpartition(".")[2]]


def __getattr__(name: str) -> Any:
    if name in ("compare", "study"):
        return import_module(f"qrl.{name}")
    if name == "grade":
        from qrl.tasks.files import grade

        return grade
    raise AttributeError(f"module 'qrl' has no attribute '{name}'")


def load(
    name: str, stage: str | int, *, device: str = "auto", dtype: str = "auto", require_signature: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a registered version as a transformers model and its tokenizer, after checking gate, digest and signature.

    Args:
        name: name of the registered model, such as "qrl-tiny".
        stage: base, grpo, awq, or as the recipe declared it; Staging, Production, or a version number.
        device: auto, cpu or cuda.
        dtype: dtype of activations; auto is bf16 on a GPU and fp32 on a CPU.
        require_signature: file with the public key or certificate that must have signed the version; by default, the
            one that it was promoted with, if any.

    Raises:
        BadInput: the stage is unknown or has no version.
        GateRefused: no gate admitted the version, or it lacks that signature.
        QrlError: its files differ from those that were evaluated, or change while they are loaded.
    """
    from qrl import checkpoint
    from qrl.engine import device as devices
    from qrl.engine import hf
    from qrl.errors import QrlError
    from qrl.registry import signing, versions
    from qrl.tasks import prompt

    device = devices.choose(device)
    public_key = signing.load_public_key(require_signature)
    version = resolve(name, stage)
    path = versions.check_gate(version)

    # The digest is checked before the files are loaded; if they change in between, the wrong weights have been checked.
    state = checkpoint.state(path)
    versions.check_files(version, path, public_key)
    model, tokenizer = hf.load(path, device, devices.compute_dtype(dtype, device))
    if checkpoint.state(path) != state:
        raise QrlError(f"The files of {version} changed while they were loaded: load it again.")
    if version.chat:  # chats are rendered as they were evaluated
        tokenizer.chat_template = prompt.with_fixed_variables(tokenizer.get_chat_template(), version.chat)
    return model, tokenizer


def resolve(name: str, stage: str | int) -> Version:
    """Return the version that a stage points to now; nothing is loaded. Arguments and errors as in `load`."""
    from qrl import registry
    from qrl.tracking import store

    store.check_there()
    store.prepare()
    return registry.resolve(name, stage)
