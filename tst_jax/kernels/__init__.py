"""Hand-written kernels for the two operations of the method that XLA does not fuse."""
