"""Serving a checkpoint at an OpenAI-compatible address: start, watch and stop existing engines."""
