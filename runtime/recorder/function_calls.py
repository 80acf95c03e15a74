"""Records a user's `torch.autograd.Function` between blocks as one op: it is run once for the shapes of
its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from secc.runtime.errors import UserError
from secc.runtime.recorder import nested_values
from secc.runtime.recorder.block_results import new_fake_tensor
from secc.runtime.recorder.graph_tape import Tape
from secc.runtime.sections.autograd_functions import UserFunctionCall, find_user_function, returned_tensors

FailCallback = Callable[[str, str], NoReturn]
_CALL_INSIDE_MODULE_REMEDY = "call it inside one of the model's modules, which is called as it is"


def record_function_apply(
    tape: Tape,
    mode: FakeTensorMode,
    cls: Any,
    args: tuple[Any, ...],
    run: Callable[[], Any],
    fail: FailCallback,
) -> Any:
    """Record `cls.apply(*args)`. `run()` applies it; returns its result with fake tensors in place of its
    own.

    Raises through `fail` if a plan cannot name the class or its arguments, or if it writes into an argument.
    """
    function, nodes = _name_function(cls, fail), _encode_call_arguments(tape, cls, args, fail)
    inputs = [t for _, t in nested_values.iter_tensors(args)]
    versions = [t._version for t in inputs]
    try:
        out = run()
    except UserError:
        raise
    except Exception as error:
        fail(
            f"the shapes of {cls.__name__}.apply cannot be found: {type(error).__name__}: {error}",
            _CALL_INSIDE_MODULE_REMEDY,
        )
    if [t._version for t in inputs] != versions:
        fail(
            f"{cls.__name__}.apply writes into its argument between the model's modules",
            _CALL_INSIDE_MODULE_REMEDY,
        )
    results = returned_tensors(out)
    if not results:
        fail(f"{cls.__name__}.apply returns no tensor", _CALL_INSIDE_MODULE_REMEDY)
    carry_gradient = [t.requires_grad for t in results]
    new = [
        new_fake_tensor(mode, tuple(t.shape), t.stride(), t.dtype, grad)
        for t, grad in zip(results, carry_gradient, strict=True)
    ]
    tape.emit_function(function, nodes, new, carry_gradient)
    if not isinstance(out, tuple):
        return new[0]
    remaining = iter(new)
    return tuple(next(remaining) if isinstance(o, torch.Tensor) else o for o in out)


def _name_function(cls: Any, fail: FailCallback) -> UserFunctionCall:
    function = find_user_function(cls)
    if function is None:
        fail(
            f"forward calls {cls.__qualname__}.apply, a class that no plan can name",
            f"define {cls.__name__} at the top of a file",
        )
    return function


def _encode_call_arguments(
    tape: Tape, cls: Any, args: tuple[Any, ...], fail: FailCallback
) -> tuple[Any, ...]:
    try:
        return nested_values.encode_arguments(args, tape.node_of)
    except nested_values.NotLiteral as error:
        fail(
            f"{cls.__name__}.apply is called with {error}, which cannot be written into a plan",
            _CALL_INSIDE_MODULE_REMEDY,
        )
