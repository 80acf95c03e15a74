"""Context parallelism: one replica of a section on several ranks, each with some rows of the sequence.

Tensors that hold a rank's rows bear marks (`row_marks`). While a section runs, a torch function mode
(`row_mode`) shows the user's code whole sizes and runs each function on rows by a rule (`row_rules`): linear
maps, norms and products work on rows as they are, attention keeps its query rows and gathers keys and values,
whole masks and tables give up the matching rows. A function without a rule gets gathered tensors, so every
result is that of one rank; only work is done twice.

Gradients: the loss is the sum of what each rank computes with its own rows. So the gradient of every
parameter is a part on each rank, and is summed over ranks as over replicas; a gathered tensor's gradient is
summed and scattered (`row_exchange`).

Why not torch's own context parallelism: it replaces fused causal attention alone, needs lengths that divide,
and knows neither masks nor code that computes attention by itself.
"""
