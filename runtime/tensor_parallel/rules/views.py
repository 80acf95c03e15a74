"""Sizes read off parts, and the same entries in other shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from secc.runtime.tensor_parallel.rules.common import Args, own_mark, places
from secc.runtime.tensor_parallel.rules.elementwise import elementwise
from secc.runtime.tensor_parallel.rules.mark import Mark, Refused, set_mark

if TYPE_CHECKING:
    from secc.runtime.tensor_parallel.shape_mode import Shapes

FEW = 4  # entries of a dim that are rather kinds of things (queries, keys, values) than heads


def shape_get(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    return torch.Size(mode.whole_shape(args[0]))


def size(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    whole, dim = torch.Size(mode.whole_shape(args[0])), args[1] if len(args) > 1 else kwargs.get("dim")
    return whole if dim is None else whole[dim]


def numel(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    return prod(mode.whole_shape(args[0]))


def length(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    return mode.whole_shape(args[0])[0]


def plain(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    """What does not depend on sizes."""
    return func(*args, **kwargs)


def view(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    tensor = args[0]
    sizes: Sequence[Any] = args[1:] or [kwargs[k] for k in ("size", "shape", "dtype") if k in kwargs]
    if isinstance(sizes[0], torch.dtype):
        return elementwise(mode, func, args, kwargs, found)
    wanted = [int(s) for s in (sizes[0] if isinstance(sizes[0], tuple | list) else sizes)]
    return _viewed(mode, tensor, wanted, own_mark(found, args))


def view_as(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    return _viewed(mode, args[0], mode.whole_shape(args[1]), own_mark(found, args))


def flatten(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    own, whole = own_mark(found, args), mode.whole_shape(args[0])
    start = (args[1] if len(args) > 1 else kwargs.get("start_dim", 0)) % len(whole)
    end = (args[2] if len(args) > 2 else kwargs.get("end_dim", -1)) % len(whole)
    return _viewed(mode, args[0], [*whole[:start], prod(whole[start : end + 1]), *whole[end + 1 :]], own)


def unflatten(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    own, whole = own_mark(found, args), mode.whole_shape(args[0])
    dim = (args[1] if len(args) > 1 else kwargs["dim"]) % len(whole)
    sizes = list(args[2] if len(args) > 2 else kwargs["sizes"])
    if -1 in sizes:
        sizes[sizes.index(-1)] = whole[dim] // -prod(sizes)
    return _viewed(mode, args[0], [*whole[:dim], *sizes, *whole[dim + 1 :]], own)


def _viewed(mode: Shapes, tensor: torch.Tensor, wanted: list[int], own: Mark) -> torch.Tensor:
    whole = mode.whole_shape(tensor)
    if -1 in wanted:
        others = prod(s for s in wanted if s != -1)
        wanted[wanted.index(-1)] = prod(whole) // others if others else 0
    if prod(wanted) != prod(whole):
        raise Refused(f"a tensor of shape {whole} is viewed as {wanted}", own.sources)
    dim, parts = _place(mode, whole, wanted, own)
    wanted[dim] = mode.length(parts)
    return set_mark(tensor.reshape(wanted), own.at(dim, parts))


def _place(mode: Shapes, whole: list[int], wanted: list[int], own: Mark) -> tuple[int, tuple[int, ...]]:
    """Where the cut dim is in another view, and its parts there."""
    before, dim = prod(whole[: own.dim]), 0
    products = [1, *accumulate(wanted, int.__mul__)]
    while dim < len(wanted) and not (products[dim] == before and wanted[dim] > 1):
        dim += 1
    if dim == len(wanted):
        raise Refused("a dim of which ranks have parts is merged into another", own.sources)
    return _split(mode, wanted, dim, own.parts, own)


def _split(
    mode: Shapes, wanted: list[int], dim: int, parts: tuple[int, ...], own: Mark
) -> tuple[int, tuple[int, ...]]:
    total = sum(parts)
    if wanted[dim] >= total:
        if wanted[dim] % total:
            raise Refused("a dim of which ranks have parts is merged with a piece of another", own.sources)
        return dim, tuple(part * (wanted[dim] // total) for part in parts)
    if total % wanted[dim]:
        raise Refused("a dim of which ranks have parts is split unevenly", own.sources)
    inner = total // wanted[dim]
    if (
        len(parts) == wanted[dim] and set(parts) == {inner} and inner > 1
    ):  # kinds side by side, each of them cut
        after = next(d for d in range(dim + 1, len(wanted)) if wanted[d] > 1)
        return _split(mode, wanted, after, (inner,), own)
    if any(part % inner for part in parts):
        raise Refused("a dim of which ranks have parts is split across their edges", own.sources)
    outer = tuple(part // inner for part in parts)
    if any(part % mode.count for part in outer):
        if wanted[dim] <= FEW and len(parts) == 1:
            raise Refused(
                _uneven(mode, outer),
                own.sources,
                places(own, *(own.size * i // wanted[dim] for i in range(wanted[dim]))),
            )
        raise Refused(_uneven(mode, outer), own.sources)
    mode.heads |= {*outer}
    return dim, outer


def _uneven(mode: Shapes, parts: Sequence[int]) -> str:
    return f"tp={mode.count} does not divide {next(p for p in parts if p % mode.count)} heads"


def permute(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    """Any function that only moves dims: a tensor of dim numbers tells where the marked one goes."""
    own, out = own_mark(found, args), func(*args, **kwargs)
    moved = func(torch.empty([d + 2 for d in range(args[0].ndim)], device="meta"), *args[1:], **kwargs)
    return set_mark(out, own.at(list(moved.shape).index(own.dim + 2)))


def squeeze(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    own, shape = own_mark(found, args), args[0].shape
    if shape[own.dim] == 1:
        raise Refused("a dim of which ranks have parts may be squeezed", own.sources)
    sizes = [1 if s == 1 else d + 2 for d, s in enumerate(shape)]
    moved = func(torch.empty(sizes, device="meta"), *args[1:], **kwargs)
    return set_mark(func(*args, **kwargs), own.at(list(moved.shape).index(own.dim + 2)))


def expand(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    own = own_mark(found, args)
    sizes = list(args[1] if isinstance(args[1], tuple | list) else args[1:])
    dim = own.dim + len(sizes) - args[0].ndim
    if sizes[dim] not in (-1, own.size):
        raise Refused("a dim of which ranks have parts is expanded", own.sources)
    sizes[dim] = -1
    return set_mark(args[0].expand(sizes), own.at(dim))


def expand_as(mode: Shapes, func: Any, args: Args, kwargs: dict[str, Any], found: list[Mark]) -> Any:
    return expand(mode, func, (args[0], tuple(mode.whole_shape(args[1]))), {}, found)
