"""Proves a schedule complete and free of deadlocks before it runs.

Imports `plan`, `schedule`, `host` and `errors` only.
"""
