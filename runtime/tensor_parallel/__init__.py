"""Tensor parallelism: one replica of a section on several ranks, each with a part of its blocks' weights.

For each section a plan lists how parameters are cut (`ParameterShard`) and which of the user's own modules
work on parts (`ModuleStyle`). Parameters become plain tensors that hold the rank's part, and the forwards of
modules are wrapped with collectives that have gradients of their own. Styles have the names of
`torch.distributed.tensor.parallel` and Hugging Face where these have one.

Why not DTensor: its parameters do not lie in the flat buckets that optimizers are sharded over; its
activations do not pass through a `torch.autograd.Function` (the fused kernels); its dispatch costs a step on
small layers more than their products; and a replicated parameter applied to sharded activations gets a
partial gradient as if it were complete.
"""
