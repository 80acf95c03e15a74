"""Published ways to train compound models, each with its best layout, in the same simulator with the same
costs as a plan.

Imports the driver (to lower a plan's IR again), `secc.alloc`, `secc.simulate` and below.
"""
