"""Measures blocks and steps of a model on this machine, and the machine's links and rates."""
