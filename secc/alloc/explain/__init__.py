"""Alternatives, breakdowns and messages about plans that do not fit.

Imports the rest of `secc.alloc` but `exact`.
"""
