"""Cost expressions of sections, and the time and memory they take on a cluster.

Imports `secc.cluster` and `secc.ir`.
"""
