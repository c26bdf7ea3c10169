"""Load a checkpoint and generate from token ids; evaluation, calibration, training probes and benchmarks share it."""
