"""One run of a user's block without values or weights: FLOPs, bytes saved for backward, bytes moved,
operations.

A block runs on the meta device, where tensors are that it makes without naming a device, too: elsewhere they
could not meet the others. Those that it has from elsewhere (attributes that are no buffers, NumPy) lose their
values when they meet others. One that reads values of its integer arguments (where samples begin, grids of
images) gets those for real and everything else as fake tensors.

Beside what a plain run keeps, a trial tells what one keeps whose units (`secc.runtime.sections.recompute`)
run again in the backward: their inputs and what is saved outside of them. Attention counts as a fused kernel
does: it keeps queries, keys, values, output and a log-sum, never the square of scores. A truth value that the
block reads off an input counts as true, which for masks means no padding; any other value that is read makes
the run fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from secc.cost.counting.liveness import LiveBytesTracker
from secc.cost.counting.repeated_layers import OpCounts, skip_repeated_layers
from secc.cost.counting.saved_tensors import SavedTensorsTracker, storage_key
from secc.cost.model.gemm_efficiency import DEFAULT_EFFICIENCY, GemmEfficiency
from secc.runtime.recorder import meta_rules
from secc.runtime.recorder.block_results import contiguous_strides, new_fake_tensor
from secc.runtime.recorder.glue_ops import grouped_mm_result

FREE_OPS = frozenset(
    {"_unsafe_view", "new_empty", "empty", "empty_like", "empty_strided"}
)  # operations that neither compute nor move
GATHER_OPS = frozenset(
    {"embedding", "index", "index_select", "gather"}
)  # they read what they give, not all of their operand
GROUPED_MM = torch.ops.aten._grouped_mm.default
ACTIVATION_PRODUCT_DIM = (
    128  # the smallest dim of products between activations, as in attention that is spelt out
)


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of `aten._grouped_mm`, which torch's counter does not know: each row, column or term of a sum
    belongs to one group."""
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


FLOP_FORMULAS: dict[Any, Callable[..., int]] = {**flop_registry, torch.ops.aten._grouped_mm: _grouped_flops}


@dataclass(frozen=True)
class BlockCounts:
    """What one forward took: FLOPs, of which products of matrices and `attention`, in hundredths of FLOPs of
    large products too (`work`, `attention_work`); bytes saved for backward; bytes that operations other than
    those move; the number of operations.

    With units that run again: the bytes `kept` until the backward, the bytes that one unit's second run adds
    (`working`), and the work and bytes moved of all second runs (`again`, `again_moved`). `narrow` is the
    smallest fixed dim of the products that take longest. `in_turn`: each unit ran once at most, in the order
    in which they stand.

    Without a backward, `live` are the bytes that the block had made and still held after each operation.
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

    @property
    def peak(self) -> int:
        """The most bytes that the block had made and still held."""
        return max(self.live_bytes, default=0)


def run_on_meta(
    module: nn.Module,
    arguments: Callable[[ValuelessTensors], tuple[list[Any], dict[str, Any]]],
    grad: bool,
    units: Sequence[nn.Module] = (),
    makes: ValuelessTensors | None = None,
    efficiency: GemmEfficiency = DEFAULT_EFFICIENCY,
    owes: bool | None = None,
) -> BlockCounts:
    """Run `module` on copies of its parameters and buffers that have no values. Raises whatever the block
    raises then.

    `arguments` makes the call's arguments with what makes tensors here. `units` are the modules inside the
    block, or itself, that may run again. Trials of one module may share `makes`, which decides whether
    integer arguments have values. `owes`: whether a backward follows, by default where `grad` is on.
    """
    makes = makes or ValuelessTensors()
    state = _valueless_state(module, makes)
    args, kwargs = arguments(makes)
    owes = grad if owes is None else owes
    saved = SavedTensorsTracker(state, owes)
    live = None if owes else LiveBytesTracker([*state.values(), *_tensor_leaves((args, kwargs))])
    counter = _OpCounter(saved, makes, efficiency, live)
    fused = FusedAttentionMode(counter.count_attention, makes.make_contiguous)
    with (
        torch.set_grad_enabled(grad),
        saved_tensors_hooks(saved.pack_tensor, lambda t: t),
        saved.watch_units(units),
        skip_repeated_layers(units, counter, makes),
        makes.default_device(),
        fused,
        counter,
    ):
        functional_call(module, state, tuple(args), kwargs)
    return counter.block_counts(grad, saved.ran_in_order(units))


class ValuelessTensors:
    """Makes tensors without values: on the meta device, or, with `real`, fake ones, which may meet real ones.
    Parameters get one each. What a block makes by itself is on its device, or, with `real` or `own`, has
    values that it may read."""

    def __init__(self, real: bool = False, own: bool = False) -> None:
        self._own = own
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True) if real else None
        self._parameters: dict[nn.Parameter, torch.Tensor] = {}

    def __call__(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, grad: bool = False
    ) -> torch.Tensor:
        if self.fake_mode is None:
            return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=grad)
        made = new_fake_tensor(self.fake_mode, tuple(size), tuple(stride), dtype)
        return made.requires_grad_() if grad else made

    def make_contiguous(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without gaps."""
        return self(size, contiguous_strides(tuple(size)), dtype)

    def parameter_stand_in(self, parameter: nn.Parameter) -> torch.Tensor:
        """What stands for a parameter."""
        if parameter not in self._parameters:
            self._parameters[parameter] = self(
                parameter.size(), parameter.stride(), parameter.dtype, parameter.requires_grad
            )
        return self._parameters[parameter]

    def default_device(self) -> AbstractContextManager[object]:
        """While a block runs: makes what it makes without naming a device."""
        return self.device if self.fake_mode is None and not self._own else nullcontext()

    @property
    def device(self) -> torch.device:
        return torch.device("meta" if self.fake_mode is None else "cpu")


def _valueless_state(module: nn.Module, makes: ValuelessTensors) -> dict[str, torch.Tensor]:
    """A tensor without values for each parameter, one for each name, tied names sharing one; buffers keep
    values that they have."""
    state = {
        name: makes.parameter_stand_in(parameter)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    for name, tensor in module.named_buffers(remove_duplicate=False):
        keeps = makes.fake_mode is not None and not tensor.is_meta
        state[name] = (
            tensor.detach().clone() if keeps else makes(tensor.size(), tensor.stride(), tensor.dtype)
        )
    return state


class _OpCounter(TorchDispatchMode):
    """Counts operations and, by torch's own formulas, their FLOPs.

    The layers of a stack repeat the same operations, and torch computes shapes slowly, so the shapes of
    results are remembered.
    """

    def __init__(
        self,
        saved: SavedTensorsTracker,
        makes: ValuelessTensors,
        efficiency: GemmEfficiency,
        live: LiveBytesTracker | None,
    ) -> None:
        super().__init__()
        self._saved, self._tensors, self._efficiency, self._live = saved, makes, efficiency, live
        self._flops, self._recomputed_flops = (
            Counter[int](),
            Counter[int](),
        )  # of products by their smallest fixed dim
        self.attention = self._recomputed_attention = self._moved = self._recomputed_moved = self._ops = 0
        self._last_was_attention = False
        self._known_results: dict[object, tuple[int, list[_ResultLayout]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
            made = [self._tensors(size, stride, dtype) for size, stride, dtype in layouts]
            out = made[0] if len(made) == 1 else tuple(made)
        else:
            out, args = self._run_on_one_device(func, args, kwargs)
            formula = FLOP_FORMULAS.get(func._overloadpacket)
            flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
            if key is not None and _returns_new_tensors(func, out, args):
                made = out if isinstance(out, tuple) else (out,)
                self._known_results[key] = flops, [(t.size(), t.stride(), t.dtype) for t in made]
        self._count_op(func._opname, flops, args, out)
        return out

    def _run_on_one_device(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An operation's result, and the arguments that it was made of: real tensors cannot meet those on the
        meta device."""
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
        """A product's FLOPs, or the bytes that another operation reads and writes."""
        if flops:
            dim = self._narrowest_dim(name, args)
            self._flops[dim] += flops
            self._recomputed_flops[dim] += flops if self._saved.is_inside_unit else 0
            return
        read = _tensor_leaves(out) if name in GATHER_OPS else _tensor_leaves(args)
        size = sum(t.numel() * t.element_size() for t in (*read, *_tensor_leaves(out)) if has_no_values(t))
        self._moved += size
        self._recomputed_moved += size if self._saved.is_inside_unit else 0

    def _narrowest_dim(self, name: str, args: Any) -> int:
        """The smallest dim of the weight of a product, of one expert's where they are stacked; `HEAD` for
        products without a weight."""
        operands = list(_tensor_leaves(args))
        weights = [t for t in operands if t.ndim > 1 and self._saved.is_parameter_or_buffer(t)]
        if weights:
            weight = weights[0]
            if name == "_grouped_mm":
                return min(weight.shape[-2:])
            return (
                min(weight.shape[0], weight.numel() // weight.shape[0])
                if weight.ndim > 2
                else min(weight.shape)
            )
        return ACTIVATION_PRODUCT_DIM

    def count_attention(self, flops: int) -> None:
        """Attention in one kernel; pieces with nothing between them, such as packed samples, are one
        operation."""
        self.attention += flops
        self._recomputed_attention += flops if self._saved.is_inside_unit else 0
        self._ops += not self._last_was_attention
        self._last_was_attention = True

    def snapshot_counts(self) -> OpCounts:
        """What was counted so far."""
        flat = (
            self.attention,
            self._recomputed_attention,
            self._moved,
            self._recomputed_moved,
            self._ops,
            self._saved.saved_bytes,
            self._saved.bytes_kept_outside_units(),
        )
        return OpCounts(Counter(self._flops), Counter(self._recomputed_flops), flat)

    def add_counts(self, more: OpCounts) -> None:
        """Count what a layer does that is like one that ran."""
        self._flops += more.flops
        self._recomputed_flops += more.recomputed_flops
        attention, again, moved, again_moved, ops, saved, kept = more.totals
        self.attention, self._recomputed_attention = (
            self.attention + attention,
            self._recomputed_attention + again,
        )
        self._moved, self._recomputed_moved, self._ops = (
            self._moved + moved,
            self._recomputed_moved + again_moved,
            self._ops + ops,
        )
        self._saved.add_repeated_layer(saved, kept)

    def block_counts(self, grad: bool, in_turn: bool) -> BlockCounts:
        """What was counted."""
        table, saved = self._efficiency, self._saved
        work = sum(table.equivalent_work(n, dim) for dim, n in self._flops.items())
        again = sum(
            table.equivalent_work(n, dim) for dim, n in self._recomputed_flops.items()
        ) + table.equivalent_attention_work(self._recomputed_attention)
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
            ops=self._ops,
            narrowest_dim=max(
                self._flops, key=lambda dim: table.equivalent_work(self._flops[dim], dim), default=0
            ),
            units_in_order=in_turn,
            live_bytes=() if self._live is None else (*self._live.bytes_after_op,),
        )


def _run_op(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation."""
    if func is GROUPED_MM:  # torch's rule for products of experts takes bfloat16 only
        return grouped_mm_result(*args[:3], **kwargs)
    return meta_rules.run_with_rule(func, args, kwargs)


def _tensor_leaves(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


_ResultLayout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _shape_key(value: Any) -> Any:
    """What decides the shapes that an operation returns, or None where that is not plain data."""
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
    """Whether an operation's results are new tensors on the meta device: it neither writes to nor returns its
    arguments."""
    made = out if isinstance(out, tuple) else (out,)
    if (
        func._schema.is_mutable
        or not all(isinstance(t, torch.Tensor) and has_no_values(t) for t in made)
        or len(made) == 0
    ):
        return False
    given = {storage_key(a) for a in args if isinstance(a, torch.Tensor)}
    return not any(storage_key(t) in given for t in made) and (len(made) > 1 or out is made[0])
