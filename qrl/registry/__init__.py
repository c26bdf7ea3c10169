"""The model registry: versions, aliases and stages, the gates between them, promotion and rollback."""

from qrl.registry.declared import check_declared, known
from qrl.registry.pages import publish
from qrl.registry.registering import register, registered_name
from qrl.registry.stages import promote, refuse, resolve, rollback

__all__ = [
    "check_declared",
    "known",
    "promote",
    "publish",
    "refuse",
    "register",
    "registered_name",
    "resolve",
    "rollback",
]
