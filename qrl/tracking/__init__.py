"""MLflow tracking: the store, runs that always end, logged checkpoints, cache keys and reuse of finished steps."""
