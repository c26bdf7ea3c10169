"""Quantization-aware training: linears that compute in few bits."""
