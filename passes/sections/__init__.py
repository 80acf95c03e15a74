"""Helpers of `coarsen` and `sink-boundaries`: groups of blocks, merging, and assignment of ops to groups."""
