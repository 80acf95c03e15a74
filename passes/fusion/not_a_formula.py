"""The exception with which reading a loss stops at an op."""

from __future__ import annotations


class NotAFormula(Exception):
    """Why a value is no formula over logits, as a sentence for people."""
