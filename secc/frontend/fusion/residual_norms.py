"""Finds sums that a norm follows in the code of layers, and rewrites both as one operator.

    hidden = residual + hidden          hidden, normed = fused.add_and_normalize(residual, hidden, self.norm)
    residual = hidden              →    residual = hidden
    hidden = self.norm(hidden)          hidden = normed

A layer's code cannot be traced because of its attention, so its syntax tree is rewritten: all other
statements stay as they are. The two forms compute the same if the norm depends on its argument through one
norm operator alone, which the norm's own rewritten code shows (`depends_through_norm`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from torch import fx, nn

from secc.frontend.fusion.site_trace import has_hooks, plain_code
from secc.runtime.fusion import operators
from secc.runtime.fusion.install import RESERVED_NAMES

RESIDUAL_NORM = "residual-norm"
_NORM_OPERATORS = frozenset(
    {operators.layer_norm, operators.rms_norm, operators.torch_layer_norm, operators.torch_rms_norm}
)
_ADD_AND_NORMALIZE = ast.parse("fused.add_and_normalize", mode="eval").body


@dataclass(frozen=True)
class RewrittenLayer:
    """The code of a method with its norms after sums replaced, the user's line of each line of it, and the
    names of the norms."""

    code: tuple[str, ...]
    lines: tuple[int, ...]
    norms: tuple[str, ...]


def depends_through_norm(graph: fx.Graph) -> bool:
    """Whether the only tensor that a rewritten graph takes goes into one norm operator and nowhere else; its
    dtype may be read."""
    taken = [n for n in graph.nodes if n.op == "placeholder" and n.users]
    if len(taken) != 1:
        return False
    uses = [n for n in taken[0].users if not _reads_dtype(n, taken[0])]
    return len(uses) == 1 and uses[0].target in _NORM_OPERATORS and uses[0].args[0] is taken[0]


def _reads_dtype(node: fx.Node, tensor: fx.Node) -> bool:
    if node.op == "call_method" and node.target == "type_as":
        return node.args[1] is tensor and node.args[0] is not tensor
    return node.op == "call_function" and node.target is getattr and node.args[1] == "dtype"


def rewrite_layer(module: nn.Module, is_norm: Callable[[nn.Module], bool]) -> RewrittenLayer | None:
    """Rewrites a module's `forward` if it adds two tensors and takes the sum into one of its norms.

    `is_norm` says of a child whether `depends_through_norm` holds for its rewritten code. Returns None if
    there is nothing to rewrite, or if the function cannot be written elsewhere: it has a closure, or hides a
    name that rewritten code needs. Its decorators stay.
    """
    function = inspect.unwrap(type(module).forward)
    code = plain_code(function)
    norms = frozenset(n for n, m in module.named_children() if not has_hooks(m) and is_norm(m))
    if not norms or code is None or "forward" in vars(module) or code.co_freevars:
        return None
    assert isinstance(function, FunctionType)
    return _rewrite_function(function, norms)


@functools.cache  # a stack has many layers of one class
def _rewrite_function(function: FunctionType, norms: frozenset[str]) -> RewrittenLayer | None:
    """Rewrites the code of a `forward` with children `norms`; see `rewrite_layer`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef) or _needs_own_class(tree, function):
        return None
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    search = _SumSearch(tree.args.args[0].arg, norms)
    search.rewrite_statements(tree)
    if not search.found or not _keeps_lines_of_calls(tree, tree.args.args[0].arg):
        return None
    return RewrittenLayer(*_write_function(tree), tuple(search.found))


def _needs_own_class(tree: ast.FunctionDef, function: FunctionType) -> bool:
    """Whether a function means something else outside its class or next to the names of rewritten code."""
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    mangled = any(n.startswith("__") and not n.endswith("__") for n in names | attributes)
    hidden = any(
        n in names and function.__globals__.get(n, value) is not value for n, value in RESERVED_NAMES.items()
    )
    return mangled or hidden or not tree.args.args


def _keeps_lines_of_calls(tree: ast.FunctionDef, own: str) -> bool:
    """Whether each call of something other than a child is on the first line of its statement: random ops are
    known by their line."""
    for statement in (n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n is not tree):
        for node in _iter_expressions(statement):
            is_child = isinstance(node, ast.Call) and _is_attribute(node.func, own)
            if isinstance(node, ast.Call) and not is_child and node.lineno != statement.lineno:
                return False
    return True


def _iter_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yields the nodes of a statement without those of statements inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt)]


def _is_attribute(node: ast.AST, own: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own


@dataclass
class _SumSearch:
    """Rewrites sums in lists of statements. `own`: the name of the module's argument; `found`: norms used."""

    own: str
    norms: Collection[str]
    found: list[str] = field(default_factory=list[str])

    def rewrite_statements(self, parent: ast.AST) -> None:
        """Rewrites the lists of statements in a node, and those inside them."""
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(parent, name, None)
            if not isinstance(statements, list):
                continue
            for i, statement in enumerate(statements):
                self._rewrite_sum(statements, i)
                self.rewrite_statements(statement)

    def _rewrite_sum(self, statements: list[Any], i: int) -> None:
        """Rewrites `x = a + b` at i if the next statement, or the one after `y = x`, takes x into a norm."""
        total = statements[i]
        if not (
            isinstance(total, ast.Assign)
            and isinstance(total.value, ast.BinOp)
            and isinstance(total.value.op, ast.Add)
            and len(total.targets) == 1
            and isinstance(total.targets[0], ast.Name)
        ):
            return
        name = total.targets[0].id
        follows = i + 1 + (i + 1 < len(statements) and _copies_name(statements[i + 1], name))
        if follows >= len(statements):
            return
        normed = f"normed_{len(self.found) + 1}"
        taker = _NormTaker(self.own, name, normed, self.norms)
        if not taker.take_call(statements[follows]):
            return
        target = ast.Tuple([total.targets[0], ast.Name(normed, ast.Store())], ast.Store())
        norm = ast.Attribute(ast.Name(self.own, ast.Load()), taker.norm, ast.Load())
        call = ast.Call(_ADD_AND_NORMALIZE, [total.value.left, total.value.right, norm], [])
        new = ast.copy_location(ast.Assign([target], ast.copy_location(call, total.value)), total)
        statements[i] = ast.fix_missing_locations(new)
        self.found.append(taker.norm)


def _copies_name(statement: ast.stmt, name: str) -> bool:
    """Whether a statement is `y = x` for another y."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Name)
        and statement.value.id == name
        and all(isinstance(t, ast.Name) and t.id != name for t in statement.targets)
    )


class _NormTaker(ast.NodeTransformer):
    """Replaces the call of a norm with `name` in a statement by the name `normed`."""

    def __init__(self, own: str, name: str, normed: str, norms: Collection[str]) -> None:
        self._own, self._name, self._normed, self._norms = own, name, normed, norms
        self.norm = ""

    def take_call(self, statement: ast.stmt) -> bool:
        """Replaces the call if it runs whenever the statement does, and nothing in it changes a tensor."""
        if not isinstance(statement, ast.Assign | ast.Return | ast.Expr):
            return False
        nodes = list(ast.walk(statement))
        conditional = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension, ast.NamedExpr, ast.Compare)
        changes = any(isinstance(n, ast.Attribute) and n.attr.endswith("_") for n in nodes)
        if changes or any(isinstance(n, conditional) for n in nodes):
            return False
        if sum(map(self._is_norm_call, nodes)) != 1:
            return False
        self.visit(statement)
        return True

    def _is_norm_call(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and _is_attribute(node.func, self._own)
            and node.func.attr in self._norms
            and not node.keywords
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id == self._name
        )

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if self._is_norm_call(node):
            assert isinstance(node.func, ast.Attribute)
            self.norm = node.func.attr
            return ast.copy_location(ast.Name(self._normed, ast.Load()), node)
        return self.generic_visit(node)


class _AnnotationRemover(ast.NodeTransformer):
    """Writes `x: T = value` as `x = value`, and `x: T` as nothing."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return ast.copy_location(ast.Assign([node.target], node.value) if node.value else ast.Pass(), node)


def _write_function(tree: ast.FunctionDef) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the text of a function named FUSED, without annotations and docstring, and the user's line of
    each line. Defaults become None: `install_fused` takes those of the user's function."""
    arguments = tree.args
    for argument in (
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ):
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [d and ast.Constant(None) for d in arguments.kw_defaults]
    tree.name, tree.returns, tree.decorator_list = "FUSED", None, []
    tree.body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    tree = ast.fix_missing_locations(_AnnotationRemover().visit(tree))
    text = ast.unparse(tree)
    line_by_number: dict[int, int] = {}
    for old, new in zip(ast.walk(tree), ast.walk(ast.parse(text).body[0]), strict=True):
        if isinstance(new, ast.stmt):
            line_by_number.setdefault(new.lineno, old.lineno)  # pyright: ignore[reportAttributeAccessIssue]
    lines = list[int]()
    for number in range(1, len(text.splitlines()) + 1):
        lines.append(line_by_number.get(number, lines[-1] if lines else tree.lineno))
    return tuple(text.splitlines()), tuple(lines)
