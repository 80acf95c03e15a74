"""Puts ranks onto nodes. Imports `secc.cost.model` and `secc.cluster`."""
