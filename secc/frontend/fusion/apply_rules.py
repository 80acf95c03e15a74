"""Applies the rules to a site's graph: outermost matches first, each only if the numbers agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from secc.frontend.fusion.equivalence import MatchedPart, find_difference
from secc.frontend.fusion.fusion_rules import FUSION_RULES, NUMBER_NAMES, PARAMETER_NAMES, FusionRule
from secc.frontend.fusion.graph_algebra import GraphAlgebra, GraphExpr
from secc.frontend.fusion.pattern_match import (
    Bindings,
    MatchAttempt,
    PatternCall,
    PatternExpr,
    PatternVariable,
    canonicalize_spelling,
    match_pattern,
    parse_pattern,
)
from secc.runtime.fusion import operators
from secc.runtime.recorder.recording import iter_nodes_behind


@dataclass(frozen=True)
class AppliedRule:
    """A rule that was applied, and the node that it replaced."""

    rule: str
    node: fx.Node


@dataclass(frozen=True)
class MissedRule:
    """A rule that does not apply, why, and at which node."""

    rule: str
    reason: str
    node: fx.Node | None


def rewrite_graph(
    graph: fx.Graph, tensors: Mapping[str, torch.Tensor], skip: Collection[str]
) -> tuple[list[AppliedRule], list[MissedRule]]:
    """Replaces matches of all rules except those in `skip` by fused operators. `tensors` are the site's
    parameters and buffers by name, in their own shapes.

    Returns the applied rules and the rules that nearly matched.
    """
    algebra = GraphAlgebra(canonicalize_spelling)
    algebra.read_graph(graph)
    rules = [r for r in FUSION_RULES if r.name not in skip]
    applied: list[AppliedRule] = []
    missed: list[MissedRule] = []
    for node in reversed(list(algebra.expression_by_node)):
        if not node.users or algebra.is_cast(node):
            continue
        for rule in rules:
            bound = match_pattern(parse_pattern(rule.pattern), algebra.expression_by_node[node])
            if bound is None:
                continue
            reason = _apply_rule(graph, algebra, node, rule, bound, tensors)
            if reason:
                missed.append(MissedRule(rule.name, reason, node))
                continue
            applied.append(AppliedRule(rule.name, node))
            break
    signs = {r.required_op for r in rules if r.name in {f.rule for f in applied}}
    missed = [m for m in missed if not any(r.required_op in signs for r in rules if r.name == m.rule)]
    tried = {m.rule for m in missed}
    missed += _explain_near_misses(
        algebra, [r for r in rules if r.required_op not in signs and r.name not in tried]
    )
    return applied[::-1], missed


def _apply_rule(
    graph: fx.Graph,
    algebra: GraphAlgebra,
    node: fx.Node,
    rule: FusionRule,
    bound: Bindings,
    tensors: Mapping[str, torch.Tensor],
) -> str:
    """Replaces what computes `node`. Returns why not, "" if it was done."""
    new = _insert_replacement(graph, parse_pattern(rule.replacement), bound, node.meta.get("line", 0))
    leaves = {
        n: _nodes_computing(algebra, v)
        for n, v in bound.items()
        if isinstance(v, GraphExpr) and n not in PARAMETER_NAMES | NUMBER_NAMES
    }
    reason = find_difference(
        MatchedPart(node, _last_cast(algebra, node), leaves, _used_parameters(node, tensors)),
        new,
        rule.trials,
    )
    if not reason:
        node.replace_all_uses_with(new)
    _erase_unused(graph)
    return reason


def _nodes_computing(algebra: GraphAlgebra, value: GraphExpr) -> list[fx.Node]:
    """Returns the nodes that compute an expression, without casts of it."""
    return [
        value.node,
        *(
            n
            for n, e in algebra.expression_by_node.items()
            if e is value and n is not value.node and not algebra.is_cast(n)
        ),
    ]


def _insert_replacement(graph: fx.Graph, pattern: PatternExpr, bound: Bindings, line: int) -> fx.Node:
    """Returns the node of a replacement, inserted right after its last argument; an equal node is used
    again."""
    assert isinstance(pattern, PatternCall)

    def argument(value: PatternExpr) -> Any:
        if isinstance(value, PatternCall):
            return _insert_replacement(graph, value, bound, line)
        given = bound[value.text] if isinstance(value, PatternVariable) else value
        return given.node if isinstance(given, GraphExpr) else given

    target, args = getattr(operators, pattern.name), tuple(argument(a) for a in pattern.args)
    order = {n: i for i, n in enumerate(graph.nodes)}
    existing = next((n for n in order if n.target is target and n.args == args), None)
    if existing is not None:
        return existing
    with graph.inserting_after(max((a for a in args if isinstance(a, fx.Node)), key=lambda n: order[n])):
        new = graph.call_function(target, args)
    new.meta["line"] = line
    return new


def _last_cast(algebra: GraphAlgebra, node: fx.Node) -> fx.Node:
    """Returns the last of the casts that follow a node, as long as it has no other users."""
    while len(node.users) == 1 and algebra.is_cast(user := next(iter(node.users))) and user.args[0] is node:
        node = user
    return node


def _used_parameters(node: fx.Node, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers that a node depends on without a module's call in between."""
    return {
        name: tensors[name]
        for name in sorted(str(n.target) for n in iter_nodes_behind([node]) if n.op == "get_attr")
    }


def _erase_unused(graph: fx.Graph) -> None:
    """Erases unused nodes; calls of the user's modules stay."""
    for node in reversed(list(graph.nodes)):
        if (
            not node.users
            and node.op not in ("placeholder", "output", "call_module")
            and not node.is_impure()
        ):
            graph.erase_node(node)


def _explain_near_misses(algebra: GraphAlgebra, rules: list[FusionRule]) -> list[MissedRule]:
    """Returns, for each rule with its required op in the graph, why its best pattern does not match."""
    missed: list[MissedRule] = []
    output = next(
        n for n in next(iter(algebra.expression_by_node)).graph.nodes if n.op == "output"
    ).all_input_nodes
    signs = {e.op for e in algebra.expression_by_node.values()} - {
        algebra.expression_by_node[n].op for n in output if n in algebra.expression_by_node
    }
    for name in dict.fromkeys(r.name for r in rules):
        attempt = MatchAttempt()
        pattern = ""
        for rule in rules:
            if rule.name != name or rule.required_op not in signs:
                continue
            for expr in algebra.expression_by_node.values():
                before = attempt.reason
                attempt.restart()
                match_pattern(parse_pattern(rule.pattern), expr, attempt)
                pattern = rule.pattern if attempt.reason != before else pattern
        if attempt.reason:
            missed.append(MissedRule(name, f"`{pattern}` does not fit: {attempt.reason}", attempt.node))
    return missed
