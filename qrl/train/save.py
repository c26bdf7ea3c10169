"""Write a trained model as a checkpoint folder that appears whole."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from qrl import checkpoint
from qrl.errors import QrlError
from qrl.formats import header, plain
from qrl.formats.fakequant import linears
from qrl.train import policy
from qrl.train.job import Job
from qrl.workspace import written_whole


def trained(model, base: checkpoint.Checkpoint, job: Job, state: dict[str, torch.Tensor] | None = None) -> None:
    """Write a job's outcome: an adapter and what it was trained over, or all weights.

    Weights are stored in the base's dtype. QAT's stay in fp32 beside their activation scales, since rounding changes
    codes. `state` is as in `write`.
    """
    settings, dtype = job.settings, base.dtype if job.settings.qat == "none" else "float32"

    def note(folder: Path) -> None:
        if settings.adapter:
            policy.record(folder, settings, base.digest)
        elif (scales := linears.read_activation_scales(job.work)) is not None:
            linears.write_activation_scales(folder, scales)

    write(model, job.base, job.out, dtype=None if settings.adapter else dtype, state=state, note=note)


def moved(model, base: checkpoint.Checkpoint, state: dict[str, torch.Tensor] | None = None) -> dict[str, float]:
    """Return the share of weights that differ from the base's: as trained, and as the base's dtype stores them.

    A step that is smaller than bf16's spacing shows in the masters alone.

    Args:
        model: with all weights trained.
        base: what it started from.
        state: as in `write`.

    Returns:
        `moved_share` and `moved_share_stored`; nothing where no weight has the name of one of the base's.

    Source: Zhu et al., The Path Not Taken, arXiv 2511.08567, which tells both shares apart.
    """
    after = dict(model.named_parameters()) if state is None else state
    trained = [name for name in checkpoint.entries(base.path) if name in after]
    counts = torch.zeros(3, dtype=torch.float64)
    for name, before in checkpoint.tensors(base.path, trained):
        weight = after[name].detach()
        old = before.to(weight.device)
        differ = (weight != old.to(weight.dtype)).sum(), (weight.to(old.dtype) != old).sum(), weight.numel()
        counts += torch.tensor([float(each) for each in differ], dtype=torch.float64)
    masters, stored, total = counts.tolist()
    return {"moved_share": masters / total, "moved_share_stored": stored / total} if total else {}


def write(model, base: Path, out: Path, *, dtype: str | None, state: dict | None = None, note: Callable | None = None):
    """Write weights beside the base's own tokenizer files, so that prompts stay identical.

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
    with written_whole(out) as folder:
        model.save_pretrained(folder, state_dict=state)
        if dtype is None:
            settle_adapter(folder)
        else:  # training turned the cache off; gathered weights left the dtype of their parts
            config = json.loads((folder / "config.json").read_text())
            config |= {"dtype": dtype, "use_cache": checkpoint.config(base).get("use_cache", True)}
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        plain.copy_text_files(base, folder)
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
