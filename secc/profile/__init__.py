"""Measuring: real blocks on the machine at hand, and its links and rates."""
