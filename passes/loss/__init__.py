"""How `normalize-loss` proves a loss separable by sample: states of values, rules for ops, coefficients over
the whole global batch."""
