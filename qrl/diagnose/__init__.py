"""What the weights look like, how far training moved them, and what quantization does to them and to the outputs."""
