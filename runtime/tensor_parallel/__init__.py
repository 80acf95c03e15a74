"""Tensor parallelism: one replica of a section on several ranks, each with a part of the blocks' weights.

A plan lists, for each section, how parameters are cut (`Shard`) and which of the user's own modules work on
parts (`Style`). Parameters become plain tensors of the rank's part, and the modules' forwards are wrapped
with collectives that know their own gradients. DTensor was weighed and not taken: its parameters do not lie
in flat buckets that optimizers are sharded over, its activations do not go through a
`torch.autograd.Function` (the fused kernels), its dispatch costs a step on small layers more than the
products do, and a replicated parameter on sharded activations gets a gradient of the wrong sum. The styles
bear the names that `torch.distributed.tensor.parallel` and Hugging Face give them.
"""
