"""A teacher within training: whole in each process, or spread over all of them."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from qrl import process
from qrl.errors import BadInput
from qrl.recipe import Train
from qrl.train import policy
from qrl.train.teacher import Likeliest
from qrl.train.trl.distillation import redirect


class Local:
    """A model that scores in this process, with the weights of `policy.load`."""

    def __init__(self, folder: Path, settings: Train, device: str) -> None:
        """Load the teacher onto this process's device; its part alone where `train.teacher_placement` is sharded."""
        self.top_k = settings.distill_top_k
        self.temperature = settings.temperature
        torch_device = torch.device("cuda", process.local_rank()) if device == "cuda" else torch.device("cpu")

        def load() -> nn.Module:
            model = policy.load(folder, settings, device).requires_grad_(False).eval()
            return stored_as_computed(model) if settings.compute == "bf16" else model

        if settings.teacher_placement == "sharded":
            self.model = shard(load, torch_device)
        else:
            self.model = load().to(torch_device)

    def __call__(self, score: Callable[[nn.Module], Tensor], ids: Tensor, mask: Tensor, valid: Tensor) -> Likeliest:
        logits = redirect(self.model, lambda _: score(self.model), ids)
        return likeliest(logits, self.top_k, self.temperature)


def likeliest(logits: Tensor, top_k: int, temperature: float = 1.0) -> Likeliest:
    """Return the likeliest tokens of logits (N, V), at most V of them, with their logits over the temperature."""
    scores, tokens = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    return Likeliest(scores.float() / temperature, tokens)


def stored_as_computed(model: nn.Module) -> nn.Module:
    """Return the model with its linears in bf16, to which autocast would round them at every use; a tied head stays."""
    embeddings = model.get_input_embeddings().weight
    for module in model.modules():
        if type(module) is nn.Linear and module.weight is not embeddings:
            module.to(torch.bfloat16)
    return model


def shard(load: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return this process's part of a model that all processes hold together, on its device.

    A layer is gathered for its forward pass and freed after it; so are the embeddings and the head.

    Raises:
        BadInput: transformers does not say what the model's layers are.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (process.world_size(),))
    # The processes of a machine load in turn, so that its main memory holds one whole model at a time.
    for local_rank in range(process.local_world_size()):
        if local_rank == process.local_rank():
            model = load()
            layers = _layers(model)
            if not layers:
                raise BadInput(
                    f"train.teacher_placement = sharded needs the layers of {type(model).__name__}, which transformers "
                    "does not name: set it to process."
                )
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh, reshard_after_forward=True)
            model.to(device)  # buffers
        distributed.barrier()
    return model


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that transformers never splits over devices: the decoder's layers."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
