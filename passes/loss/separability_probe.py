"""Runs an op without an entry in a table on random rows, to see whether it keeps samples apart.

An op does so if its result for some of the rows is that part of its result for all rows. Shapes cannot show
it: a decomposition of a matrix with a row for each sample, or a norm that limits all of them, has the shape
of an op that works row by row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import count
from typing import Any

import torch

from secc.ir.analysis.run_glue import run_glue
from secc.ir.dialect.ops import GlueOp
from secc.ir.dialect.size_expr import evaluate_size, size_symbol
from secc.ir.dialect.tensor_type import TensorType, tensor_type

_ROWS = 4
_PARTS = (slice(0, 1), slice(1, 4))
_OTHER_SIZES = 5  # the least size of a dim that does not carry samples; each symbol gets its own
_MOST_ENTRIES = 1 << 20
_SCALES = (1.0, 30.0)  # some ops act on large entries only
_TOLERANCE = 1e-3


def mixes_rows(op: GlueOp, sample_symbols: Collection[str]) -> bool:
    """Whether an op gives rows another result when other rows come with them.

    False also where this cannot be tried: a dim is a function of several symbols, tensors are large, integers
    or booleans among the operands may be places of rows (`masked_scatter` takes the rows that its mask has
    room for), or the op does not accept random values.
    """
    namespace, _, name = op.target.data.partition(".")
    if namespace != "aten" or torch.Tag.pointwise in _overload(name).tags:
        return False
    if any(o.dtype.data[0] in "iu" or o.dtype.data == "bool" for o in map(tensor_type, op.operands)):
        return False
    types = [tensor_type(v) for v in (*op.operands, *op.results)]
    dims = {str(d) for t in types for d in t.shape if {str(s) for s in d.free_symbols} & set(sample_symbols)}
    if len(dims) != 1 or (rows := dims.pop()) not in sample_symbols:
        return False
    others = sorted({str(s) for t in types for d in t.shape for s in d.free_symbols} - {rows})
    sizes = dict(zip(others, count(_OTHER_SIZES), strict=False))
    try:
        return any(_depends_on_other_rows(op, rows, sizes, scale) for scale in _SCALES)
    except Exception:  # whatever torch raises for random values or other sizes
        return False


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _depends_on_other_rows(op: GlueOp, rows: str, sizes: Mapping[str, int], scale: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    operands = [_random_tensor(tensor_type(o), {**sizes, rows: _ROWS}, scale, generator) for o in op.operands]
    whole = run_glue(op, operands, {**sizes, rows: _ROWS})
    for part in _PARTS:
        size = part.stop - part.start
        taken = [
            _take_rows(v, tensor_type(o), rows, part) for v, o in zip(operands, op.operands, strict=True)
        ]
        found = run_glue(op, taken, {**sizes, rows: size})
        for result, all_rows, own in zip(op.results, whole, found, strict=False):
            if not list(result.uses):  # by-products for the backward may have entries that are never written
                continue
            wanted = _take_rows(all_rows, tensor_type(result), rows, part)
            if wanted.shape != own.shape or not _agree(wanted, own):
                return True
    return False


def _random_tensor(
    type: TensorType, sizes: Mapping[str, int], scale: float, generator: torch.Generator
) -> torch.Tensor:
    """A tensor of a floating or boolean type at these sizes."""
    shape = [int(evaluate_size(d, sizes)) for d in type.shape]
    dtype: torch.dtype = getattr(torch, type.torch_dtype)
    if torch.Size(shape).numel() > _MOST_ENTRIES:
        raise ValueError(f"{shape} is large")
    if dtype.is_floating_point or dtype.is_complex:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _take_rows(value: torch.Tensor, type: TensorType, rows: str, part: slice) -> torch.Tensor:
    """The rows of `part`, along each dim that is the samples; all of a tensor without such a dim."""
    for d, size in enumerate(type.shape):
        if size == size_symbol(rows):
            value = value.narrow(d, part.start, part.stop - part.start).contiguous()
    return value


def _agree(wanted: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether two results are equal up to rounding; NaN equals NaN."""
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return torch.equal(wanted, own)
    finite = wanted[torch.isfinite(wanted)]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    unit = torch.finfo(wanted.dtype).eps
    tolerance = max(_TOLERANCE, 16 * unit) * max(largest, 1e-6)
    return torch.allclose(wanted, own, rtol=0, atol=tolerance, equal_nan=True)
