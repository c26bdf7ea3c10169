"""A checkpoint behind an OpenAI-compatible address: existing engines, started, watched and stopped."""
