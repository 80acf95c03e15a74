"""Applies the rules to a site's graph: the outermost matches first, each only if the numbers agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from secc.frontend.fusion.equivalence import Part, difference
from secc.frontend.fusion.fusion_rules import NUMBERS, PARAMETERS, RULES, Rule
from secc.frontend.fusion.graph_algebra import Algebra, Expr
from secc.frontend.fusion.pattern_match import Attempt, Bound, Name, Op, Pattern, canonical, match, parse
from secc.runtime.fusion import operators
from secc.runtime.recorder.recording import behind


@dataclass(frozen=True)
class Found:
    """A rule that was applied, and the node whose place it took."""

    rule: str
    node: fx.Node


@dataclass(frozen=True)
class Missed:
    """A rule that does not apply, and why; `node` is where."""

    rule: str
    reason: str
    node: fx.Node | None


def rewrite(
    graph: fx.Graph, tensors: Mapping[str, torch.Tensor], skip: Collection[str]
) -> tuple[list[Found], list[Missed]]:
    """Put fused operators into `graph` by all rules but those in `skip`. `tensors` are the site's parameters
    and buffers by name."""
    algebra = Algebra(canonical)
    algebra.read(graph)
    rules = [r for r in RULES if r.name not in skip]
    found: list[Found] = []
    missed: list[Missed] = []
    for node in reversed(list(algebra.of)):
        if not node.users or algebra.is_cast(node):
            continue
        for rule in rules:
            bound = match(parse(rule.pattern), algebra.of[node])
            if bound is None:
                continue
            reason = _apply(graph, algebra, node, rule, bound, tensors)
            if reason:
                missed.append(Missed(rule.name, reason, node))
                continue
            found.append(Found(rule.name, node))
            break
    signs = {r.sign for r in rules if r.name in {f.rule for f in found}}
    missed = [m for m in missed if not any(r.sign in signs for r in rules if r.name == m.rule)]
    tried = {m.rule for m in missed}
    missed += _near(algebra, [r for r in rules if r.sign not in signs and r.name not in tried])
    return found[::-1], missed


def _apply(
    graph: fx.Graph,
    algebra: Algebra,
    node: fx.Node,
    rule: Rule,
    bound: Bound,
    tensors: Mapping[str, torch.Tensor],
) -> str:
    """Replace what computes `node`. Returns why not, "" if it was done."""
    new = _insert(graph, parse(rule.replacement), bound, node.meta.get("line", 0))
    leaves = {
        n: _nodes(algebra, v)
        for n, v in bound.items()
        if isinstance(v, Expr) and n not in PARAMETERS | NUMBERS
    }
    reason = difference(Part(node, _end(algebra, node), leaves, _parameters(node, tensors)), new, rule.trials)
    if not reason:
        node.replace_all_uses_with(new)
    _sweep(graph)
    return reason


def _nodes(algebra: Algebra, value: Expr) -> list[fx.Node]:
    """The nodes that compute an expression, casts of it left out."""
    return [
        value.node,
        *(n for n, e in algebra.of.items() if e is value and n is not value.node and not algebra.is_cast(n)),
    ]


def _insert(graph: fx.Graph, pattern: Pattern, bound: Bound, line: int) -> fx.Node:
    """The node for a replacement, right after its last argument; one that is there is used again."""
    assert isinstance(pattern, Op)

    def argument(value: Pattern) -> Any:
        if isinstance(value, Op):
            return _insert(graph, value, bound, line)
        given = bound[value.text] if isinstance(value, Name) else value
        return given.node if isinstance(given, Expr) else given

    target, args = getattr(operators, pattern.name), tuple(argument(a) for a in pattern.args)
    order = {n: i for i, n in enumerate(graph.nodes)}
    again = next((n for n in order if n.target is target and n.args == args), None)
    if again is not None:
        return again
    with graph.inserting_after(max((a for a in args if isinstance(a, fx.Node)), key=lambda n: order[n])):
        new = graph.call_function(target, args)
    new.meta["line"] = line
    return new


def _end(algebra: Algebra, node: fx.Node) -> fx.Node:
    """The last of the casts that follow a node, as long as there is nothing else."""
    while len(node.users) == 1 and algebra.is_cast(user := next(iter(node.users))) and user.args[0] is node:
        node = user
    return node


def _parameters(node: fx.Node, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters and buffers that a node depends on without a module's call between."""
    return {
        name: tensors[name] for name in sorted(str(n.target) for n in behind([node]) if n.op == "get_attr")
    }


def _sweep(graph: fx.Graph) -> None:
    """Erase what nothing uses; calls of the user's modules stay."""
    for node in reversed(list(graph.nodes)):
        if (
            not node.users
            and node.op not in ("placeholder", "output", "call_module")
            and not node.is_impure()
        ):
            graph.erase_node(node)


def _near(algebra: Algebra, rules: list[Rule]) -> list[Missed]:
    """For each rule whose sign is in the graph, why its best pattern does not match."""
    missed: list[Missed] = []
    output = next(n for n in next(iter(algebra.of)).graph.nodes if n.op == "output").all_input_nodes
    signs = {e.op for e in algebra.of.values()} - {algebra.of[n].op for n in output if n in algebra.of}
    for name in dict.fromkeys(r.name for r in rules):
        attempt = Attempt()
        pattern = ""
        for rule in rules:
            if rule.name != name or rule.sign not in signs:
                continue
            for expr in algebra.of.values():
                before = attempt.reason
                attempt.restart()
                match(parse(rule.pattern), expr, attempt)
                pattern = rule.pattern if attempt.reason != before else pattern
        if attempt.reason:
            missed.append(Missed(name, f"`{pattern}` does not fit: {attempt.reason}", attempt.node))
    return missed
