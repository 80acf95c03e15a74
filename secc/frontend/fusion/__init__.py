"""What of the users' modules fused operators can compute: found by tracing, matched with rules that are data,
shown equal by numbers.

A *site* is a method of a module (its `forward`, or one that forward calls) or a function that a method calls
by a global name. `trace` turns a site into a torch.fx graph, `algebra` reads the graph as expressions,
`rules` and `match` find what a kernel computes, `equivalence` compares both, `code` writes the site down with
the kernel in place, and `find` goes through a model's blocks.
"""
