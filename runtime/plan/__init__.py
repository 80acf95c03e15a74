"""Plain data: what plan.json and a step program say, and questions about them that need no model, device or
process group. Imports `errors` and `host`.
"""
