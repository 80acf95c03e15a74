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

from secc.cost.counting.fused_attention import FusedAttention, valueless
from secc.cost.counting.liveness import Live
from secc.cost.counting.repeated_layers import Counted, alike
from secc.cost.counting.saved_tensors import Saved, storage
from secc.cost.model.gemm_efficiency import DEFAULT, Efficiency
from secc.runtime.recorder import meta_rules
from secc.runtime.recorder.block_results import dense, fresh
from secc.runtime.recorder.glue_ops import grouped_mm

NOTHING = frozenset(
    {"_unsafe_view", "new_empty", "empty", "empty_like", "empty_strided"}
)  # operations that neither compute nor move
GATHERS = frozenset(
    {"embedding", "index", "index_select", "gather"}
)  # they read what they give, not all of their operand
GROUPED = torch.ops.aten._grouped_mm.default
HEAD = 128  # the smallest dim of products between activations, as in attention that is spelt out


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of `aten._grouped_mm`, which torch's counter does not know: each row, column or term of a sum
    belongs to one group."""
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


FORMULAS: dict[Any, Callable[..., int]] = {**flop_registry, torch.ops.aten._grouped_mm: _grouped_flops}


@dataclass(frozen=True)
class Trial:
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
    narrow: int
    in_turn: bool
    live: tuple[int, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes that the block had made and still held."""
        return max(self.live, default=0)


def run(
    module: nn.Module,
    arguments: Callable[[Makes], tuple[list[Any], dict[str, Any]]],
    grad: bool,
    units: Sequence[nn.Module] = (),
    makes: Makes | None = None,
    efficiency: Efficiency = DEFAULT,
    owes: bool | None = None,
) -> Trial:
    """Run `module` on copies of its parameters and buffers that have no values. Raises whatever the block
    raises then.

    `arguments` makes the call's arguments with what makes tensors here. `units` are the modules inside the
    block, or itself, that may run again. Trials of one module may share `makes`, which decides whether
    integer arguments have values. `owes`: whether a backward follows, by default where `grad` is on.
    """
    makes = makes or Makes()
    state = _state(module, makes)
    args, kwargs = arguments(makes)
    owes = grad if owes is None else owes
    saved = Saved(state, owes)
    live = None if owes else Live([*state.values(), *_tensors((args, kwargs))])
    counter = _Counter(saved, makes, efficiency, live)
    fused = FusedAttention(counter.attend, makes.empty)
    with (
        torch.set_grad_enabled(grad),
        saved_tensors_hooks(saved.pack, lambda t: t),
        saved.watching(units),
        alike(units, counter, makes),
        makes.factories(),
        fused,
        counter,
    ):
        functional_call(module, state, tuple(args), kwargs)
    return counter.trial(grad, saved.in_turn(units))


class Makes:
    """Makes tensors without values: on the meta device, or, with `real`, fake ones, which may meet real ones.
    Parameters get one each. What a block makes by itself is on its device, or, with `real` or `own`, has
    values that it may read."""

    def __init__(self, real: bool = False, own: bool = False) -> None:
        self._own = own
        self.mode = FakeTensorMode(allow_non_fake_inputs=True) if real else None
        self._parameters: dict[nn.Parameter, torch.Tensor] = {}

    def __call__(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, grad: bool = False
    ) -> torch.Tensor:
        if self.mode is None:
            return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=grad)
        made = fresh(self.mode, tuple(size), tuple(stride), dtype)
        return made.requires_grad_() if grad else made

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without gaps."""
        return self(size, dense(tuple(size)), dtype)

    def like(self, parameter: nn.Parameter) -> torch.Tensor:
        """What stands for a parameter."""
        if parameter not in self._parameters:
            self._parameters[parameter] = self(
                parameter.size(), parameter.stride(), parameter.dtype, parameter.requires_grad
            )
        return self._parameters[parameter]

    def factories(self) -> AbstractContextManager[object]:
        """While a block runs: makes what it makes without naming a device."""
        return self.device if self.mode is None and not self._own else nullcontext()

    @property
    def device(self) -> torch.device:
        return torch.device("meta" if self.mode is None else "cpu")


def _state(module: nn.Module, makes: Makes) -> dict[str, torch.Tensor]:
    """A tensor without values for each parameter, one for each name, tied names sharing one; buffers keep
    values that they have."""
    state = {
        name: makes.like(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    for name, tensor in module.named_buffers(remove_duplicate=False):
        keeps = makes.mode is not None and not tensor.is_meta
        state[name] = (
            tensor.detach().clone() if keeps else makes(tensor.size(), tensor.stride(), tensor.dtype)
        )
    return state


class _Counter(TorchDispatchMode):
    """Counts operations and, by torch's own formulas, their FLOPs.

    The layers of a stack repeat the same operations, and torch computes shapes slowly, so the shapes of
    results are remembered.
    """

    def __init__(self, saved: Saved, makes: Makes, efficiency: Efficiency, live: Live | None) -> None:
        super().__init__()
        self._saved, self._makes, self._efficiency, self._live = saved, makes, efficiency, live
        self._flops, self._again_by = (
            Counter[int](),
            Counter[int](),
        )  # of products by their smallest fixed dim
        self.attention = self._attention_again = self._moved = self._again_moved = self._ops = 0
        self._attending = False
        self._known: dict[object, tuple[int, list[_Layout]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._run(func, args, kwargs or {})
        if self._live is not None and not func.is_view:
            self._live.add(t for t in _tensors(out) if valueless(t))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.is_view or func.namespace == "prim" or func._opname in NOTHING:
            return _ran(func, args, kwargs)
        self._ops, self._attending = self._ops + 1, False
        key = _key((func, args, kwargs))
        if key in self._known:
            flops, layouts = self._known[key]
            made = [self._makes(size, stride, dtype) for size, stride, dtype in layouts]
            out = made[0] if len(made) == 1 else tuple(made)
        else:
            out, args = self._met(func, args, kwargs)
            formula = FORMULAS.get(func._overloadpacket)
            flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
            if key is not None and _is_fresh(func, out, args):
                made = out if isinstance(out, tuple) else (out,)
                self._known[key] = flops, [(t.size(), t.stride(), t.dtype) for t in made]
        self._add(func._opname, flops, args, out)
        return out

    def _met(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An operation's result, and the arguments that it was made of: real tensors cannot meet those on the
        meta device."""
        try:
            return _ran(func, args, kwargs), args
        except (RuntimeError, NotImplementedError):
            if (
                self._makes.mode is not None
                or func._schema.is_mutable
                or all(map(valueless, _tensors((args, kwargs))))
            ):
                raise
        args, kwargs = tree_map_only(
            torch.Tensor, lambda t: t if valueless(t) else t.detach().to("meta"), (args, kwargs)
        )
        return _ran(func, args, kwargs), args

    def _add(self, name: str, flops: int, args: Any, out: Any) -> None:
        """A product's FLOPs, or the bytes that another operation reads and writes."""
        if flops:
            dim = self._narrow(name, args)
            self._flops[dim] += flops
            self._again_by[dim] += flops if self._saved.inside else 0
            return
        read = _tensors(out) if name in GATHERS else _tensors(args)
        size = sum(t.numel() * t.element_size() for t in (*read, *_tensors(out)) if valueless(t))
        self._moved += size
        self._again_moved += size if self._saved.inside else 0

    def _narrow(self, name: str, args: Any) -> int:
        """The smallest dim of the weight of a product, of one expert's where they are stacked; `HEAD` for
        products without a weight."""
        operands = list(_tensors(args))
        weights = [t for t in operands if t.ndim > 1 and self._saved.is_state(t)]
        if weights:
            weight = weights[0]
            if name == "_grouped_mm":
                return min(weight.shape[-2:])
            return (
                min(weight.shape[0], weight.numel() // weight.shape[0])
                if weight.ndim > 2
                else min(weight.shape)
            )
        return HEAD

    def attend(self, flops: int) -> None:
        """Attention in one kernel; pieces with nothing between them, such as packed samples, are one
        operation."""
        self.attention += flops
        self._attention_again += flops if self._saved.inside else 0
        self._ops += not self._attending
        self._attending = True

    def state(self) -> Counted:
        """What was counted so far."""
        flat = (
            self.attention,
            self._attention_again,
            self._moved,
            self._again_moved,
            self._ops,
            self._saved.bytes,
            self._saved.kept(),
        )
        return Counted(Counter(self._flops), Counter(self._again_by), flat)

    def add(self, more: Counted) -> None:
        """Count what a layer does that is like one that ran."""
        self._flops += more.flops
        self._again_by += more.again
        attention, again, moved, again_moved, ops, saved, kept = more.flat
        self.attention, self._attention_again = self.attention + attention, self._attention_again + again
        self._moved, self._again_moved, self._ops = (
            self._moved + moved,
            self._again_moved + again_moved,
            self._ops + ops,
        )
        self._saved.add_alike(saved, kept)

    def trial(self, grad: bool, in_turn: bool) -> Trial:
        """What was counted."""
        table, saved = self._efficiency, self._saved
        work = sum(table.work(n, dim) for dim, n in self._flops.items())
        again = sum(table.work(n, dim) for dim, n in self._again_by.items()) + table.attention_work(
            self._attention_again
        )
        return Trial(
            flops=sum(self._flops.values()) + self.attention,
            attention=self.attention,
            work=work,
            attention_work=table.attention_work(self.attention),
            moved=self._moved,
            saved=saved.bytes if grad else 0,
            kept=saved.kept() if grad else 0,
            working=saved.working() if grad else 0,
            again=again if grad else 0,
            again_moved=self._again_moved if grad else 0,
            ops=self._ops,
            narrow=max(self._flops, key=lambda dim: table.work(self._flops[dim], dim), default=0),
            in_turn=in_turn,
            live=() if self._live is None else (*self._live.bytes,),
        )


def _ran(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation."""
    if func is GROUPED:  # torch's rule for products of experts takes bfloat16 only
        return grouped_mm(*args[:3], **kwargs)
    return meta_rules.run(func, args, kwargs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _key(value: Any) -> Any:
    """What decides the shapes that an operation returns, or None where that is not plain data."""
    match value:
        case torch.Tensor():
            return (value.size(), value.stride(), value.dtype) if valueless(value) else None
        case list() | tuple():
            parts = tuple(_key(v) for v in value)
            return None if any(p is None for p in parts) else parts
        case dict():
            return _key(tuple(value.items()))
        case None:
            return "None"
        case _:
            return (type(value), value) if value.__hash__ is not None else None


def _is_fresh(func: Any, out: Any, args: Any) -> bool:
    """Whether an operation's results are new tensors on the meta device: it neither writes to nor returns its
    arguments."""
    made = out if isinstance(out, tuple) else (out,)
    if (
        func._schema.is_mutable
        or not all(isinstance(t, torch.Tensor) and valueless(t) for t in made)
        or len(made) == 0
    ):
        return False
    given = {storage(a) for a in args if isinstance(a, torch.Tensor)}
    return not any(storage(t) in given for t in made) and (len(made) > 1 or out is made[0])
