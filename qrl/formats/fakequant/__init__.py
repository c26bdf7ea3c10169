"""Fake quantization: the rounding that quantization-aware training computes with, in compressed-tensors' arithmetic.

From what a format is to what training calls, each file knows those above it:

- `presets`: the formats with a name; `file`: a format in a YAML file.
- `rounding`: `scheme` of either, and the arithmetic, eager: `folded` is Q(W), `activations` rounds a linear's inputs.
- `kernel`: the same arithmetic in one pass over memory on a GPU; `fused`: the kernel where it equals the eager
  functions, as training calls it.
- `operation`: `rounded`, activations as one operation of torch, for engines.
- `linears`: which linears of a model a format covers, and the calibrated scales of their inputs in a file.
"""
