"""A `torch.autograd.Function` between blocks as one call: run once for the shapes of its results, and
recorded with its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from secc.runtime.errors import UserError
from secc.runtime.recorder import nested_values
from secc.runtime.recorder.block_results import fresh
from secc.runtime.recorder.graph_tape import Tape
from secc.runtime.sections.autograd_functions import Applied, applied, tensors_of

Fail = Callable[[str, str], NoReturn]
_REMEDY = "call it inside one of the model's modules, which is called as it is"


def record_apply(
    tape: Tape, mode: FakeTensorMode, cls: Any, args: tuple[Any, ...], run: Callable[[], Any], fail: Fail
) -> Any:
    """Record `cls.apply(*args)`; what `run()`, which applies it, returned, with fake tensors in place of its
    own."""
    function, nodes = _named(cls, fail), _arguments(tape, cls, args, fail)
    given = [t for _, t in nested_values.tensors(args)]
    versions = [t._version for t in given]
    try:
        out = run()
    except UserError:
        raise
    except Exception as error:
        fail(f"the shapes of {cls.__name__}.apply cannot be found: {type(error).__name__}: {error}", _REMEDY)
    if [t._version for t in given] != versions:
        fail(f"{cls.__name__}.apply writes into its argument between the model's modules", _REMEDY)
    found = tensors_of(out)
    if not found:
        fail(f"{cls.__name__}.apply returns no tensor", _REMEDY)
    grads = [t.requires_grad for t in found]
    new = [
        fresh(mode, tuple(t.shape), t.stride(), t.dtype, grad) for t, grad in zip(found, grads, strict=True)
    ]
    tape.apply(function, nodes, new, grads)
    if not isinstance(out, tuple):
        return new[0]
    results = iter(new)
    return tuple(next(results) if isinstance(o, torch.Tensor) else o for o in out)


def _named(cls: Any, fail: Fail) -> Applied:
    function = applied(cls)
    if function is None:
        fail(
            f"forward calls {cls.__qualname__}.apply, a class that no plan can name",
            f"define {cls.__name__} at the top of a file",
        )
    return function


def _arguments(tape: Tape, cls: Any, args: tuple[Any, ...], fail: Fail) -> tuple[Any, ...]:
    try:
        return nested_values.arguments(args, tape.node)
    except nested_values.NotLiteral as error:
        fail(f"{cls.__name__}.apply is called with {error}, which cannot be written into a plan", _REMEDY)
