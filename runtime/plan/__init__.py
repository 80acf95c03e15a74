"""Plain data: the contents of plan.json and of a step program, and functions of them that need no model,
device or process group. Imports `errors` and `host`.
"""
