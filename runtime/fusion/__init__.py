"""Fused operators inside the user's modules: what a plan's `fused.py` calls, and how a rank installs its
functions.

Only `forward` (or the method, or function, that computes what a kernel can) is replaced, on the module
itself; parameters, names, hooks and checkpoints stay the user's.
"""
