"""Finds what fused operators can compute in the user's modules: sites are traced, matched with rules that
are data, and compared numerically.

A *site* is a method of a module (its `forward`, or one that forward calls) or a function that a method
calls by a global name. `site_trace` turns a site into a torch.fx graph, `graph_algebra` reads the graph as
expressions, `fusion_rules` and `pattern_match` find what a kernel computes, `equivalence` compares both,
`site_source` writes the site with the kernel in place, and `find_fusions` goes through a model's blocks.
"""
