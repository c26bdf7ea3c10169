"""Evaluation: a cell's rows, whether they are healthy, and what they score."""
