"""Published ways to train compound models, each with its best layout, in the same simulator with the same
costs as a plan of secc."""
