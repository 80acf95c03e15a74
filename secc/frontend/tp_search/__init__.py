"""How blocks can be cut over the ranks of a replica: a mapping is found by running the user's code on parts,
and then shown exact.

`find` proposes which linear maps are cut by outputs and which by inputs, `verify` compares every gradient
with the whole module's, and `annotate` writes down what holds for the blocks of a graph.
"""
