"""Random numbers of training that no plan changes: a value belongs to (seed, step, sample, call, place within
the sample).

No order of samples repeats one process's stream, so ranks have none. While a section runs, every random op is
intercepted, its result is cut into the rows of each sample, and each entry is a hash of its sample's key, of
the call's name and of its coordinates within the sample. What all samples share (a layer that is dropped for
the whole batch) is keyed by seed, step and call alone. So dropout gives the same numbers on any number of
ranks, in micro-batches of any size and order.
"""
