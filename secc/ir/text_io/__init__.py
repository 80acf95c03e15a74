"""Parses, prints and verifies modules of the `sec` IR. Imports `ir.dialect` and `ir.analysis`."""
