"""Runs one op of the glue, for real on inputs and fake on what depends on blocks, and writes it to the tape.

Two things need care. A real tensor that a block's values are written into (`buffer[mask] = features`) has no
known values from then on, and neither has any view of it. And `fake[mask]` has no shape under fake tensors,
but a mask made of inputs has values that give it one, and so has a mask that forward draws (`DrawnValues`).
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

from secc.runtime.errors import UserError
from secc.runtime.model.source_lines import current_user_frame
from secc.runtime.recorder import meta_rules
from secc.runtime.recorder.block_results import is_fake
from secc.runtime.recorder.compared_numbers import find_comparisons
from secc.runtime.recorder.drawn_values import DrawnValues
from secc.runtime.recorder.finite_checks import decides_finiteness, find_passed_check
from secc.runtime.recorder.graph_tape import Tape
from secc.runtime.recorder.library_checks import find_outcome_without_error
from secc.runtime.recorder.recording import BlockError, iter_nodes_behind, read_value

aten = torch.ops.aten
FailCallback = Callable[[str, str], NoReturn]  # message, remedy

_READ_OP = aten._local_scalar_dense.default
_VALUE_OPS = (
    _READ_OP,
    aten.item.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.allclose.default,
)
_FILL_OPS = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
_SCATTER_OPS = (aten.slice_scatter.default, aten.select_scatter.default)
_MAX_FILLED_ENTRIES = 1 << 20  # larger filled tensors are not worth their memory
_UNKNOWN_VALUE_ERRORS = {  # what an op does with values that are not known
    DataDependentOutputException: "it gives Python a number",
    DynamicOutputShapeException: "they decide the size of its result",
    UnsupportedOperatorException: "it cannot run without values",
}
_COMPUTE_INSIDE_MODULE_REMEDY = (
    "compute it inside one of the model's modules or a function at the top level of a file, or from the "
    "inputs alone"
)


def argument_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among an op's arguments, and in lists among them."""
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [v for v in value if isinstance(v, torch.Tensor)]
    return tensors


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an op writes into."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    by_name = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    written = [
        by_name[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in by_name
    ]
    return [t for t in pytree.tree_leaves(written) if isinstance(t, torch.Tensor)]


class OpExecutor:
    """Executes ops on real and fake tensors. `fail(message, remedy)` raises for ops that need values of a
    block's result. With `follows_draws`, values that random numbers decide may decide a number of rows."""

    def __init__(self, mode: FakeTensorMode, fail: FailCallback, follows_draws: bool = False) -> None:
        self._mode, self._fail = mode, fail
        self._drawn_values = DrawnValues() if follows_draws else None
        self._unknown_storages: dict[
            int, torch.UntypedStorage
        ] = {}  # storages with values that depend on blocks, by address of the handle

    def has_unknown_values(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor (any shape) depend on blocks or parameters."""
        return is_fake(tensor) or (
            bool(self._unknown_storages) and tensor.untyped_storage()._cdata in self._unknown_storages
        )

    def mark_unknown(self, tensor: torch.Tensor) -> None:
        """Mark the values of a tensor (any shape) as unknown: random ones differ on a rank."""
        if not is_fake(tensor):
            storage = tensor.untyped_storage()
            self._unknown_storages[storage._cdata] = storage

    def mark_drawn(self, tensor: torch.Tensor) -> None:
        """Mark the values of a tensor (any shape) as unknown that a random op has just drawn."""
        if self._drawn_values is not None and not self.has_unknown_values(tensor):
            self._drawn_values.keep_value(tensor, tensor.detach().clone())
        self.mark_unknown(tensor)

    def adopt_draw(self, copy: torch.Tensor, tensor: torch.Tensor) -> None:
        """Take what is known of a tensor that random numbers decide for a shallow copy of it."""
        if self._drawn_values is not None and (value := self._drawn_values.find_value(tensor)) is not None:
            self._drawn_values.keep_value(copy, value)

    def fake_if_unknown(self, value: Any) -> Any:
        """Return a fake tensor for one with unknown values; any other value as it is."""
        if isinstance(value, torch.Tensor) and not is_fake(value) and self.has_unknown_values(value):
            return self._mode.from_tensor(value)
        return value

    def execute_in_block(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute an op inside a block, where nothing is recorded. Filling a tensor of an unknown one's
        shape gives known values."""
        if func in _FILL_OPS and self.has_unknown_values(args[0]) and args[0].numel() <= _MAX_FILLED_ENTRIES:
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        return self.execute(func, args, kwargs)

    def execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute an op."""
        drawn = self._drawn_values
        if drawn is None:
            return self._execute(func, args, kwargs)
        values = drawn.find_arguments(func, args, kwargs, self.has_unknown_values)
        if values is None:
            for target in written_tensors(func, args, kwargs):
                drawn.forget_memory(target)
        out = self._execute_with_drawn_rows(func, args, kwargs, values, drawn)
        if values is not None:
            drawn.compute_results(func, values, out)
        return out

    def _execute_with_drawn_rows(
        self, func: Any, args: Any, kwargs: Any, values: tuple[Any, Any] | None, drawn: DrawnValues
    ) -> Any:
        """Execute an op. If drawn values decide how many rows its result has, the present ones do."""
        if torch.Tag.dynamic_output_shape not in func.tags:
            return self._execute(func, args, kwargs)
        if func in (aten.index.Tensor, aten.masked_select.default):
            found = pytree.tree_map(lambda a: _known_mask(a, drawn), args[1])
            if all(
                a is b for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(args[1]), strict=True)
            ):
                return self._execute(func, args, kwargs)
            out = self._execute(func, (args[0], found), kwargs)
        elif values is not None:
            out = func(*values[0], **values[1])
        else:
            return self._execute(func, args, kwargs)
        return pytree.tree_map(
            lambda t: self._mode.from_tensor(t) if isinstance(t, torch.Tensor) and not is_fake(t) else t, out
        )

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = (
            pytree.tree_map(self.fake_if_unknown, (args, kwargs))
            if self._unknown_storages and not func._schema.is_mutable
            else (args, kwargs)
        )
        targets = written_tensors(func, args, kwargs)
        if targets and any(map(self.has_unknown_values, argument_tensors(args, kwargs))):
            return self._write_unknown(func, args, kwargs, targets)
        try:
            return self._run_op(func, args, kwargs)
        except tuple(_UNKNOWN_VALUE_ERRORS) as error:
            why = _UNKNOWN_VALUE_ERRORS.get(type(error), type(error).__name__)
            self._fail(
                f"{func} needs values that depend on a block's result ({why})", _COMPUTE_INSIDE_MODULE_REMEDY
            )

    def _write_unknown(self, func: Any, args: Any, kwargs: Any, targets: list[torch.Tensor]) -> Any:
        """Write unknown values into `targets`: real ones become unknown and keep their numbers."""
        if all(is_fake(t) for t in targets):
            return func(*args, **kwargs)
        for t in targets:
            self.mark_unknown(t)
        returned = len(func._schema.returns)
        return None if returned == 0 else targets[0] if returned == 1 else tuple(targets)

    def _run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op. Ops that fake tensors refuse although their shapes are known are replaced by others."""
        if func is aten._grouped_mm.default and any(is_fake(a) for a in args[:2]):
            return grouped_mm_result(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
        if func is aten.masked_select.default and is_fake(args[0]) and not is_fake(args[1]):
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return aten.index.Tensor(
                args[0].expand(shape), list(args[1].expand(shape).nonzero(as_tuple=True))
            )
        if (
            func is aten._pack_padded_sequence.default
            and is_fake(args[0])
            and not self.has_unknown_values(args[1])
        ):
            return _packed_sequence_result(args[0], args[1])
        if func is aten._ctc_loss.Tensor and is_fake(args[0]) and not self.has_unknown_values(args[3]):
            return _ctc_loss_result(args[0], args[3])
        if func is not aten.index.Tensor:
            return meta_rules.run_with_rule(func, args, kwargs)
        if any(
            i is not None and i.dtype in (torch.bool, torch.uint8) and self.has_unknown_values(i)
            for i in args[1]
        ):
            self._fail("a mask that depends on a block's result selects rows", _COMPUTE_INSIDE_MODULE_REMEDY)
        if not is_fake(args[0]):
            return func(*args, **kwargs)
        return func(args[0], [i for mask in args[1] for i in _mask_to_indices(mask)])


def _packed_sequence_result(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a result of the shape of `aten._pack_padded_sequence` with known lengths: packed rows, and
    the number of rows of each step."""
    steps = torch.arange(int(lengths.max()))[:, None]
    return x.new_empty([int(lengths.sum()), *x.shape[2:]]), (lengths > steps).sum(1)


def _ctc_loss_result(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results of the shapes of `aten._ctc_loss` for labels of these lengths: loss per sample, and
    what its backward saves."""
    steps, samples = x.shape[:2]
    return x.new_empty([samples]), x.new_empty([samples, steps, 2 * int(lengths.max()) + 1])


def grouped_mm_result(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """Return a result of the shape of `aten._grouped_mm`. The op's own shape rule accepts bfloat16 only."""
    groups = (
        [offs.shape[0]]
        if offs is not None and a.ndim == b.ndim == 2
        else [a.shape[0]]
        if a.ndim == b.ndim == 3
        else []
    )
    return (a if is_fake(a) else b).new_empty([*groups, a.shape[-2], b.shape[-1]], dtype=a.dtype)


def _known_mask(index: Any, drawn: DrawnValues) -> Any:
    """Return the values of a mask that is drawn; any other index as it is."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
    value = drawn.find_value(index) if is_mask else None
    return index if value is None else value


def _mask_to_indices(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return list(index.nonzero(as_tuple=True))


class GlueRecorder:
    """Executes ops and writes them to a tape. With `sizes`, a size that depends on values counts as a
    value that Python reads."""

    def __init__(self, tape: Tape, executor: OpExecutor, fail: FailCallback, sizes: bool = True) -> None:
        self.tape, self._executor, self._fail, self._reads_sizes = tape, executor, fail, sizes
        # checks of finite scalars that were taken as passed: check, scalar, and the refusal if that is wrong
        self._passed_checks: list[tuple[fx.Node, fx.Node, UserError]] = []

    def run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute an op, record it, and bind its result to its node."""
        if func is aten.lift_fresh.default:
            self.tape.node_of(args[0])
            return args[0]
        if func is aten.copy.default:
            return self._copy_differentiably(*args[:2])
        if func is aten.squeeze.default:  # in a micro-batch of one sample it would drop the samples' dim
            return self.run_op(
                aten.squeeze.dims, (args[0], [d for d, size in enumerate(args[0].shape) if size == 1]), {}
            )
        if func in _SCATTER_OPS and args[0].is_complex():
            return self._scatter_complex(func, args, kwargs)
        if not _returns_tensors(func):
            return self._run_value_op(func, args, kwargs) if func in _VALUE_OPS else func(*args, **kwargs)
        for tensor in written_tensors(func, args, kwargs):
            self._require_writable(tensor)
        nodes = self.tape.map_to_nodes(args), self.tape.map_to_nodes(kwargs)
        out = self._executor.execute(func, args, kwargs)
        self.tape.emit_op(func, *nodes, out)
        if self._reads_sizes and torch.Tag.dynamic_output_shape in func.tags:
            self._read_result_size(func, args, out)
        return out

    def _read_result_size(self, func: Any, args: Any, out: Any) -> None:
        """Record a read for an op with as many result rows as values decide: Python sees the number
        without another op."""
        masks = [
            m
            for m in pytree.tree_leaves(args[1:])
            if isinstance(m, torch.Tensor) and m.dtype in (torch.bool, torch.uint8)
        ]
        first = out if isinstance(out, torch.Tensor) else out[0]
        if func is aten.index.Tensor and not masks:
            return
        if not self._executor.has_unknown_values(first):
            ones = self.run_op(aten.ones_like.default, (first,), {"dtype": torch.int64})
            self.record_read("size", self.run_op(aten.sum.default, (ones,), {}))
            return
        for mask in masks:
            if not self._executor.has_unknown_values(mask):
                self.run_op(aten.nonzero.default, (mask,), {})

    def record_read(self, kind: str, tensor: torch.Tensor) -> None:
        """Record that Python reads the values of a tensor of any shape."""
        self._require_known_values(kind, tensor)
        node = self.tape.node_of(tensor)
        self.tape.emit_read(kind, read_value(kind, tensor.detach()), [node])

    def _copy_differentiably(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Replace `aten.copy`, which has no derivative, by a cast and an expand."""
        if source.dtype != target.dtype:
            source = self.run_op(aten._to_copy.default, (source,), {"dtype": target.dtype})
        return self.run_op(aten.expand.default, (source, list(target.shape)), {})

    def _scatter_complex(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Write a part of a complex tensor as its real and imaginary parts, since the complex form has no
        derivative."""
        whole, part, *dim = args
        real = [self.run_op(aten.view_as_real.default, (t,), {}) for t in (whole, part.to(whole.dtype))]
        at = dim[0] if dim else kwargs.get("dim", 0)
        out = self.run_op(
            func, (*real, at % whole.ndim, *dim[1:]), {k: v for k, v in kwargs.items() if k != "dim"}
        )
        return self.run_op(aten.view_as_complex.default, (out,), {})

    def _run_value_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an op that returns a Python value: a read."""
        kind = "item" if func is _READ_OP else func._schema.name.removeprefix("aten::")
        if kind == "item" and (passed := self.pass_check(args[0])) is not None:
            return passed
        for t in pytree.tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor):
                self._require_known_values(kind, t)
        out = func(*args, **kwargs)
        compared = (
            find_comparisons(args[0], current_user_frame())
            if func is _READ_OP and not isinstance(out, bool)
            else ()
        )
        for name, number in compared:
            self._run_value_op(func, (self.run_op(getattr(aten, name).Scalar, (args[0], number), {}),), {})
        if compared:
            return out
        self.tape.emit_read(
            kind, out, list(self.tape.map_to_nodes(args)), func, self.tape.map_to_nodes(kwargs)
        )
        return out

    def pass_check(self, tensor: torch.Tensor) -> bool | None:
        """Return what a check by torch, or one that a scalar is finite, yields if it passes; None for other
        tensors (one entry). `confirm_passed_checks` raises later if the loss may be finite where the scalar
        is not."""
        if tensor.dtype != torch.bool or not self._executor.has_unknown_values(tensor):
            return None
        if (outcome := find_outcome_without_error()) is not None:
            return outcome
        check = self.tape.find_node(tensor)
        found = find_passed_check(check)
        if check is None or found is None:
            return None
        try:
            self.refuse_read("item", tensor)
        except UserError as error:
            self._passed_checks.append((check, found[1], error))
        return found[0]

    def confirm_passed_checks(self, loss: torch.Tensor) -> None:
        """Raise the refusal of the first check that was taken as passed although the loss, a scalar, may be
        finite where the checked scalar is not."""
        for check, scalar, error in self._passed_checks:
            if not decides_finiteness(self.tape.node_of(loss), scalar, check):
                raise error

    def _require_known_values(self, kind: str, tensor: torch.Tensor) -> None:
        if self._executor.has_unknown_values(tensor):
            self.refuse_read(kind, tensor)

    def refuse_read(self, kind: str, tensor: torch.Tensor) -> NoReturn:
        """Raise for a read of values of a tensor (any shape) that are not known while recording."""
        source = describe_origin(self.tape.node_of(tensor))
        remedy = (
            "leave it out if it is for checks; if it is for the log, return the tensor instead of the number"
            " (loss.detach().exp()), since scalars that forward returns are logged; "
            f"else {_COMPUTE_INSIDE_MODULE_REMEDY}"
        )
        message = (
            f"Python reads a value ({kind}) that depends on {source}, and is not known when a plan is made"
        )
        try:
            self._fail(message, remedy)
        except BlockError as error:
            error.reads_scalar = tensor.dim() == 0
            raise

    def _require_writable(self, tensor: torch.Tensor) -> None:
        name = self.tape.state_name(tensor)
        if name is not None:
            self._fail(
                f"forward changes {name} in place between its modules",
                "change it after the step, or in a module that --whole-batch names, called once in a step",
            )


def _returns_tensors(func: Any) -> bool:
    returns = func._schema.returns
    return not returns or any("Tensor" in str(r.type) for r in returns)


def describe_origin(node: fx.Node) -> str:
    """Describe for messages what a node's value comes from: the nearest block or parameter."""
    visited = list[fx.Node]()
    for n in iter_nodes_behind([node]):
        if n.op == "call_module":
            return f"the result of {n.target}"
        if "draw" in n.meta:
            return f"random numbers ({n.target})"
        visited.append(n)
    names = [n.target for n in visited if n.op == "get_attr" and not str(n.target).startswith("_constant")]
    return f"the parameter {names[0]}" if names else "a block's result"


def makes_nested_tensor(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op makes a nested tensor or takes one."""
    return "nested" in str(func) or any(t.is_nested for t in argument_tensors(args, kwargs))
