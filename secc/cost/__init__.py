"""Costs: FLOPs, bytes and memory of calls, sections and edges over the inputs' sizes, and the times they take
on a cluster."""
