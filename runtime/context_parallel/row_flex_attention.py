"""Flex attention on the rows of several ranks: a rank's queries attend to the keys and values of all ranks,
which are gathered in one exchange for each call.

`score_mod` and `mask_mod` get the places of a rank's queries in the whole sequence, and kernels a block mask
of these queries. Where the two functions read tensors of rows (a gate by position), these are gathered
before, since places are those of whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from secc.runtime.context_parallel.row_marks import mark_of, marked_tensors, set_mark
from secc.runtime.model.flex_attention import attend_flexibly, is_single_block, make_block_mask

if TYPE_CHECKING:
    from secc.runtime.context_parallel.row_mode import RowMode

_Mod = Callable[..., torch.Tensor]


def flex_attention_rule(mode: RowMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs flex attention on query rows [samples, heads, rows, width]; all three results are rows, too."""
    query, key, value, score_mod, block_mask, scale, options = args
    mark = mark_of(query)
    if mark is None or mark.dim != query.ndim - 2 or not mark.is_plain or _is_mask_of_blocks(block_mask):
        mode.count_gathered("flex_attention")
        query, key, value = mode.gather([query, key, value], contiguous=True)
        reads = _WholeReads(mode, score_mod, block_mask[-1], query)
        block_mask = (*block_mask[:-1], reads.with_whole_reads(block_mask[-1]))
        return attend_flexibly(
            query, key, value, reads.with_whole_reads(score_mod), block_mask, scale, options
        )
    key, value = mode.gather([key, value])
    reads = _WholeReads(mode, score_mod, block_mask[-1], query)
    rows = query.shape[-2]
    places = mark.entries(mode.group.index, query.device)
    if not rows:
        # What was gathered takes part in the exchange of gradients. A query is added, and left out below.
        query = torch.cat((query, query.new_zeros(*query.shape[:2], 1, query.shape[-1])), -2)
        places = places.new_zeros(1)
    score_mod, mask_mod = reads.with_whole_reads(score_mod), reads.with_whole_reads(block_mask[-1])

    def score_at_places(score: Any, sample: Any, head: Any, row: Any, column: Any) -> torch.Tensor:
        return score_mod(score, sample, head, places[row], column)

    def mask_at_places(sample: Any, head: Any, row: Any, column: Any) -> torch.Tensor:
        return mask_mod(sample, head, places[row], column)

    own_mask = make_block_mask(block_mask, mask_at_places, query, key)
    outs = attend_flexibly(query, key, value, score_at_places, own_mask, scale, options)
    # On GPUs, what was not asked for is empty.
    return tuple(set_mark(t.narrow(2, 0, rows), mark) if t.numel() else t for t in outs)


def _is_mask_of_blocks(block_mask: tuple[Any, ...]) -> bool:
    """Whether blocks alone may say where queries attend: the mask was made without a function."""
    from torch.nn.attention.flex_attention import noop_mask

    return block_mask[-1] is noop_mask and not is_single_block(block_mask)


class _WholeReads(TorchFunctionMode):
    """Gives `score_mod` and `mask_mod` whole tensors where they read tensors of rows.

    Both are called once for one score, to find and gather what they read: inside `torch.vmap`, nothing can be
    exchanged.
    """

    def __init__(self, mode: RowMode, score_mod: _Mod, mask_mod: _Mod, query: torch.Tensor) -> None:
        super().__init__()
        self._row_mode, self._whole = mode, dict[int, tuple[torch.Tensor, torch.Tensor]]()
        zero = torch.zeros((), dtype=torch.int64, device=query.device)
        with self:
            score_mod(query.new_zeros((), dtype=torch.float32), zero, zero, zero, zero)
            mask_mod(zero, zero, zero, zero)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named: dict[str, Any] = dict(kwargs or {})
        found = list(marked_tensors((args, named)))
        if not found:
            return func(*args, **named)
        for tensor in found:
            if id(tensor) not in self._whole:
                (whole,) = self._row_mode.gather([tensor])
                self._whole[id(tensor)] = tensor, whole

        def take_whole(value: Any) -> Any:
            return self._whole[id(value)][1] if id(value) in self._whole else value

        args, named = tree_map(take_whole, (args, named))
        return func(*args, **named)

    def with_whole_reads(self, mod: _Mod) -> _Mod:
        """Returns the function, reading whole tensors; as it is where it reads no rows."""
        if not self._whole:
            return mod

        def run(*args: Any) -> torch.Tensor:
            with self:
                return mod(*args)

        return run
