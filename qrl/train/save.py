"""Write a trained model as a checkpoint folder that appears whole."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from qrl import checkpoint
from qrl.checkpoint import header
from qrl.engine import hf
from qrl.errors import QrlError
from qrl.formats import plain
from qrl.formats.fakequant import linears
from qrl.recipe import Train
from qrl.train import kept, policy
from qrl.train.job import Job
from qrl.workspace import write_atomically


def trained(
    model, base: checkpoint.Checkpoint, job: Job, state: dict[str, torch.Tensor] | None = None, *, base_digest: str
) -> None:
    """Write a job's outcome: an adapter and what it was trained over, or all weights.

    Activation scales of QAT are written to the same folder as its weights. `state` is as in `write`, and `base_digest`
    is that of the base before training: an adapter names it.
    """
    settings = job.settings

    def note(folder: Path) -> None:
        if settings.adapter:
            policy.record(folder, settings, base_digest)
        elif (scales := linears.read_activation_scales(job.work)) is not None:
            linears.write_activation_scales(folder, scales)

    dtype = None if settings.adapter else stored_in(settings, base)
    write(model, job.base, job.out, dtype=dtype, state=state, note=note)


def stored_in(settings: Train, base: checkpoint.Checkpoint) -> str:
    """Return the dtype of trained weights on the disk: the base's, or fp32 if that is chosen.

    QAT's always stay in fp32, since rounding them changes codes.
    """
    return base.dtype if settings.store_dtype == "auto" and settings.qat == "none" else "float32"


def update(model, base: checkpoint.Checkpoint, dtype: str, state: dict[str, torch.Tensor] | None = None) -> kept.Update:
    """Return what training changed, and what of that weights stored in `dtype` keep; one matrix is read at a time.

    A step that is smaller than bf16's spacing shows in the masters alone.

    Args:
        model: with all weights trained.
        base: what it started from.
        dtype: of the checkpoint that `trained` writes.
        state: as in `write`.
    """
    after = dict(model.named_parameters()) if state is None else state
    found, trained = kept.Update(dtype), [name for name in checkpoint.entries(base.path) if name in after]
    with torch.no_grad():
        for name, before in checkpoint.tensors(base.path, trained):
            found.add(before.to(after[name].device), after[name].detach())
    return found


def write(model, base: Path, out: Path, *, dtype: str | None, state: dict | None = None, note: Callable | None = None):
    """Write weights beside the base's own tokenizer files, so that prompts stay identical.

    Generation settings that do not name all tokens which end an answer get those too.

    Args:
        model: a transformers model, or a PEFT model, of which only the adapter is written.
        base: folder of the tokenizer, chat template and generation settings.
        out: folder to make; must not exist.
        dtype: dtype to store, e.g. "bfloat16"; None writes an adapter as it is.
        state: the weights by name, where several processes hold parts of the model; None takes the model's own.
        note: writes further files into the folder, which it is given before it appears.

    Raises:
        QrlError: the model has no adapter weights.
    """
    if dtype is not None and state is None:
        model = model.to(getattr(torch, dtype))
    elif dtype is not None:  # gathered from several processes; a tied weight was gathered twice
        tied = model.all_tied_weights_keys
        state = {name: weight.to(getattr(torch, dtype)) for name, weight in state.items() if name not in tied}
    with write_atomically(out) as folder:
        model.save_pretrained(folder, state_dict=state)
        if dtype is None:
            settle_adapter(folder)
        else:  # training turned the cache off; gathered weights left the dtype of their parts
            config = json.loads((folder / "config.json").read_text())
            config |= {"dtype": dtype, "use_cache": checkpoint.config(base).get("use_cache", True)}
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        plain.copy_text_files(base, folder)
        if dtype is not None:
            hf.name_ends(folder)  # other programs read the generation settings, and not the chat template
        if note:
            note(folder)


def settle_adapter(folder: Path) -> None:
    """Check that an adapter has weights, and sort its target modules: PEFT's set has another order in each process."""
    if not header.read(folder / "adapter_model.safetensors"):
        reason = "The adapter was written without any weight, by a bug in qrl or a library"
        raise QrlError(f"{reason}: report it; train.method = full is not affected.")
    config = json.loads((folder / "adapter_config.json").read_text())
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
