"""Optimal schedules of tiny batches by CP-SAT, for tests and tools.

Imports `secc.bounds` and the runtime's plan.
"""
