"""Runs the compiler end to end: load, capture, passes, check, write.

Only the command line, profiling and baselines import it.
"""
