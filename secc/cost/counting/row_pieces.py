"""Counts the pieces in which ranks of context parallelism share the rows of a vision tower, and what
attention exchanges then.

Layers of such a tower take patches [patches, width] and the cumulative lengths of pieces, and compute
attention inside each piece: a frame, a picture or a window. Each rank gets whole pieces of the first layer
(`secc.runtime.context_parallel.row_mode`). A later layer with as many pieces or more exchanges nothing. A
layer with fewer pieces (whole frames after windows) exchanges keys and values of those that two ranks share:
at most one for each border between ranks.

Layers of other towers take frames as entries of a batch [entries, rows, width]. Ranks can have whole entries
then, too; how many there are is counted for any layer, and compared with the number of samples later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from secc.cost.counting.fused_attention import has_no_values
from secc.runtime.context_parallel.row_mode import ends_of_pieces, find_batched_state, find_hidden_state


class RowPieces:
    """Totals of the attention in layers, while a block runs once.

    exchanged, queries: bytes of keys and values, and of queries and results, of all layers. calls: how often
    they attend. Each may only grow; layers that are counted without running add theirs.
    """

    def __init__(self) -> None:
        self.exchanged = self.queries = self.calls = 0
        self.pieces = 0  # of the first layer; 0 without cumulative lengths
        self.parts = 0  # to which layers attend that attend to fewer
        self.entries = 0  # of the batch of the first layer's hidden states; 0 if they have no such dim
        self.bytes_before_layers = 0  # kept for the backward
        self._inside = [0, 0]  # of `exchanged` and `queries`, in layers that attend within pieces
        self._depth = 0
        self._is_first = True
        self._start = (0, 0, 0)

    @property
    def exchanged_between_ranks(self) -> int:
        """Bytes of keys and values of the layers that attend to more than one piece."""
        return self.exchanged - self._inside[0]

    @property
    def exchangeable_queries(self) -> int:
        """Bytes of queries and results of the layers that attend to more than one piece."""
        return self.queries - self._inside[1]

    @contextmanager
    def watch_layers(self, layers: Sequence[nn.Module], kept_bytes: Any) -> Iterator[None]:
        """Count within the context, in which `layers` run. kept_bytes: returns the bytes kept so far for the
        backward."""

        def begin_layer(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._depth:
                if self._is_first:
                    self.pieces, self._is_first = _count_pieces(args, kwargs), False
                    batched = find_batched_state(args, kwargs)[1]
                    self.entries = 0 if batched is None else batched.shape[0]
                    self.bytes_before_layers = kept_bytes() if self.pieces or self.entries else 0
                self._start = (self.exchanged, self.queries, self.calls)
            self._depth += 1

        def end_layer(*_: Any) -> None:
            self._depth -= 1
            calls = self.calls - self._start[2]
            if self._depth or not self.pieces or not calls:
                return
            if calls >= self.pieces:
                self._inside[0] += self.exchanged - self._start[0]
                self._inside[1] += self.queries - self._start[1]
            else:
                self.parts = min(self.parts or calls, calls)

        hooks: list[RemovableHandle] = []
        for layer in layers:
            hooks.append(layer.register_forward_pre_hook(begin_layer, with_kwargs=True))
            hooks.append(layer.register_forward_hook(end_layer, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _count_pieces(args: Any, kwargs: Any) -> int:
    """The pieces of a layer's rows [rows, width] that end where an argument says; 0 if none does."""
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        _, hidden = find_hidden_state(args, kwargs)
        known = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and not has_no_values(t)]
        return 0 if hidden is None else len(ends_of_pieces(hidden, known))
