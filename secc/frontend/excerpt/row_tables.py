"""Stand-ins for large tables of a vocabulary, embeddings and heads over it, that take no memory.

Of a table of V rows a head has some only: every 64th and those of given tokens. All others are zero there, so
a product with the table computes these columns only. A row that is looked up has values, whichever it is,
taken out of one vector of random numbers at a place that the row's number decides. A table that is both
embedding and head therefore looks up rows that the head has as zeros; for what an excerpt shows, both are
weights like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from secc.frontend.excerpt.limits import CannotRunExcerpt

aten = torch.ops.aten

_HEAD_STRIDE = 64  # rows of a table for one that a head does not have as zeros
_PLACES = 1 << 20  # places in the vector of random numbers at which rows start
_PLACE_STEP = 104_729  # between places of consecutive rows; prime, so that no two rows share a place


class RowTable:
    """The values of one table [V, H]. `columns` [C] are the rows that a head has, `head` [C, H] their
    values."""

    def __init__(self, rows: int, features: int, tokens: Iterable[int]) -> None:
        self.rows, self.features = rows, features
        generator = torch.Generator().manual_seed(features)
        vector = torch.randn(_PLACES + features, generator=generator)
        self._windows = vector.unfold(0, features, 1)
        used = {*range(0, rows, _HEAD_STRIDE), *(t for t in tokens if 0 <= t < rows)}
        self.columns = torch.tensor(sorted(used))
        self.head = self.look_up(self.columns) * features**-0.5

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of `ids` [...] as [..., H]. Raises IndexError for an id outside of the table."""
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.rows):
            raise IndexError(f"index out of range in a table of {self.rows} rows")
        return self._windows[(ids * _PLACE_STEP) % _PLACES]

    def multiply_by_head(self, x: torch.Tensor, transposed: bool) -> torch.Tensor:
        """Returns x [T, H] times the transposed head as [T, V], or, not `transposed`, x [T, V] times the head
        as [T, H]."""
        if not transposed:
            return x[:, self.columns] @ self.head
        product = x.new_zeros(len(x), self.rows)
        product[:, self.columns] = x @ self.head.T
        return product


class RowTables(TorchDispatchMode):
    """Computes ops on parameters that stand for tables. Raises CannotRunExcerpt for an op other than a
    lookup, a product or a view."""

    def __init__(self, tables: Mapping[nn.Parameter, RowTable]) -> None:
        super().__init__()
        self._tables = {storage_address(p): table for p, table in tables.items()}
        self._parameters = list(tables)  # keeps the storages, which are compared by their addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func.is_view or func.namespace == "prim" or not any(map(self._table_of, leaves)):
            return func(*args, **kwargs)
        rule = _RULES.get(func)
        result = rule(self._table_of, *args, **kwargs) if rule is not None else None
        if result is None:
            raise CannotRunExcerpt(f"{func} takes a table of a vocabulary")
        return result

    def _table_of(self, tensor: torch.Tensor) -> RowTable | None:
        return self._tables.get(storage_address(tensor))


def make_table_parameter(shape: torch.Size) -> nn.Parameter:
    """Returns a parameter of the shape [V, H] that takes no memory and has no gradient."""
    return nn.Parameter(torch.zeros(1).expand(shape), requires_grad=False)


def storage_address(tensor: torch.Tensor) -> int:
    """Returns a number that tensors share if they share a storage, as long as that lives."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


_TableOf = Callable[[torch.Tensor], RowTable | None]


def _look_up_embedding(
    table_of: _TableOf, weight: torch.Tensor, ids: torch.Tensor, *_: Any, **__: Any
) -> Any:
    table = table_of(weight)
    return None if table is None else table.look_up(ids)


def _look_up_indices(table_of: _TableOf, weight: torch.Tensor, indices: Any) -> Any:
    table = table_of(weight)
    by_rows = len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.int64
    return table.look_up(indices[0]) if table is not None and by_rows else None


def _select_rows(table_of: _TableOf, weight: torch.Tensor, dim: int, ids: torch.Tensor) -> Any:
    table = table_of(weight)
    return table.look_up(ids) if table is not None and dim == 0 else None


def _multiply(table_of: _TableOf, x: torch.Tensor, weight: torch.Tensor) -> Any:
    table = table_of(weight)
    if table is None:
        return None
    transposed = weight.shape == (table.features, table.rows)
    if not transposed and weight.shape != (table.rows, table.features):
        return None
    return table.multiply_by_head(x, transposed)


def _multiply_and_add(
    table_of: _TableOf, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **scales: Any
) -> Any:
    product = _multiply(table_of, x, weight)
    return None if product is None or scales else product + bias


_RULES: dict[Any, Callable[..., Any]] = {
    aten.embedding.default: _look_up_embedding,
    aten.index.Tensor: _look_up_indices,
    aten.index_select.default: _select_rows,
    aten.mm.default: _multiply,
    aten.addmm.default: _multiply_and_add,
}
