"""The exception that ends reading a loss at an op."""

from __future__ import annotations


class NotAFormula(Exception):
    """Raised for a value that is no formula over logits; its message says why."""
