"""Writes a rewritten site as source text for the plan: readable, one statement for each operation, each
with the user's line."""

from __future__ import annotations

import ast
import re

from torch import fx

from secc.frontend.fusion.site_trace import SiteRefused
from secc.runtime.fusion import operators

_OPERATOR_PREFIX = re.compile(rf"\bsecc_runtime_\w+?_(?=(?:{'|'.join(operators.__all__)})\b)")
_KNOWN_GLOBALS = frozenset({"torch", "device", "inf", "nan", "NoneType"})


def write_source(graph: fx.Graph, name: str, method: bool, first: int) -> tuple[list[str], list[int]]:
    """Returns the lines of a function `name` that computes `graph`, and the user's line for each; a method
    takes `self` first.

    Raises SiteRefused for values that source text cannot name.
    """
    made = graph.python_code("self")
    text = _OPERATOR_PREFIX.sub("fused.", re.sub(r";  \w+(?: = \w+)* = None.*$", "", made.src, flags=re.M))
    lines = {node.name: node.meta.get("line", first) for node in graph.nodes}
    function = ast.parse(text.strip()).body[-1]
    assert isinstance(function, ast.FunctionDef)
    for arg in function.args.args:
        arg.annotation = None
    if not method:
        function.args.args = function.args.args[1:]
    body = [s for s in function.body if not isinstance(s, ast.AnnAssign)]
    used = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name)}
    strange = sorted(n for n in used & made.globals.keys() if n not in _KNOWN_GLOBALS)
    if strange:
        raise SiteRefused(f"it uses {strange[0]}, which a plan cannot name")
    head = ast.unparse(ast.FunctionDef(name, function.args, [ast.Pass()], [], lineno=0)).splitlines()[0]
    code = [head] + [f"    {ast.unparse(statement)}" for statement in body]
    places = [first] + [_user_line(statement, lines, graph, first) for statement in body]
    return code, places


def _user_line(statement: ast.stmt, lines: dict[str, int], graph: fx.Graph, first: int) -> int:
    """Returns the user's line of a statement: that of the node it assigns, or, for the return, of what it
    returns."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return lines.get(statement.targets[0].id, first)
    returned = graph.output_node().all_input_nodes
    return returned[0].meta.get("line", first) if returned else first
