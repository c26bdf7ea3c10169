"""Which recipe and which device `auto` means; imports nothing heavy, since `--help` asks too."""

from qrl import cluster
from qrl import recipe as recipes
from qrl.errors import BadInput


def recipe_for(name: str, overrides: dict[str, str]) -> str:
    """Return the recipe to load: the one that is named or, for `auto`, the one that fits the model and the device."""
    if name != recipes.DEFAULT:
        return name
    # The device is looked up only if it decides: that imports torch.
    if recipes.default(overrides) == recipes.default(overrides, device="cpu"):
        return name
    return recipes.default(overrides, device=device_of(overrides.get("device", "auto")))


def device_of(setting: str) -> str:
    """Return the device of a study's steps, here or on the nodes of the cluster that they are submitted to.

    Args:
        setting: the recipe's `device`: auto, cpu or cuda.

    Raises:
        BadInput: the recipe says `cuda`, and there is no GPU.
    """
    from qrl.engine import device as devices

    nodes = cluster.chosen()
    if nodes is None:
        return devices.choose(setting)
    if setting == "cuda" and nodes.device() == "cpu":
        raise BadInput(
            "device is 'cuda', but steps.train of cluster.yaml asks for no `gpus`: give it some, or device=cpu."
        )
    return nodes.device() if setting == "auto" else setting
