"""Finds which entries of a random op's result belong to which sample, by comparing its shapes in several
captures.

A dim that is a multiple of a number of rows (`B`, `B*S`, `12*n_pixel_values`) runs over the samples' rows,
one sample after another. An op without such a dim draws numbers that all samples share. Any other op, and
one that no rank can draw sample by sample, is refused.

A loop over time steps draws as often as the longest sample of a batch is long. If each of its draws runs over
the samples' rows, those behind a sample's end belong to its padding, and one entry stands for all of them. A
loop over samples (a matching of each sample's objects, a choice of its patches) draws as often as there are
rows: each of its draws belongs to one of them, in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from secc.errors import UserError
from secc.frontend.capture.generalize import ObservedRecording
from secc.frontend.capture.size_fit import SizeFitter
from secc.frontend.dataset.input_symbols import ModelInputs
from secc.ir.dialect import size_expr
from secc.ir.dialect.size_expr import Expr
from secc.runtime.plan.schema import RandomOp
from secc.runtime.randomness.micro_batch_draws import loop_draw_name
from secc.runtime.recorder.recording import RandomOpCall

_UNTIED_REMEDY = "set dropout probabilities to 0, or put the module into eval mode in model()"
_ROWS_REMEDY = "draw numbers for a tensor with the samples as first dim, or switch the random op off"


class RandomOpError(UserError):
    """A random op that cannot be tied to samples."""


@dataclass
class _SeenRandomOp:
    """A random op in all captures that met it, with its shapes and their symbol values."""

    first_draw: RandomOpCall
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[Mapping[str, int]] = field(default_factory=list)


def find_random_ops(observed: Sequence[ObservedRecording], inputs: ModelInputs) -> list[RandomOp]:
    """Returns the random ops that captures met. Raises RandomOpError, with place, for one that cannot be tied
    to samples."""
    seen_ops: dict[str, _SeenRandomOp] = {}
    groups: dict[frozenset[str], list[Sequence[RandomOpCall]]] = {}
    for o in observed:
        groups.setdefault(frozenset(o.recording.inputs), []).append(o.recording.draws)
        for drawn in o.recording.draws:
            seen_op = seen_ops.setdefault(drawn.draw_name, _SeenRandomOp(drawn))
            seen_op.shapes.append(drawn.shape)
            seen_op.sizes.append(o.sizes)
    rows = {s.name for s in inputs.symbols if s.kind == "rows"}
    loops = {site for group in groups.values() for site in _sites_of_loops(group)}
    sites: dict[str, list[_SeenRandomOp]] = {}
    for seen in seen_ops.values():
        sites.setdefault(seen.first_draw.call_site_name, []).append(seen)
    found = list[RandomOp]()
    for site, ops in sites.items():
        if site not in loops:
            found += [_make_draw(seen, rows) for seen in ops]
            continue
        try:
            found.append(_make_loop_draw(ops, rows))
        except RandomOpError:
            if (draw := _make_draw_of_rounds(ops[0].first_draw, observed, rows)) is None:
                raise
            found.append(draw)
    return found


def _sites_of_loops(draws: Sequence[Sequence[RandomOpCall]]) -> set[str]:
    """Returns the places that draw more often in one batch than in another."""
    met = [Counter(drawn.call_site_name for drawn in one) for one in draws]
    sites = {site for counts in met for site in counts}
    return {site for site in sites if len({counts[site] for counts in met if site in counts}) > 1}


def _make_loop_draw(ops: Sequence[_SeenRandomOp], rows: set[str]) -> RandomOp:
    """Returns the entry for all draws of a loop over time steps: each of them runs over the same rows."""
    found = list[RandomOp]()
    for seen in ops:
        drawn = seen.first_draw
        try:
            draw = _make_draw(seen, rows)
        except RandomOpError:
            draw = None
        if draw is None or not draw.dims:
            raise RandomOpError(
                f"{drawn.op} draws random numbers in a loop with a length that differs between batches",
                drawn.where,
                "draw once for all, or in each round of the loop, with a dim for the samples' rows",
            )
        found.append(replace(draw, call=loop_draw_name(drawn.call_site_name)))
        if found[0] != found[-1]:
            raise _unlike_loop_error(seen, found[0], found[-1])
    return found[0]


def _make_draw_of_rounds(
    drawn: RandomOpCall, observed: Sequence[ObservedRecording], rows: set[str]
) -> RandomOp | None:
    """Returns the entry for all draws of a loop over rows, which has as many rounds as a batch has rows, or
    of one with rounds that all samples share; None for other loops.

    The loop is in the innermost function that draws a multiple of the rows in each of its runs: it may be
    called by another loop, and each of its rounds may draw several times.
    """
    if not drawn.is_supported:
        return None
    call = loop_draw_name(drawn.call_site_name)
    of_batches = [
        (o.sizes, calls)
        for o in observed
        if (calls := [d for d in o.recording.draws if d.call_site_name == drawn.call_site_name])
    ]
    for level in range(len(drawn.runs) + 1):  # from the innermost function out; the whole forward at last
        counts = [
            (sizes, count)
            for sizes, calls in of_batches
            for count in Counter(d.runs[level : level + 1] for d in calls).values()
        ]
        for name in sorted(rows & set(of_batches[0][0]), key=lambda n: n != "B"):
            times = {divmod(count, sizes[name]) if sizes[name] else (0, 1) for sizes, count in counts}
            if len({sizes[name] for sizes, _ in counts}) > 1 and len(times) == 1:
                (each, rest), size = times.pop(), size_expr.size_symbol(name)
                if not rest:
                    return RandomOp(call, (), size_expr.format_expr(each * size), drawn.where)
    totals = SizeFitter([sizes for sizes, _ in of_batches]).fit_integer([len(c) for _, c in of_batches])
    shared = totals is not None and not size_expr.symbol_names(totals) & rows
    return RandomOp(call, (), "0", drawn.where) if shared else None


def _unlike_loop_error(seen: _SeenRandomOp, one: RandomOp, other: RandomOp) -> RandomOpError:
    drawn = seen.first_draw
    message = (
        f"{drawn.op} draws random numbers in a loop with a length that differs between batches, once with "
        f"{one.rows} rows and once with {other.rows}"
    )
    return RandomOpError(message, drawn.where, "let each round draw for the same rows, in the same dims")


def _make_draw(seen: _SeenRandomOp, rows: set[str]) -> RandomOp:
    drawn = seen.first_draw
    if not drawn.is_supported:
        raise RandomOpError(
            f"{drawn.op} draws random numbers, which cannot be tied to samples", drawn.where, _UNTIED_REMEDY
        )
    if len({len(s) for s in seen.shapes}) > 1:
        raise _unexplained_rows_error(seen)
    fitter = SizeFitter(seen.sizes)
    dims = [fitter.fit_integer(values) for values in zip(*seen.shapes, strict=True)]
    over = [(d, e) for d, e in enumerate(dims) if e is not None and _is_additive(e, rows)]
    if not over:
        if any(e is None or size_expr.symbol_names(e) & rows for e in dims):
            raise _unexplained_rows_error(seen)
        return RandomOp(drawn.draw_name, (), "0", drawn.where)
    if ".randperm" in drawn.op or (".multinomial" in drawn.op and over[0][0] == len(dims) - 1):
        raise RandomOpError(
            f"{drawn.op} mixes the samples of a batch", drawn.where, "permute or choose within each sample"
        )
    first = over[0][1]
    return RandomOp(
        drawn.draw_name, tuple(d for d, e in over if e == first), size_expr.format_expr(first), drawn.where
    )


def _is_additive(size: Expr, rows: set[str]) -> bool:
    """Whether a size is the sum of its values for the parts of a batch: a multiple of one number of rows."""
    names = size_expr.symbol_names(size) & rows
    if len(names) != 1:
        return False
    (name,) = names
    symbol = size_expr.size_symbol(name)
    return bool((size.diff(symbol) * symbol - size).expand() == 0) and name not in size_expr.symbol_names(
        size.diff(symbol)
    )


def _unexplained_rows_error(seen: _SeenRandomOp) -> RandomOpError:
    shapes = ", ".join(str(list(s)) for s in list(dict.fromkeys(seen.shapes))[:4])
    drawn = seen.first_draw
    message = (
        f"{drawn.op} draws random numbers, and its shapes do not tell which of them belong to which sample "
        f"(shapes {shapes})"
    )
    return RandomOpError(message, drawn.where, _ROWS_REMEDY)
