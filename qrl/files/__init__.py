"""Files that others wrote: read within bounds, and as tables."""
