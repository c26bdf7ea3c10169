"""Which recipe and which device `auto` means; light, since `--help` asks too."""

from qrl import cluster
from qrl import recipe as recipes
from qrl.errors import BadInput


def recipe_for(name: str, overrides: dict[str, str]) -> str:
    """Return the recipe to load: the one that was named or, for `auto`, the one that fits the model and the device."""
    if name != recipes.DEFAULT or recipes.default(overrides) == recipes.default(overrides, device="cpu"):
        return name
    return recipes.default(overrides, device=device_of(overrides.get("device", "auto")))


def device_of(wanted: str) -> str:
    """Return the device of a study's steps, here or on the nodes of the cluster that they are submitted to.

    Raises:
        BadInput: the recipe says `cuda`, and there is no GPU.
    """
    from qrl.engine import device as devices

    nodes = cluster.chosen()
    if nodes is None:
        return devices.choose(wanted)
    if wanted == "cuda" and nodes.device() == "cpu":
        raise BadInput(
            "device is 'cuda', but steps.train of cluster.yaml asks for no `gpus`: give it some, or device=cpu."
        )
    return nodes.device() if wanted == "auto" else wanted
