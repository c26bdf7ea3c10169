"""MLflow's tracking as this house uses it: the store, runs that always end, reuse, hard-linked checkpoints."""
