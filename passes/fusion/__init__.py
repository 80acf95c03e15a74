"""How `fuse-linear-loss` works: losses read as formulas over a head's logits, rules that match formulas,
operators put in their place."""
