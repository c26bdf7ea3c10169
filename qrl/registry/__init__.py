"""The model registry: versions, stages and the gates between them, and the record of every decision on them."""

from qrl.registry.pages import publish
from qrl.registry.registering import check_base, register, registered_name
from qrl.registry.stages import check_stages, promote, refuse, resolve, rollback, stages_of

__all__ = [
    "check_base",
    "check_stages",
    "promote",
    "publish",
    "refuse",
    "register",
    "registered_name",
    "resolve",
    "rollback",
    "stages_of",
]
