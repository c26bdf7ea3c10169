"""One file per step: check the inputs, compute, record. Steps meet in MLflow runs only, not through Python objects.

Inputs are checked before a run starts, so bad input leaves no run behind.
"""
