"""Breaks runs at chosen moments and checks that they end up where an undisturbed run does."""
