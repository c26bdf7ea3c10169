"""Engines: load a checkpoint, generate from token ids. Evaluation, calibration and benchmarks share them."""
