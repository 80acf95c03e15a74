"""Model files that the checks train, each in three sizes: `GPU_DAY_SIZE` is small (for the CPU), train (for
hundreds of steps) or layers (a few layers of the real sizes)."""
