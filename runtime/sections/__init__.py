"""What generated section modules are made of, and what wraps the user's modules inside them.

Imports `model`, `randomness`, `tensor_parallel`, `plan` and `errors`.
"""
