"""Takes what a loop of a forward counts out of the loop, as a loop of tensors before it.

A loop over samples that calls modules may count the values that its loss is a mean of, in Python:
`n += int((y != 0).sum())`. Such a number is that of one micro-batch, and nothing tells how inputs make it. So
the count is rewritten as a loop of its own, without `int`, which the statements that it needs go into as
well: `for x, y in zip(xs, ys): n += (y != 0).sum()`. It reads inputs alone, so it is recorded as a sum over
samples, and the rest of the loop may be a block.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence

from secc.runtime.model.variable_flow import names_changed_in_place

_MARK = "is_counting_loop"  # an attribute of statements
_COUNTS = ("sum", "count_nonzero")
_ROWS = ("numel", "size")


def is_counting_loop(statement: ast.stmt) -> bool:
    """Whether a statement is a loop of what another one counts. It needs no block."""
    return hasattr(statement, _MARK)


def take_counts_out(statements: Sequence[ast.stmt], self_name: str) -> list[ast.stmt]:
    """Return the statements of a forward with what its loops count in loops of their own."""
    found = list[ast.stmt]()
    for statement in statements:
        if isinstance(statement, ast.For) and not statement.orelse:
            found += _split_loop(statement, self_name)
        elif isinstance(statement, ast.Assign):
            found.append(_with_tensors_in_sum(statement, self_name))
        else:
            found.append(statement)
    return found


def _split_loop(loop: ast.For, self_name: str) -> list[ast.stmt]:
    """Return a loop as loops of what it counts and a loop of its other statements, if there are any."""
    if self_name in _names(loop.iter) or any(isinstance(n, ast.Break | ast.Continue) for n in ast.walk(loop)):
        return [loop]
    counting, kept, done = list[ast.stmt](), list(loop.body), list[ast.stmt]()
    for place, statement in enumerate(loop.body):
        others = {name for s in loop.body if s is not statement for name in _names(s)}
        if (counter := _counter_of(statement)) is None or counter in others:
            continue
        if (needed := _find_needed(loop.body[:place], statement, self_name)) is None:
            continue
        if (counted := _without_number(statement, needed)) is None:
            continue
        if not any(_names(s, ast.Store) & _names(counted) for s in needed):
            needed = []
        if _depends_on_others(loop, statement, [*needed, counted]):
            continue
        only = copy.copy(loop)
        setattr(only, _MARK, True)
        only.body = [*map(copy.deepcopy, needed), counted]
        done += needed
        only.lineno = only.end_lineno = statement.lineno  # the line of the count, not of what stays
        counting.append(only)
        kept.remove(statement)
    if not counting:
        return [loop]
    rest = copy.copy(loop)
    rest.body = kept
    return counting if all(s in done for s in kept) else [*counting, rest]


def _depends_on_others(loop: ast.For, statement: ast.stmt, counting: Sequence[ast.stmt]) -> bool:
    """Whether the statements that count need what other statements of their loop set or change: behind them,
    for the next round, or in place. The loop of the count has none of these."""
    read = {name for s in counting for name in _names(s)}
    others = [s for s in loop.body if s is not statement]
    changed = {name for s in others for name in names_changed_in_place(s)}
    changed |= {name for s in others if s not in counting for name in _names(s, ast.Store)}
    return bool(read & changed)


def _counter_of(statement: ast.stmt) -> str | None:
    """Return the variable that a statement adds to, or the list that it makes longer by one entry."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        return statement.target.id if isinstance(statement.target, ast.Name) else None
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name, value = statement.targets[0].id, statement.value
        if (
            isinstance(value, ast.BinOp)
            and isinstance(value.op, ast.Add)
            and isinstance(value.left, ast.Name)
        ):
            return name if value.left.id == name else None
        return None
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append":
        owner = call.func.value
        return owner.id if isinstance(owner, ast.Name) and len(call.args) == 1 else None
    return None


def _find_needed(before: Sequence[ast.stmt], statement: ast.stmt, self_name: str) -> list[ast.stmt] | None:
    """Return the assignments that a statement needs of those before it in a loop; None if they use the
    module, or if something else sets what it needs."""
    wanted, needed = _names(statement, ast.Load), list[ast.stmt]()
    for earlier in reversed(before):
        if not _names(earlier, ast.Store) & wanted:
            continue
        if not isinstance(earlier, ast.Assign):
            return None
        needed.insert(0, earlier)
        wanted |= _names(earlier, ast.Load)
    return None if self_name in wanted else needed


def _without_number(statement: ast.stmt, needed: Sequence[ast.stmt]) -> ast.stmt | None:
    """Return a statement that counts by a tensor in place of a number; None for any other."""
    counted = copy.deepcopy(statement)
    if isinstance(counted, ast.AugAssign) and (value := _as_tensor(counted.value, needed)) is not None:
        counted.value = value
        return counted
    changed = counted.value if isinstance(counted, ast.Assign | ast.Expr) else None
    if isinstance(changed, ast.BinOp) and (value := _as_tensor(changed.right, needed)) is not None:
        changed.right = value
        return counted
    if isinstance(changed, ast.Call) and (value := _as_tensor(changed.args[0], needed)) is not None:
        changed.args[:1] = [value]
        return counted
    return None


def _as_tensor(value: ast.expr, needed: Sequence[ast.stmt]) -> ast.expr | None:
    """Return a number of values that code counts as an expression of tensors: `int(mask.sum())`,
    `mask.sum().item()`, `len(y[mask])`; None for any other expression."""
    if _is_count(value):
        return value
    if not isinstance(value, ast.Call):
        rows = _rows_of_first_size(value)
        return None if rows is None else _rows_as_tensor(rows, needed)
    if isinstance(value.func, ast.Name) and len(value.args) == 1:
        if value.func.id in ("int", "float"):
            return _as_tensor(value.args[0], needed)
        return _rows_as_tensor(value.args[0], needed) if value.func.id == "len" else None
    if not isinstance(value.func, ast.Attribute):
        return None
    if value.func.attr == "item":
        return value.func.value if _is_count(value.func.value) else None
    return _rows_as_tensor(value.func.value, needed) if value.func.attr in _ROWS else None


def _rows_of_first_size(value: ast.expr) -> ast.expr | None:
    """Return the tensor of `tensor.shape[0]`."""
    if not isinstance(value, ast.Subscript) or not isinstance(value.value, ast.Attribute):
        return None
    is_first = value.value.attr == "shape" and ast.unparse(value.slice) == "0"
    return value.value.value if is_first else None


def _is_count(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _COUNTS
    )


def _rows_as_tensor(rows: ast.expr, needed: Sequence[ast.stmt]) -> ast.expr | None:
    """Return the number of rows that a mask picks, `y[mask]` or `mask.nonzero()`, as the sum of the mask."""
    definitions = dict[str, ast.expr]()
    for statement in needed:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            definitions[statement.targets[0].id] = statement.value
    value = definitions.get(rows.id, rows) if isinstance(rows, ast.Name) else rows
    if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Call):
        value = value.value  # `mask.nonzero(as_tuple=True)[0]`
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "nonzero":
        is_method = not (isinstance(value.func.value, ast.Name) and value.func.value.id == "torch")
        mask = value.func.value if is_method else value.args[0]
    elif isinstance(value, ast.Subscript):
        mask = value.slice
    else:
        return None
    made = definitions.get(mask.id, mask) if isinstance(mask, ast.Name) else mask
    if not isinstance(made, ast.Compare | ast.UnaryOp | ast.BinOp):
        return None
    total = ast.Call(ast.Attribute(copy.deepcopy(mask), "sum", ast.Load()), [], [])
    return ast.fix_missing_locations(ast.copy_location(total, rows))


def _with_tensors_in_sum(statement: ast.Assign, self_name: str) -> ast.stmt:
    """Return `n = sum(int(mask.sum()) for mask in masks)` without `int`, any other assignment as it is."""
    call = statement.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "sum":
        return statement
    parts = call.args[0] if len(call.args) == 1 else None
    if not isinstance(parts, ast.GeneratorExp | ast.ListComp) or self_name in _names(parts):
        return statement
    if (value := _as_tensor(parts.elt, ())) is None:
        return statement
    changed = copy.deepcopy(statement)
    changed.value.args[0].elt = copy.deepcopy(value)  # type: ignore[attr-defined]
    return changed


def _names(tree: ast.AST, kind: type[ast.expr_context] | None = None) -> set[str]:
    return {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and (kind is None or isinstance(n.ctx, kind))
    }
