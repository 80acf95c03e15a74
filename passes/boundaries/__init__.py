"""Helpers of the passes that move or cut boundaries: what crosses sections and stages, minimum cuts,
fallback cases.
"""
