"""The effect of torch's functions on marked tensors: one rule for each kind of function, by its name.

A rule runs the function on parts, with reduced sizes, and marks the results. A function that would mix
entries of different ranks, or cut between parts, raises `UnshardableCode`, which says where a split between
parts would help. A function that is not listed is assumed to work entry by entry if its results have the
shape that its operands broadcast to; a wrong assumption shows when all gradients are compared.
"""

from __future__ import annotations

from typing import Any

from secc.runtime.tensor_parallel.rules import elementwise, products, slicing, views
from secc.runtime.tensor_parallel.rules.common import FunctionRule


def find_rule(func: Any) -> FunctionRule:
    """Returns the rule for a torch function."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = f"{getattr(getattr(func, '__self__', None), '__name__', '')}.get"
    return FUNCTION_RULES.get(name, elementwise.elementwise_rule)


# fmt: off
SIZE_INDEPENDENT_FUNCTIONS = (
    "dim", "ndimension", "ndim.get", "dtype.get", "device.get", "requires_grad.get", "is_contiguous",
    "is_floating_point", "element_size", "is_cuda.get", "layout.get", "grad_fn.get", "is_complex",
    "stride", "get_device", "data_ptr", "is_meta.get", "is_leaf.get", "_version.get", "is_sparse.get",
    "is_nested.get", "register_hook", "requires_grad_", "__hash__", "type", "is_quantized.get",
    "is_mps.get", "is_xla.get", "is_cpu.get", "itemsize.get", "retain_grad", "grad.get", "is_inference",
)
DIM_MOVING_FUNCTIONS = (
    "transpose", "transpose_", "permute", "movedim", "swapaxes", "swapdims", "moveaxis", "t", "T.get",
    "mT.get", "adjoint", "unsqueeze",
)
ALONG_DIM_FUNCTIONS = (
    "softmax", "log_softmax", "sum", "mean", "amax", "amin", "max", "min", "var", "std", "norm", "prod",
    "cumsum", "cumprod", "argmax", "argmin", "topk", "sort", "argsort", "logsumexp", "flip", "roll",
    "gather", "index_select", "normalize", "all", "any", "median", "count_nonzero", "glu", "softmin",
    "diff", "vector_norm", "scatter", "index_add", "index_copy",
)
DROPOUT_FUNCTIONS = ("dropout", "dropout1d", "alpha_dropout", "feature_dropout", "dropout_")
REFUSED_FUNCTIONS = (
    "baddbmm", "addmm", "group_norm", "batch_norm", "conv1d", "conv2d", "embedding", "repeat", "tile",
    "__setitem__", "rand_like", "randn_like", "bernoulli", "multinomial", "tolist", "item", "nonzero",
    "unfold", "as_strided", "copy_", "multi_head_attention_forward",
)
# fmt: on
FUNCTION_RULES: dict[str, FunctionRule] = {
    # Sizes, and what does not depend on them.
    "shape.get": views.shape_rule,
    "size": views.size_rule,
    "numel": views.numel_rule,
    "nelement": views.numel_rule,
    "__len__": views.len_rule,
    **dict.fromkeys(SIZE_INDEPENDENT_FUNCTIONS, views.unchanged_rule),
    # The same entries in another shape.
    "view": views.view_rule,
    "reshape": views.view_rule,
    "view_as": views.view_as_rule,
    "reshape_as": views.view_as_rule,
    "flatten": views.flatten_rule,
    "unflatten": views.unflatten_rule,
    **dict.fromkeys(DIM_MOVING_FUNCTIONS, views.permute_rule),
    "squeeze": views.squeeze_rule,
    "expand": views.expand_rule,
    "expand_as": views.expand_as_rule,
    # Slices, and tensors put together.
    **dict.fromkeys(("split", "chunk", "split_with_sizes"), slicing.split_rule),
    "narrow": slicing.narrow_rule,
    "select": slicing.select_rule,
    "unbind": slicing.unbind_rule,
    "__iter__": slicing.unbind_rule,
    "__getitem__": slicing.getitem_rule,
    **dict.fromkeys(("cat", "concat", "concatenate"), slicing.cat_rule),
    "stack": slicing.stack_rule,
    "repeat_interleave": slicing.repeat_interleave_rule,
    # Products.
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), products.matmul_rule),
    "linear": products.linear_rule,
    "einsum": products.einsum_rule,
    "scaled_dot_product_attention": products.attention_rule,
    # Functions along dims, and the rest.
    **dict.fromkeys(ALONG_DIM_FUNCTIONS, elementwise.along_dim_rule),
    "layer_norm": elementwise.normalization_rule,
    "rms_norm": elementwise.normalization_rule,
    **dict.fromkeys(DROPOUT_FUNCTIONS, elementwise.dropout_rule),
    **dict.fromkeys(REFUSED_FUNCTIONS, elementwise.refusing_rule),
}
