"""Helpers of `lower`: section bodies and case predicates."""
