"""What the weights look like, and how far training moved them."""
