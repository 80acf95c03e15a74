"""Parameters, gradients, optimizer states and checkpoints of a rank.

Imports `sections`, `tensor_parallel`, `model`, `plan` and `errors`.
"""
