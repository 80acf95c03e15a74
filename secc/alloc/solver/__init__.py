"""The allocation solver: trial of all assignments, the CP-SAT model and its warm start.

Imports `alloc.problem` only; nothing else of the compiler imports ortools, except `alloc.exact`.
"""
