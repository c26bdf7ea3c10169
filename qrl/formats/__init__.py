"""Stored weights: codes to values and back, whichever library wrote them.

Public: `header.read` (tensors of a safetensors file), `architecture.check` (config.json against them), `stream.Rows`
(rows of a matrix from disk); `stored.names`, `stored.matrices` (values of a quantized checkpoint), `plain.load`,
`plain.write`, `kind.of`; `rtn` (round-to-nearest, the W4 proxy); `fakequant` (the rounding of quantization-aware
training).
"""
