"""Codes to values and back: how weights are stored, whoever trained or serves them."""
