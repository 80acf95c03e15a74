"""Recognises checks that a loss is finite (`assert not torch.isnan(loss)`), which are recorded as passed.

A run looks at the loss of every step itself and, by default, ends where it is not finite. If the loss is
infinite or NaN whenever the checked scalar is, the check passes in every step that a run completes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from secc.runtime.recorder.recording import writes_argument

aten = torch.ops.aten

_COPIES = {aten.detach.default, aten.alias.default, aten.clone.default}
_REDUCTIONS = {aten.any.default, aten.all.default}
_NEGATIONS = {aten.logical_not.default, aten.bitwise_not.default}
_CONJUNCTIONS = {aten.mul.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor}
_DISJUNCTIONS = {aten.add.Tensor, aten.logical_or.default, aten.bitwise_or.Tensor}
_CARRYING = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default, aten.alias.default}


def find_passed_check(node: Any) -> tuple[bool, fx.Node] | None:
    """Return what a check yields for a finite scalar, and the scalar's node; None if `node` stands for
    anything but a check of one scalar."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    args: tuple[Any, ...] = node.args
    if node.target in _COPIES or node.target in _REDUCTIONS:
        return find_passed_check(args[0])
    if node.target in _NEGATIONS:
        inner = find_passed_check(args[0])
        return inner and (not inner[0], inner[1])
    if node.target in (aten.isnan.default, aten.isinf.default):
        return _pair_with_scalar(False, args[0])
    if node.target in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]:
        return _pair_with_scalar(node.target is aten.eq.Tensor, args[0])
    if node.target in (aten.eq.Scalar, aten.ne.Scalar) and args[1] == math.inf:
        inside = args[0].args[0] if args[0].target is aten.abs.default else args[0]
        return _pair_with_scalar(node.target is aten.ne.Scalar, inside)
    if node.target in _CONJUNCTIONS or node.target in _DISJUNCTIONS:
        one, other = find_passed_check(args[0]), find_passed_check(args[1])
        if one is None or other is None or one[1] is not other[1]:
            return None
        holds = (one[0] and other[0]) if node.target in _CONJUNCTIONS else (one[0] or other[0])
        return holds, one[1]
    return None


def _pair_with_scalar(holds: bool, node: Any) -> tuple[bool, fx.Node] | None:
    while isinstance(node, fx.Node) and node.target in _COPIES:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.meta.get("shape") != () or "dtype" not in node.meta:
        return None
    return (holds, node) if node.meta["dtype"].is_floating_point else None


def decides_finiteness(loss: fx.Node, scalar: fx.Node, check: fx.Node) -> bool:
    """Whether the loss is infinite or NaN whenever `scalar` is, and nothing writes into a tensor after the
    check."""
    later = check.next
    while later.op != "root":
        if writes_argument(later):
            return False
        later = later.next
    pending, seen = [loss], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node is scalar:
            return True
        if node in seen or node.meta.get("shape") != ():
            continue
        seen.add(node)
        operands = node.args[:2] if node.target in _CARRYING else ()
        if node.target is aten.div.Tensor:
            operands = node.args[:1]
        pending += [n for n in operands if isinstance(n, fx.Node)]
    return False
