"""Links: how frames travel between machines, and how the two sides come to trust each other."""
