"""Gives each sample its own random numbers in training: a value belongs to (seed, step, sample, call, place
within the sample), so no plan changes it.

No order of samples repeats the stream of one process, so ranks have no stream. While a section runs, every
random op is intercepted, its result is split into the rows of each sample, and each entry is a hash of its
sample's key, the call's name and its coordinates within the sample. Numbers that all samples share (a layer
that is dropped for the whole batch) are keyed by seed, step and call alone. Dropout therefore gives the same
numbers on any number of ranks, in micro-batches of any size and order.

Counter-based generators of this kind are described by Salmon et al., "Parallel random numbers: as easy as 1,
2, 3" (SC 2011).
"""
