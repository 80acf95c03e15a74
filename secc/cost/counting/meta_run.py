"""Runs a user's block once without values or weights, and counts FLOPs, saved bytes, moved bytes and
operations.

The block runs on the meta device. Tensors that it creates without naming a device are created there too,
because they could not be combined with the others otherwise. Tensors from elsewhere (attributes that are not
buffers, NumPy) lose their values when they are combined with meta tensors. A block that reads values of
integer arguments (boundaries of packed samples, image grids) gets these as real tensors and everything else
as fake tensors.

In addition to a plain run, the counts say what a run keeps if its units (`secc.runtime.sections.recompute`)
are recomputed in the backward: their inputs, and what is saved outside of them. Attention counts as one fused
kernel, which keeps queries, keys, values, output and a log-sum, never the scores. The truth value of a tensor
without values is true, which for masks means no padding. Reading any other value makes the run fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from secc.cost.counting.fused_attention import FusedAttentionMode, has_no_values
from secc.cost.counting.repeated_layers import OpCounts, skip_repeated_layers
from secc.cost.counting.row_pieces import RowPieces
from secc.cost.counting.saved_tensors import SavedTensorsTracker
from secc.cost.model.gemm_efficiency import DEFAULT_EFFICIENCY, GemmEfficiency
from secc.cost.model.live_bytes import LiveBytesTracker, storage_key
from secc.runtime.recorder import meta_rules
from secc.runtime.recorder.block_results import contiguous_strides, new_fake_tensor
from secc.runtime.recorder.glue_ops import grouped_mm_result

# Operations that neither compute nor move bytes.
FREE_OPS = frozenset({"_unsafe_view", "new_empty", "empty", "empty_like", "empty_strided"})
# Operations that read as many bytes as they return, not all of their operand.
GATHER_OPS = frozenset({"embedding", "index", "index_select", "gather"})
GROUPED_MM = torch.ops.aten._grouped_mm.default
# Assumed smallest dimension of products between activations, such as in unfused attention.
ACTIVATION_PRODUCT_DIM = 128


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of `aten._grouped_mm`, which torch's counter does not know. Each row (or column, or summand)
    belongs to one group only."""
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


FLOP_FORMULAS: dict[Any, Callable[..., int]] = {**flop_registry, torch.ops.aten._grouped_mm: _grouped_flops}


@dataclass(frozen=True)
class BlockCounts:
    """Counts of one forward of a block.

    flops: all FLOPs. attention: those inside fused attention. routed: those of grouped products (experts).
    work, attention_work, routed_work: the same in hundredths of FLOPs of large products; `work` excludes
        attention.
    moved: bytes moved by operations other than products. saved: bytes kept for backward. ops: operations
        issued.
    kept: bytes kept for backward if all units are recomputed. working: additional bytes of one second run.
    again, again_moved: work and bytes moved of all second runs. unneeded: work of products at the ends of
        units, after all that their backwards need: second runs stop before them.
    narrowest_dim: smallest weight dimension of the products that take most time.
    units_in_order: each unit ran at most once, in the order of declaration, and no other code took its
        parameters.
    exchanged: bytes of keys and values, each head once, that layers attend to and that ranks may have to
        exchange. queries: those of queries and results. key_heads: heads of keys, the largest common divisor.
    pieces: pieces of rows of the first layer, if ranks get whole ones; layers that attend within them
        exchange nothing. parts: the pieces, fewer and larger, to which all other layers attend. Both 0
        without pieces. entries: of the batch of the first layer's hidden states, 0 without such a dim.
        unshared: bytes kept for backward before the first layer, if ranks can have whole pieces or entries.
    live_bytes: without a backward, the bytes allocated by the block after each operation.
    """

    flops: int
    attention: int
    work: int
    attention_work: int
    moved: int
    saved: int
    kept: int
    working: int
    again: int
    again_moved: int
    ops: int
    narrowest_dim: int
    units_in_order: bool
    live_bytes: tuple[int, ...] = ()
    routed: int = 0
    routed_work: int = 0
    unneeded: int = 0
    exchanged: int = 0
    queries: int = 0
    key_heads: int = 0
    pieces: int = 0
    parts: int = 0
    entries: int = 0
    unshared: int = 0

    @property
    def peak(self) -> int:
        """The most bytes that the block had allocated at once."""
        return max(self.live_bytes, default=0)


def run_on_meta(
    module: nn.Module,
    arguments: Callable[[ValuelessTensors], tuple[list[Any], dict[str, Any]]],
    grad: bool,
    units: Sequence[nn.Module] = (),
    tensors: ValuelessTensors | None = None,
    efficiency: GemmEfficiency = DEFAULT_EFFICIENCY,
    has_backward: bool | None = None,
) -> BlockCounts:
    """Run `module` on copies of its parameters and buffers that have no values. Raises whatever the block
    raises.

    arguments: creates the positional and keyword arguments from a `ValuelessTensors`.
    grad: run with gradients enabled. has_backward: a backward follows (default: `grad`).
    units: submodules (or the block itself) that recomputation may run again.
    tensors: may be shared by several runs of a module; decides whether integer arguments have values.
    efficiency: rates of products by shape.
    """
    tensors = tensors or ValuelessTensors()
    state = _valueless_state(module, tensors)
    args, kwargs = arguments(tensors)
    has_backward = grad if has_backward is None else has_backward
    saved = SavedTensorsTracker(state, has_backward)
    live = None if has_backward else LiveBytesTracker([*state.values(), *_tensor_leaves((args, kwargs))])
    counter = _OpCounter(saved, tensors, efficiency, live, _storages_of_units(module, units, tensors))
    fused = FusedAttentionMode(
        counter.count_attention,
        counter.count_exchanged,
        saved.is_parameter_or_buffer,
        tensors.make_contiguous,
    )
    with (
        torch.set_grad_enabled(grad),
        saved_tensors_hooks(saved.pack_tensor, lambda t: t),
        counter.pieces.watch_layers(units, saved.bytes_kept_outside_units),
        saved.watch_units(units),
        skip_repeated_layers(units, counter, tensors),
        tensors.default_device(),
        fused,
        counter,
    ):
        functional_call(module, state, tuple(args), kwargs)
    return counter.block_counts(grad, saved.ran_in_order(units) and not counter.read_unit_outside)


class ValuelessTensors:
    """Creates tensors without values: on the meta device, or, with `fake`, fake tensors, which can be
    combined with real ones. A parameter always gets the same stand-in.

    With `fake` or `values_inside`, tensors that a block creates itself have values that it may read.
    """

    def __init__(self, fake: bool = False, values_inside: bool = False) -> None:
        self._values_inside = values_inside
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        self._parameters: dict[nn.Parameter, torch.Tensor] = {}

    def __call__(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, grad: bool = False
    ) -> torch.Tensor:
        if self.fake_mode is None:
            return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=grad)
        tensor = new_fake_tensor(self.fake_mode, tuple(size), tuple(stride), dtype)
        return tensor.requires_grad_() if grad else tensor

    def make_contiguous(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Create a contiguous tensor."""
        return self(size, contiguous_strides(tuple(size)), dtype)

    def parameter_stand_in(self, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor that replaces a parameter."""
        if parameter not in self._parameters:
            self._parameters[parameter] = self(
                parameter.size(), parameter.stride(), parameter.dtype, parameter.requires_grad
            )
        return self._parameters[parameter]

    def default_device(self) -> AbstractContextManager[object]:
        """Context in which a block runs: the default device of tensors created without naming one."""
        return self.device if self.fake_mode is None and not self._values_inside else nullcontext()

    @property
    def device(self) -> torch.device:
        """The device of tensors created by this object."""
        return torch.device("meta" if self.fake_mode is None else "cpu")


def _valueless_state(module: nn.Module, tensors: ValuelessTensors) -> dict[str, torch.Tensor]:
    """Stand-ins for parameters and buffers by name. Names of a tied parameter share one; with fake
    tensors, buffers keep their values."""
    state = {
        name: tensors.parameter_stand_in(parameter)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    for name, tensor in module.named_buffers(remove_duplicate=False):
        if tensors.fake_mode is not None and not tensor.is_meta:
            state[name] = tensor.detach().clone()
        else:
            state[name] = tensors(tensor.size(), tensor.stride(), tensor.dtype)
    return state


def _storages_of_units(
    module: nn.Module, units: Sequence[nn.Module], tensors: ValuelessTensors
) -> frozenset[int]:
    """Storages of the parameters that units alone hold."""
    inside = {m for unit in units for m in unit.modules()}
    shared = {p for m in module.modules() if m not in inside for p in m.parameters(recurse=False)}
    own = {p for unit in units for p in unit.parameters()} - shared
    return frozenset(storage_key(tensors.parameter_stand_in(p)) for p in own)


class _OpCounter(TorchDispatchMode):
    """Counts operations and, by torch's own formulas, their FLOPs.

    Computing the shapes of results is slow in torch, and the layers of a stack repeat the same operations, so
    shapes are cached.
    """

    def __init__(
        self,
        saved: SavedTensorsTracker,
        tensors: ValuelessTensors,
        efficiency: GemmEfficiency,
        live: LiveBytesTracker | None,
        unit_storages: frozenset[int],
    ) -> None:
        super().__init__()
        self._unit_storages, self.read_unit_outside = unit_storages, False
        self._saved, self._tensors, self._efficiency, self._live = saved, tensors, efficiency, live
        # FLOPs of products by their smallest weight dimension.
        self._flops, self._recomputed_flops = Counter[int](), Counter[int]()
        self._routed_flops, self._unneeded_flops = Counter[int](), Counter[int]()
        # Products in the last run of a unit that nothing was saved after yet: FLOPs by dimension, and where.
        self._unsaved_flops, self._unsaved_place = Counter[int](), (0, 0)
        self.attention = self._recomputed_attention = self._moved = self._recomputed_moved = self._ops = 0
        self.pieces, self._key_heads = RowPieces(), 0
        self._last_was_attention = False
        self._known_results: dict[object, tuple[int, list[_ResultLayout]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._unit_storages and not self.read_unit_outside and not self._saved.is_inside_unit:
            taken = map(storage_key, _tensor_leaves((args, kwargs)))
            self.read_unit_outside = not self._unit_storages.isdisjoint(taken)
        out = self._run_and_count(func, args, kwargs or {})
        if self._live is not None and not func.is_view:
            self._live.record_results(t for t in _tensor_leaves(out) if has_no_values(t))
        return out

    def _run_and_count(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.is_view or func.namespace == "prim" or func._opname in FREE_OPS:
            return _run_op(func, args, kwargs)
        self._ops, self._last_was_attention = self._ops + 1, False
        key = _shape_key((func, args, kwargs))
        if key in self._known_results:
            flops, layouts = self._known_results[key]
            results = [self._tensors(size, stride, dtype) for size, stride, dtype in layouts]
            out = results[0] if len(results) == 1 else tuple(results)
        else:
            out, args = self._run_on_one_device(func, args, kwargs)
            formula = FLOP_FORMULAS.get(func._overloadpacket)
            flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
            if key is not None and _returns_new_tensors(func, out, args):
                results = out if isinstance(out, tuple) else (out,)
                self._known_results[key] = flops, [(t.size(), t.stride(), t.dtype) for t in results]
        self._count_op(func._opname, flops, args, out)
        return out

    def _run_on_one_device(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run an operation; if it mixes real and meta tensors, move the real ones to the meta device.
        Returns the result and the arguments used."""
        try:
            return _run_op(func, args, kwargs), args
        except (RuntimeError, NotImplementedError):
            if (
                self._tensors.fake_mode is not None
                or func._schema.is_mutable
                or all(map(has_no_values, _tensor_leaves((args, kwargs))))
            ):
                raise
        args, kwargs = tree_map_only(
            torch.Tensor, lambda t: t if has_no_values(t) else t.detach().to("meta"), (args, kwargs)
        )
        return _run_op(func, args, kwargs), args

    def _count_op(self, name: str, flops: int, args: Any, out: Any) -> None:
        """Count the FLOPs of a product, or the bytes that another operation reads and writes."""
        if flops:
            dim = self._narrowest_dim(name, args)
            self._flops[dim] += flops
            self._routed_flops[dim] += flops if name == "_grouped_mm" else 0
            if self._saved.is_inside_unit and name == "_grouped_mm":
                self._recomputed_flops[dim] += flops  # experts are priced by rows
            elif self._saved.is_inside_unit:
                self._settle_unsaved()
                self._unsaved_place = self._saved.place_in_unit()
                self._unsaved_flops[dim] += flops
            return
        read = _tensor_leaves(out) if name in GATHER_OPS else _tensor_leaves(args)
        size = sum(t.numel() * t.element_size() for t in (*read, *_tensor_leaves(out)) if has_no_values(t))
        self._moved += size
        self._recomputed_moved += size if self._saved.is_inside_unit else 0

    def _settle_unsaved(self) -> None:
        """Counts products that were not known to be needed again, once anything else happens."""
        if not self._unsaved_flops:
            return
        if self._saved.has_saved_after(self._unsaved_place):
            self._recomputed_flops += self._unsaved_flops
        elif self._unsaved_place != self._saved.place_in_unit() or not self._saved.is_inside_unit:
            self._unneeded_flops += self._unsaved_flops
        else:
            return  # more products after the same save
        self._unsaved_flops = Counter[int]()

    def _narrowest_dim(self, name: str, args: Any) -> int:
        """The smallest dimension of a product's weight (of one expert's, where weights are stacked).
        ACTIVATION_PRODUCT_DIM for products of activations."""
        operands = list(_tensor_leaves(args))
        weights = [t for t in operands if t.ndim > 1 and self._saved.is_parameter_or_buffer(t)]
        if weights:
            weight = weights[0]
            if name == "_grouped_mm":
                return min(weight.shape[-2:])
            if weight.ndim > 2:  # a convolution: all dimensions but the first are summed over
                return min(weight.shape[0], weight.numel() // weight.shape[0])
            return min(weight.shape)
        return ACTIVATION_PRODUCT_DIM

    def count_attention(self, flops: int) -> None:
        """Count FLOPs of fused attention. Consecutive calls, such as those of packed samples, are one
        operation."""
        self.attention += flops
        self._recomputed_attention += flops if self._saved.is_inside_unit else 0
        self._ops += not self._last_was_attention
        self._last_was_attention = True

    def count_exchanged(self, size: int, queries: int, heads: int) -> None:
        """Count bytes of keys and values, and of queries and results, of a layer, and heads of keys."""
        if self._saved.is_inside_unit:
            self.pieces.exchanged += size
            self.pieces.queries += queries
            self.pieces.calls += 1
            self._key_heads = gcd(self._key_heads, heads)

    def snapshot_counts(self) -> OpCounts:
        """The counts so far."""
        totals = (
            self.attention,
            self._recomputed_attention,
            self._moved,
            self._recomputed_moved,
            self._ops,
            self._saved.saved_bytes,
            self._saved.bytes_kept_outside_units(),
            self.pieces.exchanged,
            self.pieces.queries,
            self.pieces.calls,
        )
        needed, unneeded = Counter(self._recomputed_flops), Counter(self._unneeded_flops)
        if self._unsaved_flops:  # snapshots are taken between layers
            (needed if self._saved.has_saved_after(self._unsaved_place) else unneeded).update(
                self._unsaved_flops
            )
        return OpCounts(Counter(self._flops), needed, unneeded, Counter(self._routed_flops), totals)

    def add_counts(self, more: OpCounts) -> None:
        """Add the counts of a layer that is skipped because an equal one ran."""
        self._flops += more.flops
        self._recomputed_flops += more.recomputed_flops
        self._unneeded_flops += more.unneeded_flops
        self._routed_flops += more.routed_flops
        attention, recomputed_attention, moved, recomputed_moved, ops, saved, kept, *attended = more.totals
        self.attention += attention
        self._recomputed_attention += recomputed_attention
        self._moved += moved
        self._recomputed_moved += recomputed_moved
        self._ops += ops
        self.pieces.exchanged += attended[0]
        self.pieces.queries += attended[1]
        self.pieces.calls += attended[2]
        self._saved.add_repeated_layer(saved, kept)

    def block_counts(self, grad: bool, in_order: bool) -> BlockCounts:
        """Summarise the run."""
        table, saved = self._efficiency, self._saved
        ended = self.snapshot_counts()
        work = sum(table.equivalent_work(n, dim) for dim, n in self._flops.items())
        again = sum(table.equivalent_work(n, dim) for dim, n in ended.recomputed_flops.items())
        unneeded = sum(table.equivalent_work(n, dim) for dim, n in ended.unneeded_flops.items())
        again += table.equivalent_attention_work(self._recomputed_attention)
        return BlockCounts(
            flops=sum(self._flops.values()) + self.attention,
            attention=self.attention,
            work=work,
            attention_work=table.equivalent_attention_work(self.attention),
            moved=self._moved,
            saved=saved.saved_bytes if grad else 0,
            kept=saved.bytes_kept_outside_units() if grad else 0,
            working=saved.largest_unit_bytes() if grad else 0,
            again=again if grad else 0,
            again_moved=self._recomputed_moved if grad else 0,
            unneeded=unneeded if grad else 0,
            ops=self._ops,
            narrowest_dim=max(
                self._flops, key=lambda dim: table.equivalent_work(self._flops[dim], dim), default=0
            ),
            units_in_order=in_order,
            live_bytes=() if self._live is None else (*self._live.bytes_after_op,),
            routed=sum(self._routed_flops.values()),
            exchanged=self.pieces.exchanged_between_ranks,
            queries=self.pieces.exchangeable_queries,
            key_heads=self._key_heads,
            pieces=self.pieces.pieces,
            parts=self.pieces.parts,
            entries=self.pieces.entries,
            unshared=self.pieces.bytes_before_layers if grad else 0,
            routed_work=sum(table.equivalent_work(n, dim) for dim, n in self._routed_flops.items()),
        )


def _run_op(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one operation on tensors without values."""
    if func is GROUPED_MM:  # torch's meta rule accepts bfloat16 only
        return grouped_mm_result(*args[:3], **kwargs)
    return meta_rules.run_with_rule(func, args, kwargs)


def _tensor_leaves(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


_ResultLayout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _shape_key(value: Any) -> Any:
    """A key that determines the shapes of an operation's results, or None if an argument is not plain data
    or a tensor without values."""
    match value:
        case torch.Tensor():
            return (value.size(), value.stride(), value.dtype) if has_no_values(value) else None
        case list() | tuple():
            parts = tuple(_shape_key(v) for v in value)
            return None if any(p is None for p in parts) else parts
        case dict():
            return _shape_key(tuple(value.items()))
        case None:
            return "None"
        case _:
            return (type(value), value) if value.__hash__ is not None else None


def _returns_new_tensors(func: Any, out: Any, args: Any) -> bool:
    """Whether an operation neither writes to nor returns its arguments, and all results are tensors
    without values."""
    results = out if isinstance(out, tuple) else (out,)
    if (
        func._schema.is_mutable
        or not all(isinstance(t, torch.Tensor) and has_no_values(t) for t in results)
        or len(results) == 0
    ):
        return False
    arguments = {storage_key(a) for a in args if isinstance(a, torch.Tensor)}
    return not any(storage_key(t) in arguments for t in results) and (len(results) > 1 or out is results[0])
