"""The exception with which reading a loss stops at an op."""

from __future__ import annotations


class NotAFormula(Exception):
    """Raised for a value that is no formula over logits; its message says why."""
