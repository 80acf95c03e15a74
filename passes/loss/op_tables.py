"""Tables of ATen ops: which mix along a dim, which reduce, which are linear. Rules read them; a new op is a
new entry.

Ops are known by their base name, without overload: `sum` for `aten.sum.dim_IntList`.
"""

from __future__ import annotations

import re

# Every entry of the result depends on a whole line along the dim: (position of the argument, its name,
# default).
ALONG_DIM_OPS: dict[str, tuple[int, str, int | None]] = {
    "_softmax": (1, "dim", None),
    "_log_softmax": (1, "dim", None),
    "softmax": (1, "dim", None),
    "log_softmax": (1, "dim", None),
    "_safe_softmax": (1, "dim", None),
    "cumsum": (1, "dim", None),
    "cumprod": (1, "dim", None),
    "logcumsumexp": (1, "dim", None),
    "cummax": (1, "dim", None),
    "cummin": (1, "dim", None),
    "_cummax_helper": (3, "dim", None),
    "sort": (1, "dim", -1),
    "argsort": (1, "dim", -1),
    "topk": (2, "dim", -1),
    "kthvalue": (2, "dim", -1),
    "mode": (1, "dim", -1),
    "flip": (1, "dims", None),
    "roll": (2, "dims", None),
    "diff": (2, "dim", -1),
    "unfold": (1, "dimension", None),
}

# Windows slide over the last dims; the digit in the name says how many: `avg_pool2d`.
SLIDING_OPS = re.compile(
    r"(?:avg_pool|max_pool|adaptive_avg_pool|_adaptive_avg_pool|adaptive_max_pool|replication_pad|reflection_pad"
    r"|upsample_[a-z]+|_upsample_[a-z]+|im2col|grid_sampler_)(?P<dims>[123])d\w*"
)
CONVOLUTION_OPS = frozenset(
    {"convolution", "_convolution", "conv1d", "conv2d", "conv3d", "mkldnn_convolution"}
)
ATTENTION_OPS = frozenset({
    "scaled_dot_product_attention", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
})  # fmt: skip

# The result lacks the dims that are reduced: (position of the argument, its name). Without the argument all
# dims are reduced.
REDUCTION_OPS: dict[str, tuple[int, str]] = {
    name: (1, "dim")
    for name in (
        "amax",
        "amin",
        "max",
        "min",
        "prod",
        "any",
        "all",
        "logsumexp",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "argmax",
        "argmin",
        "median",
        "nanmedian",
        "count_nonzero",
        "nansum",
        "nanmean",
        "aminmax",
    )
} | {"norm": (2, "dim"), "linalg_vector_norm": (2, "dim"), "quantile": (2, "dim")}

ADDITIVE_REDUCTIONS = frozenset({"nansum", "count_nonzero"})

# Linear in operand 0 with everything else fixed: the result of a sum is the sum of the results.
LINEAR_OPS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "as_strided", "expand", "expand_as",
    "broadcast_to", "unsqueeze", "squeeze", "transpose", "t", "permute", "movedim", "swapaxes",
    "clone", "contiguous", "alias", "detach", "neg", "select", "slice", "narrow", "diagonal", "index",
    "index_select", "gather", "repeat", "flip", "lift_fresh", "lift_fresh_copy", "lift", "unbind",
    "split", "split_with_sizes", "chunk", "flatten", "unflatten", "positive", "cumsum", "view_as",
    "constant_pad_nd", "take_along_dim", "numpy_T", "mT", "trace", "tril", "triu", "real",
    "view_copy", "expand_copy", "squeeze_copy", "unsqueeze_copy", "select_copy", "slice_copy",
    "transpose_copy", "permute_copy", "detach_copy", "unsafe_split", "unsafe_split_with_sizes",
    "split_copy", "split_with_sizes_copy",
})  # fmt: skip

# Entries of operand 0 are picked by numbers in operand 1.
PICKING_OPS = frozenset({"index", "index_select"})

# Each entry of the result depends on the same entry of each operand.
ENTRYWISE_OPS = frozenset({
    "abs", "add", "ceil", "clamp", "clamp_max", "clamp_min", "div", "eq", "exp", "expm1", "floor", "ge", "gt",
    "le", "log", "log10", "log1p", "log2", "logical_and", "logical_not", "logical_or", "lt", "maximum",
    "minimum", "mul", "nan_to_num", "ne", "neg", "pow", "reciprocal", "relu", "round", "rsqrt", "rsub",
    "sign", "sqrt", "square", "sub", "tanh", "_to_copy", "where",
})  # fmt: skip

# Each result is a function of all entries of a vector. Not those that return places alone (`argmax`).
VECTOR_OPS = (REDUCTION_OPS.keys() - {"argmax", "argmin"}) | {
    "_softmax",
    "_log_softmax",
    "cummax",
    "cumprod",
    "sort",
}

# A shape alone changes: a plain coefficient goes through unchanged.
RESHAPE_OPS = frozenset({
    "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "clone", "contiguous", "alias",
    "detach", "lift_fresh", "lift_fresh_copy", "lift", "expand", "permute", "transpose", "t",
    "positive", "flatten", "view_as", "_to_copy", "to", "sum", "mean",
})  # fmt: skip

PRODUCT_OPS = frozenset({"mm", "bmm", "dot", "vdot", "mv", "matmul", "inner", "linalg_vecdot"})

# Normalisation by statistics of the batch: the position of the argument that says whether they come from the
# batch (None: always).
BATCH_NORM_OPS: dict[str, int | None] = {
    "native_batch_norm": 5,
    "batch_norm": 5,
    "cudnn_batch_norm": 5,
    "miopen_batch_norm": 5,
    "_native_batch_norm_legit": 5,
    "_batch_norm_with_update": None,
    "_native_batch_norm_legit_functional": 5,
    "_batch_norm_with_update_functional": None,
}

# The values of their operands do not matter, only shapes.
FACTORY_OPS = frozenset(
    {
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "fill",
        "zero",
    }
)

# Losses of torch with a `reduction` argument (0 none, 1 mean, 2 sum) over entries: the position of that
# argument.
ENTRY_LOSSES = {
    "mse_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "soft_margin_loss": 2,
    "l1_loss": 2,
}
# The same over rows (dim 0 of operand 0).
ROW_LOSSES = {"multi_margin_loss": 5, "multilabel_margin_loss_forward": 2, "multilabel_margin_loss": 2}
REDUCTION_NONE, REDUCTION_MEAN, REDUCTION_SUM = 0, 1, 2  # torch's numbers
LABEL_LOSSES = frozenset({"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "nll_loss_nd"})

# What a term is called after: the op that sums it up.
TERM_LABELS = {
    "nll_loss_forward": "cross_entropy",
    "nll_loss2d_forward": "cross_entropy",
    "nll_loss": "cross_entropy",
    "nll_loss2d": "cross_entropy",
    "mse_loss": "mse",
    "binary_cross_entropy": "bce",
    "binary_cross_entropy_with_logits": "bce",
    "smooth_l1_loss": "smooth_l1",
    "huber_loss": "huber",
    "soft_margin_loss": "soft_margin",
    "multi_margin_loss": "multi_margin",
    "multilabel_margin_loss_forward": "multilabel",
    "log": "ignored_labels",  # `label_counts.check_block_labels`
}
