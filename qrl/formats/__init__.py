"""Stored weights: codes to values and back, whichever library wrote them.

Public: `stored.names`, `stored.matrices` (values of a quantized checkpoint), `plain.load`, `plain.write`, `kind.of`;
`rtn` (round-to-nearest, the W4 proxy); `fakequant` (the rounding of quantization-aware training). The files themselves
are read by `qrl.checkpoint`, which knows nothing of this folder.
"""
