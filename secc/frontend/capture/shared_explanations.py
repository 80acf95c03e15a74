"""Expressions that other patterns found at the same place, which decide where a pattern's own captures
allow several.

If all samples with only a sound have one row of it, the number of rows and the number of samples explain
the same sizes. The next sample may have two rows, and the other patterns tell which of both is meant.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from torch import fx

from secc.frontend.capture.size_fit import SizeFitter
from secc.ir.dialect import argument_template
from secc.ir.dialect.size_expr import Expr


class SharedExplanations:
    """Expressions by the place in the user's code and the op that they explain, in the order in which they
    were found."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[str, str], dict[Expr, None]] = {}
        self._counted_places = set[tuple[str, str]]()

    def record_node(self, node: fx.Node) -> None:
        """Keeps the expressions in a node's explained arguments and shape."""
        arguments = (node.meta.get(part) for part in ("args", "kwargs", "shape"))
        for leaf in (leaf for a in arguments for leaf in argument_template.CallArguments([a]).leaves()):
            if isinstance(leaf, sympy.Expr) and leaf.free_symbols:
                self._by_place.setdefault(_node_place(node), {})[leaf] = None

    def start_pattern(self) -> None:
        """Forgets which rows are counted: only paths of one pattern count the same rows."""
        self._counted_places.clear()

    def record_counted_rows(self, node: fx.Node) -> None:
        """Keeps that values of the inputs decide how many rows a node has."""
        self._counted_places.add(_node_place(node))

    def has_counted_rows(self, node: fx.Node) -> bool:
        """Whether values decide the rows at the node's place on another path, where sizes did not explain
        them. `labels != -100` picks all answers where nothing is padded, but a loss must have one divisor."""
        return _node_place(node) in self._counted_places

    def find_fitting(self, node: fx.Node, values: Sequence[int], fitter: SizeFitter) -> Expr | None:
        """Returns an expression known at the node's place that gives `values` at the observations of
        `fitter` and in which every symbol varies; None if there is none."""
        return next(
            (
                e
                for e in self._by_place.get(_node_place(node), ())
                if fitter.evaluate_column(e) == tuple(values)
            ),
            None,
        )


def _node_place(node: fx.Node) -> tuple[str, str]:
    return node.meta.get("where", ""), str(node.target)
