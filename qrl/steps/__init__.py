"""A file a step: inputs → room → record. What a step makes is in its MLflow run; nothing meets through Python objects.

Inputs are checked before a run is made, so that bad input leaves none behind.
"""
