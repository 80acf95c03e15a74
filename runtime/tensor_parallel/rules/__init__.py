"""What torch's functions do to marked tensors: one rule for each kind of function, by its name.

A rule runs the function on parts with sizes cut down, and marks the results. Where a function would mix
entries that different ranks have, or cut between parts, it refuses and says where an edge between parts would
help. Functions without a name here are taken to work entry by entry if their results have the shape that
their operands broadcast to; the comparison of all gradients would tell.
"""

from __future__ import annotations

from typing import Any

from secc.runtime.tensor_parallel.rules import elementwise, products, slicing, views
from secc.runtime.tensor_parallel.rules.common import Rule


def rule_of(func: Any) -> Rule:
    """The rule for a function of torch."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = f"{getattr(getattr(func, '__self__', None), '__name__', '')}.get"
    return RULES.get(name, elementwise.elementwise)


PLAIN = (
    "dim", "ndimension", "ndim.get", "dtype.get", "device.get", "requires_grad.get", "is_contiguous", "is_floating_point", "element_size",
    "is_cuda.get", "layout.get", "grad_fn.get", "is_complex", "stride", "get_device", "data_ptr", "is_meta.get", "is_leaf.get",
    "_version.get", "is_sparse.get", "is_nested.get", "register_hook", "requires_grad_", "__hash__", "type", "is_quantized.get",
    "is_mps.get", "is_xla.get", "is_cpu.get", "itemsize.get", "retain_grad", "grad.get", "is_inference",
)  # fmt: skip
MOVES = (
    "transpose",
    "transpose_",
    "permute",
    "movedim",
    "swapaxes",
    "swapdims",
    "moveaxis",
    "t",
    "T.get",
    "mT.get",
    "adjoint",
    "unsqueeze",
)
ALONG = (
    "softmax", "log_softmax", "sum", "mean", "amax", "amin", "max", "min", "var", "std", "norm", "prod", "cumsum", "cumprod", "argmax",
    "argmin", "topk", "sort", "argsort", "logsumexp", "flip", "roll", "gather", "index_select", "normalize", "all", "any", "median",
    "count_nonzero", "glu", "softmin", "diff", "vector_norm", "scatter", "index_add", "index_copy",
)  # fmt: skip
DROPOUTS = ("dropout", "dropout1d", "alpha_dropout", "feature_dropout", "dropout_")
REFUSED = (
    "baddbmm", "addmm", "group_norm", "batch_norm", "conv1d", "conv2d", "embedding", "repeat", "tile", "__setitem__", "rand_like",
    "randn_like", "bernoulli", "multinomial", "tolist", "item", "nonzero", "unfold", "as_strided", "copy_", "multi_head_attention_forward",
)  # fmt: skip
RULES: dict[str, Rule] = {
    "shape.get": views.shape_get, "size": views.size, "numel": views.numel, "nelement": views.numel, "__len__": views.length,
    **dict.fromkeys(PLAIN, views.plain),
    "view": views.view, "reshape": views.view, "view_as": views.view_as, "reshape_as": views.view_as, "flatten": views.flatten,
    "unflatten": views.unflatten, **dict.fromkeys(MOVES, views.permute), "squeeze": views.squeeze, "expand": views.expand,
    "expand_as": views.expand_as,
    **dict.fromkeys(("split", "chunk", "split_with_sizes"), slicing.split), "narrow": slicing.narrow, "select": slicing.select,
    "unbind": slicing.unbind, "__iter__": slicing.unbind, "__getitem__": slicing.getitem,
    **dict.fromkeys(("cat", "concat", "concatenate"), slicing.cat), "stack": slicing.stack, "repeat_interleave": slicing.repeat_interleave,
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), products.matmul), "linear": products.linear, "einsum": products.einsum,
    "scaled_dot_product_attention": products.attention,
    **dict.fromkeys(ALONG, elementwise.along), "layer_norm": elementwise.normalized, "rms_norm": elementwise.normalized,
    **dict.fromkeys(DROPOUTS, elementwise.dropout), **dict.fromkeys(REFUSED, elementwise.refused),
}  # fmt: skip
