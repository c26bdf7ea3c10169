"""The rounding that quantization-aware training computes with."""
