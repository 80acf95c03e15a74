"""Local search around the solver's plan, with the scheduler that ranks run.

Imports `alloc.solver`, `alloc.problem` and `runtime.schedule`.
"""
