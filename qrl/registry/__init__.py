"""Registered models: versions, aliases and stages, the gates between them, promotion and rollback."""

from qrl.registry.stages import promote, refuse, register, registered_name, resolve, rollback

__all__ = ["promote", "refuse", "register", "registered_name", "resolve", "rollback"]
