"""Layers that work on rows of a sequence (context parallelism), found by running the user's code on rows
and verified numerically.

`find_row_layer` runs a layer on the rows of several ranks and compares results and every gradient with those
of one rank; `annotate_rows` writes the layers that are exact into the sections of a graph.
"""
