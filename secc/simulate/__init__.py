"""Runs a plan's step programs in modelled time, before any process starts, and shows where the time goes.

Imports `secc.bounds` and the runtime; nothing of the allocation.
"""
