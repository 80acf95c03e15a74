"""Tensor-parallel layouts of modules, found by running the user's code on parts and then verified
numerically.

`find_mapping` proposes which linear layers are column parallel and which row parallel (the terms are
Megatron-LM's), `verify_mapping` compares every gradient with the unsplit module's, and `annotate_layouts`
writes the verified layouts into a graph.
"""
