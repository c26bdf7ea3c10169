"""Fake quantization: the rounding that quantization-aware training computes with, in compressed-tensors' arithmetic.

Public: `rounding.scheme`, `rounding.FORMATS` (what a format is), `rounding.folded` (Q(W), eager), `fused.folded`,
`fused.activations` (the same as training calls them, by one `kernel` on a GPU); `operation.rounded` (activations as one
operation of torch, for engines); `linears.covered`, `linears.check_fit` (which linears a format quantizes),
`linears.read_activation_scales` and `write_activation_scales`.
"""
