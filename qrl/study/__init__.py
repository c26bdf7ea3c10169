"""The study: the order of its steps, the environments they run in, the sweep over methods, and the final report."""
