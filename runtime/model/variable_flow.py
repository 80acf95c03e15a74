"""Which variables statements may read before they set them, which they set on every way through them, and
which they change in place."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable

GROWING_METHODS = frozenset({"append", "extend", "insert"})
CHANGING_METHODS = GROWING_METHODS | {
    "pop",
    "remove",
    "clear",
    "update",
    "setdefault",
    "add",
    "sort",
    "reverse",
}  # of lists, dicts and sets
_IN_PLACE_METHOD = re.compile(r"(?!requires_grad_)\w*[^_]_")  # of tensors
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def names_read_first(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the variables that the statements may read before they set them."""
    return _Flow().run(statements)[0]


def names_always_set(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the variables that have a new value behind the statements, whichever way was taken."""
    return _Flow().run(statements)[1]


def base_name(node: ast.AST) -> str | None:
    """Return the variable of `x.a[0]`; None for an entry or attribute of something else."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def names_changed_in_place(statement: ast.AST, methods: Collection[str] | None = None) -> set[str]:
    """Return the variables that a statement changes without setting them: by an entry, an attribute, or a
    method. methods: only by these."""
    found = set[str | None]()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, known = node.func.attr, CHANGING_METHODS if methods is None else methods
            if name in known or (methods is None and _IN_PLACE_METHOD.fullmatch(name)):
                found.add(base_name(node.func.value))
        elif methods is None and isinstance(node, ast.Attribute | ast.Subscript):
            found |= {base_name(node)} if isinstance(node.ctx, ast.Store) else set()
    return {name for name in found if name is not None}


class _Flow:
    """Follows statements in order. Loops may have no round, and exceptions may come anywhere in a `try`."""

    def run(self, statements: Iterable[ast.stmt]) -> tuple[set[str], set[str]]:
        """Return what may be read first, and what is always set."""
        read, is_set = set[str](), set[str]()
        for statement in statements:
            more_read, more_set = self._follow(statement)
            read |= more_read - is_set
            is_set |= more_set
        return read, is_set

    def _follow(self, node: ast.stmt) -> tuple[set[str], set[str]]:
        match node:
            case ast.Assign(targets=targets, value=value):
                stored = set[str]().union(*map(_names_set, targets))
                return _names_loaded(value).union(*map(_names_loaded, targets)), stored
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                return _names_loaded(value) | _names_loaded(target), _names_set(target)
            case ast.For(target=target, iter=iterated, body=body, orelse=orelse):
                read, _ = self.run(body)
                read_behind, _ = self.run(orelse)
                inner = (read | _names_loaded(target)) - _names_set(target)
                return _names_loaded(iterated) | inner | read_behind, set()
            case ast.While(test=test, body=body, orelse=orelse):
                return _names_loaded(test) | self.run(body)[0] | self.run(orelse)[0], set()
            case ast.If(test=test, body=body, orelse=orelse):
                (read, is_set), (other_read, other_set) = self.run(body), self.run(orelse)
                return _names_loaded(test) | read | other_read, is_set & other_set
            case ast.With(items=items, body=body):
                targets = [i.optional_vars for i in items if i.optional_vars is not None]
                named = set[str]().union(*map(_names_set, targets))
                read, _ = self.run(body)
                entered = set[str]().union(*(_names_loaded(i) for i in items))
                return entered | (read - named), named  # a context may end its body early and go on
            case _:
                return _names_loaded(node), set()


def _names_set(target: ast.AST) -> set[str]:
    """Return the variables that a target sets."""
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _names_loaded(node: ast.AST) -> set[str]:
    """Return the variables that are read anywhere in a node, without those of comprehensions alone."""
    if isinstance(node, _COMPREHENSIONS):
        own = set[str]().union(*(_names_set(g.target) for g in node.generators))
        first = node.generators[0].iter
        inner = set[str]().union(*(_names_loaded(c) for c in ast.iter_child_nodes(node)))
        return _names_loaded(first) | (inner - own)
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    found = set[str]().union(*(_names_loaded(c) for c in ast.iter_child_nodes(node)))
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)
    return found
