"""Random ops: which entries of each one's result belong to which sample, found by comparing its shapes in
several captures.

A dim that is a multiple of a number of rows (`B`, `B*S`, `12*n_pixel_values`) runs over the samples' rows,
one sample after another. An op without such a dim gives numbers that all samples share. An op of neither
kind, and one that no rank can draw sample by sample, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from secc.errors import UserError
from secc.frontend.capture.generalize import Observed
from secc.frontend.capture.size_fit import Fitter
from secc.frontend.dataset.input_symbols import Inputs
from secc.ir.dialect import size_expr
from secc.ir.dialect.size_expr import Expr
from secc.runtime.plan.schema import Draw
from secc.runtime.recorder.recording import Drawn

_REMEDY = "set dropout probabilities to 0, or put the module into eval mode in model()"
_SAMPLES = "draw numbers for a tensor whose first dim is the samples', or switch the random op off"


@dataclass
class _Seen:
    """A random op in all captures that met it."""

    first: Drawn
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[Mapping[str, int]] = field(default_factory=list)


def find(observed: Iterable[Observed], inputs: Inputs) -> list[Draw]:
    """The random ops that captures met. Raises UserError, by place, for one that cannot be tied to
    samples."""
    seen: dict[str, _Seen] = {}
    groups: dict[frozenset[str], list[Sequence[Drawn]]] = {}
    for o in observed:
        groups.setdefault(frozenset(o.recording.inputs), []).append(o.recording.draws)
        for drawn in o.recording.draws:
            found = seen.setdefault(drawn.call, _Seen(drawn))
            found.shapes.append(drawn.shape)
            found.sizes.append(o.sizes)
    for group in groups.values():
        _check_counts(group)
    rows = {s.name for s in inputs.symbols if s.kind == "rows"}
    return [_rule(s, rows) for s in seen.values()]


def _check_counts(draws: Sequence[Sequence[Drawn]]) -> None:
    """Refuse a place that draws more often in one batch than in another: its draws belong to other samples
    each time."""
    met = [Counter(drawn.name for drawn in one) for one in draws]
    for drawn in (drawn for one in draws for drawn in one):
        if len({counts[drawn.name] for counts in met if drawn.name in counts}) > 1:
            message = f"{drawn.op} draws random numbers in a loop whose length moves with the batch"
            raise UserError(message, drawn.where, "draw once for all, with a dim for the samples' rows")


def _rule(seen: _Seen, rows: set[str]) -> Draw:
    drawn = seen.first
    if not drawn.known:
        raise UserError(
            f"{drawn.op} draws random numbers, which cannot be tied to samples", drawn.where, _REMEDY
        )
    if len({len(s) for s in seen.shapes}) > 1:
        raise _unexplained(seen)
    fitter = Fitter(seen.sizes)
    dims = [fitter.integer(values) for values in zip(*seen.shapes, strict=True)]
    over = [(d, e) for d, e in enumerate(dims) if e is not None and _adds_up(e, rows)]
    if not over:
        if any(e is None or size_expr.symbols(e) & rows for e in dims):
            raise _unexplained(seen)
        return Draw(drawn.call, (), "0", drawn.where)
    if ".randperm" in drawn.op or (".multinomial" in drawn.op and over[0][0] == len(dims) - 1):
        raise UserError(
            f"{drawn.op} mixes the samples of a batch", drawn.where, "permute or choose within each sample"
        )
    first = over[0][1]
    return Draw(drawn.call, tuple(d for d, e in over if e == first), size_expr.text(first), drawn.where)


def _adds_up(size: Expr, rows: set[str]) -> bool:
    """Whether a size is the sum of its values for the parts of a batch: a multiple of one number of rows."""
    names = size_expr.symbols(size) & rows
    if len(names) != 1:
        return False
    (name,) = names
    symbol = size_expr.symbol(name)
    return bool((size.diff(symbol) * symbol - size).expand() == 0) and name not in size_expr.symbols(
        size.diff(symbol)
    )


def _unexplained(seen: _Seen) -> UserError:
    shapes = ", ".join(str(list(s)) for s in list(dict.fromkeys(seen.shapes))[:4])
    drawn = seen.first
    message = f"{drawn.op} draws random numbers, and which of them belong to which sample cannot be told (shapes {shapes})"
    return UserError(message, drawn.where, _SAMPLES)
