"""Runs an excerpt of a model that is too large for this machine: at its real sizes and with all of its code
between modules, but with one layer of each kind of every stack.

Imports `secc.runtime`.
"""
