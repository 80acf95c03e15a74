"""The `sec` dialect: ops, the tensor type, text templates of arguments, size expressions.

Imports nothing else of the compiler.
"""
