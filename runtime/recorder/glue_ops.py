"""Running one op of the glue: for real on inputs, fake on what depends on blocks, and written to the tape.

Two things need care. A real tensor that a block's values are written into (`buffer[mask] = features`) has no
known values from then on, and neither has any view of it. And `fake[mask]` has no shape under fake tensors,
but a mask made of inputs has values that give it one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from secc.runtime.recorder import meta_rules
from secc.runtime.recorder.block_results import is_fake
from secc.runtime.recorder.graph_tape import Tape
from secc.runtime.recorder.recording import behind, read_value

aten = torch.ops.aten
Fail = Callable[[str, str], NoReturn]  # message, remedy

_VALUES = (
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.allclose.default,
)
_FILLED = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)
_SMALL = 1 << 20  # entries of a filled tensor that is worth its memory
_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_REMEDY = "compute it inside one of the model's modules, or from the inputs alone"


def tensors_of(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an op's arguments, which are values and lists of values."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [v for v in value if isinstance(v, torch.Tensor)]
    return found


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op writes into."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    marked = [
        given[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
    ]
    return [t for t in pytree.tree_leaves(marked) if isinstance(t, torch.Tensor)]


class Executor:
    """Executes ops on real and fake tensors. `fail(message, remedy)` raises for what depends on a block's
    values."""

    def __init__(self, mode: FakeTensorMode, fail: Fail) -> None:
        self._mode, self._fail = mode, fail
        self._unknown: dict[
            int, torch.UntypedStorage
        ] = {}  # storages whose values depend on blocks, by address of the handle

    def unknown(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values depend on blocks or parameters."""
        return is_fake(tensor) or (bool(self._unknown) and tensor.untyped_storage()._cdata in self._unknown)

    def forget(self, tensor: torch.Tensor) -> None:
        """The values of a tensor are random: a rank will have others."""
        if not is_fake(tensor):
            storage = tensor.untyped_storage()
            self._unknown[storage._cdata] = storage

    def fake(self, value: Any) -> Any:
        """A tensor, fake if its values are unknown; anything else as it is."""
        if isinstance(value, torch.Tensor) and not is_fake(value) and self.unknown(value):
            return self._mode.from_tensor(value)
        return value

    def execute_inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op inside a block, where nothing is recorded: filling a tensor in an unknown one's
        shape gives known values."""
        if func in _FILLED and self.unknown(args[0]) and args[0].numel() <= _SMALL:
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        return self.execute(func, args, kwargs)

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op."""
        args, kwargs = (
            pytree.tree_map(self.fake, (args, kwargs))
            if self._unknown and not func._schema.is_mutable
            else (args, kwargs)
        )
        targets = written(func, args, kwargs)
        if targets and any(map(self.unknown, tensors_of(args, kwargs))):
            return self._write(func, args, kwargs, targets)
        try:
            return self._run(func, args, kwargs)
        except _UNKNOWN as error:
            self._fail(
                f"{func} needs values that depend on a block's result ({type(error).__name__})", _REMEDY
            )

    def _write(self, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> Any:
        """Unknown values flow into `targets`: real ones become unknown and keep what they have."""
        if all(is_fake(t) for t in targets):
            return func(*args, **kwargs)
        for t in targets:
            self.forget(t)
        returned = len(func._schema.returns)
        return None if returned == 0 else targets[0] if returned == 1 else tuple(targets)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op; in place of those that fake tensors refuse though their shape is known, one that they
        take."""
        if func is aten._grouped_mm.default and any(is_fake(a) for a in args[:2]):
            return grouped_mm(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
        if func is aten.masked_select.default and is_fake(args[0]) and not is_fake(args[1]):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return aten.index.Tensor(
                args[0].expand(shape), list(args[1].expand(shape).nonzero(as_tuple=True))
            )
        if func is aten._pack_padded_sequence.default and is_fake(args[0]) and not self.unknown(args[1]):
            return _packed(args[0], args[1])
        if func is aten._ctc_loss.Tensor and is_fake(args[0]) and not self.unknown(args[3]):
            return _aligned(args[0], args[3])
        if func is not aten.index.Tensor:
            return meta_rules.run(func, args, kwargs)
        if any(i is not None and i.dtype in (torch.bool, torch.uint8) and self.unknown(i) for i in args[1]):
            self._fail("rows are chosen by a mask that depends on a block's result", _REMEDY)
        if not is_fake(args[0]):
            return func(*args, **kwargs)
        return func(args[0], [i for mask in args[1] for i in _indices(mask)])


def _packed(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A result of the shape of `aten._pack_padded_sequence`, whose lengths come from inputs: packed rows, and
    how many each step has."""
    steps = torch.arange(int(lengths.max()))[:, None]
    return x.new_empty([int(lengths.sum()), *x.shape[2:]]), (lengths > steps).sum(1)


def _aligned(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the shapes of `aten._ctc_loss` with labels of these lengths: each sample's loss, and what
    its backward keeps."""
    steps, samples = x.shape[:2]
    return x.new_empty([samples]), x.new_empty([samples, steps, 2 * int(lengths.max()) + 1])


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """A result of the shape of `aten._grouped_mm`, whose own rule takes bfloat16 only."""
    groups = (
        [offs.shape[0]]
        if offs is not None and a.ndim == b.ndim == 2
        else [a.shape[0]]
        if a.ndim == b.ndim == 3
        else []
    )
    return (a if is_fake(a) else b).new_empty([*groups, a.shape[-2], b.shape[-1]], dtype=a.dtype)


def _indices(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return list(index.nonzero(as_tuple=True))


class Glue:
    """Executes ops and writes them to a tape. `sizes`: a size that values of inputs decide is a value that
    Python reads."""

    def __init__(self, tape: Tape, executor: Executor, fail: Fail, sizes: bool = True) -> None:
        self.tape, self._executor, self._fail, self._sizes = tape, executor, fail, sizes

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One op: executed, recorded, its result bound to its node."""
        if func is aten.lift_fresh.default:
            self.tape.node(args[0])
            return args[0]
        if func is aten.copy.default:
            return self._copy(*args[:2])
        if (
            func is aten.squeeze.default
        ):  # which in a micro-batch of one sample would drop the samples' dim, too
            return self.run(
                aten.squeeze.dims, (args[0], [d for d, size in enumerate(args[0].shape) if size == 1]), {}
            )
        if func in _SCATTERS and args[0].is_complex():
            return self._scatter(func, args, kwargs)
        if not _returns_tensors(func):
            return self._value(func, args, kwargs) if func in _VALUES else func(*args, **kwargs)
        for tensor in written(func, args, kwargs):
            self._writable(tensor)
        nodes = self.tape.nodes(args), self.tape.nodes(kwargs)
        out = self._executor.execute(func, args, kwargs)
        self.tape.emit(func, *nodes, out)
        if self._sizes and torch.Tag.dynamic_output_shape in func.tags:
            self._sized(func, args, out)
        return out

    def _sized(self, func: Any, args: Any, out: Any) -> None:
        """An op whose result has as many rows as values decide: Python sees the number without a further
        op."""
        masks = [
            m
            for m in pytree.tree_leaves(args[1:])
            if isinstance(m, torch.Tensor) and m.dtype in (torch.bool, torch.uint8)
        ]
        first = out if isinstance(out, torch.Tensor) else out[0]
        if func is aten.index.Tensor and not masks:
            return
        if not self._executor.unknown(first):
            ones = self.run(aten.ones_like.default, (first,), {"dtype": torch.int64})
            self.read("size", self.run(aten.sum.default, (ones,), {}))
            return
        for mask in masks:
            if not self._executor.unknown(mask):
                self.run(aten.nonzero.default, (mask,), {})

    def read(self, kind: str, tensor: torch.Tensor) -> None:
        """Python looks at the values of a tensor."""
        self._readable(kind, tensor)
        node = self.tape.node(tensor)
        self.tape.read(kind, read_value(kind, tensor.detach()), [node])

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """`aten.copy` has no derivative; a cast and an expand have one."""
        if source.dtype != target.dtype:
            source = self.run(aten._to_copy.default, (source,), {"dtype": target.dtype})
        return self.run(aten.expand.default, (source, list(target.shape)), {})

    def _scatter(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Writing a part of a complex tensor has no derivative; writing its real and imaginary parts has
        one."""
        whole, part, *dim = args
        real = [self.run(aten.view_as_real.default, (t,), {}) for t in (whole, part.to(whole.dtype))]
        at = dim[0] if dim else kwargs.get("dim", 0)
        out = self.run(
            func, (*real, at % whole.ndim, *dim[1:]), {k: v for k, v in kwargs.items() if k != "dim"}
        )
        return self.run(aten.view_as_complex.default, (out,), {})

    def _value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op whose result is a Python value: a read."""
        kind = (
            "item" if func is aten._local_scalar_dense.default else func._schema.name.removeprefix("aten::")
        )
        for t in pytree.tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor):
                self._readable(kind, t)
        out = func(*args, **kwargs)
        self.tape.read(kind, out, list(self.tape.nodes(args)), func, self.tape.nodes(kwargs))
        return out

    def _readable(self, kind: str, tensor: torch.Tensor) -> None:
        if self._executor.unknown(tensor):
            self.refuse_read(kind, tensor)

    def refuse_read(self, kind: str, tensor: torch.Tensor) -> NoReturn:
        """Raise for a look at values that no recording knows."""
        source = origin(self.tape.node(tensor))
        remedy = f"leave it out if it is for checks or the log (scalars that forward returns are logged); else {_REMEDY}"
        self._fail(
            f"Python reads a value ({kind}) that depends on {source}, and is not known when a plan is made",
            remedy,
        )

    def _writable(self, tensor: torch.Tensor) -> None:
        name = self.tape.state_name(tensor)
        if name is not None:
            self._fail(
                f"forward changes {name} in place between its modules",
                "change it inside the module that owns it",
            )


def _returns_tensors(func: Any) -> bool:
    returns = func._schema.returns
    return not returns or any("Tensor" in str(r.type) for r in returns)


def origin(node: fx.Node) -> str:
    """What a node's value comes from, for messages: the nearest block or parameter."""
    met = list[fx.Node]()
    for n in behind([node]):
        if n.op == "call_module":
            return f"the result of {n.target}"
        if "draw" in n.meta:
            return f"random numbers ({n.target})"
        met.append(n)
    names = [n.target for n in met if n.op == "get_attr" and not str(n.target).startswith("_constant")]
    return f"the parameter {names[0]}" if names else "a block's result"
