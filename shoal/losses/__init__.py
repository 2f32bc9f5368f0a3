"""Pure functions on [T, B] tensors."""
