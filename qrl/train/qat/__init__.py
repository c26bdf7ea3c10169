"""Quantization-aware training: linears that compute with Q(W), their folds, and the calibration of activations."""
