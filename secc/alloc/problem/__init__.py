"""Candidates of sections as data for the solver, and their closed-form value.

Imports `secc.cost.model`, `secc.cluster` and `secc.ir`.
"""
