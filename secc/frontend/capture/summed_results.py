"""Finds which scalars of blocks and of users' autograd functions are sums over the samples: a loop over
samples that is one block adds up what each gives, and so does a cross entropy that computes its own gradient.

Shapes do not tell a sum from a mean or a maximum, numbers do: forward is run on samples together and on
each alone, in plain PyTorch. What adds up for several batches is a sum; the comparison of the plan with plain
PyTorch looks at it again, with gradients.
"""

from __future__ import annotations

import contextlib
import io
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from secc.frontend.dataset.survey import DatasetSurvey
from secc.runtime.model.function_blocks import FunctionBlock, function_blocks_of, intercepted_functions
from secc.runtime.model.source_lines import current_source_line
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.schema import FUNCTION_PREFIX
from secc.runtime.recorder import take_at_path
from secc.runtime.recorder.interception import intercept_autograd_functions
from secc.runtime.sections.autograd_functions import (
    UserFunctionCall,
    find_user_function,
    returned_tensors,
)
from secc.runtime.training.eager_watch import run_forward

_MOST_BYTES = 2 << 30  # of a model's parameters
_TOLERANCE = 1e-4  # of the sum of the summands' sizes

# The path of a block, or the name and the source line of a function, and where in its result the scalar is.
ScalarPlace = tuple[str, str]


def mark_summed_results(
    user: UserModel, meta: nn.Module, survey: DatasetSurvey, graphs: Sequence[fx.Graph], paths: Sequence[str]
) -> None:
    """Marks the nodes of captured graphs that take a sum over the samples from what a block at one of
    `paths`, or an autograd function, returns. Nothing is marked for a model that is too large to be run and
    has no small one."""
    nodes = [n for graph in graphs for n in graph.nodes if _is_float_scalar(n)]
    scalars = [(n, place) for n in nodes if (place := _find_place(n, paths)) is not None]
    if not scalars:
        return
    with trial_model(user, meta) as model:
        summed = set() if model is None else _find_sums(user, model, survey, {place for _, place in scalars})
    for node, place in scalars:
        node.meta["summed"] = place in summed


@contextlib.contextmanager
def trial_model(user: UserModel, meta: nn.Module) -> Iterator[nn.Module | None]:
    """Gives the model with weights, or the small one in place of a large one, to be run without output and
    with random numbers of its own; None if it is too large."""
    is_large = sum(p.numel() * 4 for p in meta.parameters()) > _MOST_BYTES
    with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(0)
        yield user.build_small_model() if is_large else user.build_model()


def _is_float_scalar(node: fx.Node) -> bool:
    return node.meta.get("shape") == () and node.meta["dtype"].is_floating_point


def _find_place(node: fx.Node, paths: Sequence[str]) -> ScalarPlace | None:
    """Returns the place of a scalar that a block at one of `paths` or an autograd function returns; None for
    any other."""
    if node.target is take_at_path:
        path = str(node.args[0].target)  # type: ignore[union-attr]
        return (path, str(node.args[1])) if path in paths else None
    taken: Any = node.args[0] if node.target is operator.getitem else node
    if isinstance(taken, fx.Node) and isinstance(taken.target, UserFunctionCall):
        index = node.args[1] if node is not taken else 0
        return f"{taken.target} {taken.meta['where']}", str(index)
    return None


def _find_sums(
    user: UserModel, model: nn.Module, survey: DatasetSurvey, wanted: set[ScalarPlace]
) -> set[ScalarPlace]:
    """Returns those of the wanted that add up over the samples in batches of each pattern."""
    found, seen = set(wanted), set[ScalarPlace]()
    for pattern in survey.micro_batch_patterns():
        for samples in _iter_batches(survey, pattern):
            try:
                together = _run_forward(user, model, samples, wanted)
                alone = [_run_forward(user, model, [s], wanted) for s in samples]
            except Exception:  # whatever the user's code raises
                return set()
            seen |= together.keys()
            for scalar in wanted:
                parts = [a.get(scalar, 0.0) for a in alone]
                error = abs(together.get(scalar, 0.0) - sum(parts))
                if not error <= _TOLERANCE * sum(map(abs, parts)):
                    found.discard(scalar)
    return found & seen


def _iter_batches(survey: DatasetSurvey, pattern: frozenset[str]) -> Iterator[list[dict[str, Any]]]:
    own = survey.without_crops().compose_batches(pattern)
    yield own[-1]
    yield own[-2]


def _run_forward(
    user: UserModel, model: nn.Module, samples: Sequence[Mapping[str, Any]], wanted: set[ScalarPlace]
) -> dict[ScalarPlace, float]:
    """Runs forward on samples; returns the scalars of the blocks and functions that it calls, added up over
    their calls."""
    observer = _ScalarObserver(model, wanted)
    with (
        torch.set_grad_enabled(observer.observes_functions),
        intercepted_functions(model, observer.run_block),
        intercept_autograd_functions(observer),
    ):
        run_forward(model, user.collate(samples))
    return observer.values


class _ScalarObserver:
    """Adds up what calls of blocks and of autograd functions return at the wanted places."""

    paused = False

    def __init__(self, model: nn.Module, wanted: set[ScalarPlace]) -> None:
        self._wanted, self.values = wanted, dict[ScalarPlace, float]()
        self._paths = {block: path for path, block in function_blocks_of(model).items()}
        self.observes_functions = any(name.startswith(FUNCTION_PREFIX) for name, _ in wanted)

    def run_block(self, block: FunctionBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a block that forward calls."""
        result = block.call_directly(args, kwargs)
        self._add_up(self._paths[block], lambda place: take_at_path(result, place))
        return result

    def apply_function(self, cls: Any, args: Any, run: Callable[..., Any]) -> Any:
        """Runs a function that forward applies."""
        result = run(*args)
        if (function := find_user_function(cls)) is not None:
            tensors = returned_tensors(result)
            self._add_up(f"{function} {current_source_line()}", lambda place: tensors[int(place)])
        return result

    def _add_up(self, name: str, take: Callable[[str], Any]) -> None:
        for scalar in (s for s in self._wanted if s[0] == name):
            self.values[scalar] = self.values.get(scalar, 0.0) + float(take(scalar[1]).detach())
