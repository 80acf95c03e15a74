"""Finds which scalars of blocks are sums over the samples: a loop over samples that is one block adds up what
each gives.

Shapes do not tell a sum from a mean or a maximum, numbers do: the block is run on samples together and on
each alone, in plain PyTorch. What adds up for several batches is a sum; the comparison of the plan with plain
PyTorch looks at it again, with gradients.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from secc.frontend.dataset.survey import DatasetSurvey
from secc.runtime.model.function_blocks import FunctionBlock, function_blocks_of, intercepted_functions
from secc.runtime.model.nested_batch import unflatten_batch
from secc.runtime.model.user_file import UserModel
from secc.runtime.recorder import take_at_path

_MOST_BYTES = 2 << 30  # of a model's parameters
_TOLERANCE = 1e-4  # of the sum of the summands' sizes

BlockScalar = tuple[str, str]  # the path of a block, and where in its result the scalar is


def mark_summed_results(
    user: UserModel, meta: nn.Module, survey: DatasetSurvey, graphs: Sequence[fx.Graph], paths: Sequence[str]
) -> None:
    """Marks the nodes of captured graphs that take a sum over the samples from what a block at one of `paths`
    returns. Nothing is marked for a model that is too large to be run."""
    nodes = [n for graph in graphs for n in graph.nodes if n.target is take_at_path]
    scalars = [n for n in nodes if _is_float_scalar(n) and str(n.args[0].target) in paths]
    if not scalars or sum(p.numel() * 4 for p in meta.parameters()) > _MOST_BYTES:
        return
    wanted = {(str(n.args[0].target), str(n.args[1])) for n in scalars}
    with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(0)
        model = user.build_model()
        summed = _find_sums(user, model, survey, wanted)
    for node in scalars:
        node.meta["summed"] = (str(node.args[0].target), str(node.args[1])) in summed


def _is_float_scalar(node: fx.Node) -> bool:
    return node.meta.get("shape") == () and node.meta["dtype"].is_floating_point


def _find_sums(
    user: UserModel, model: nn.Module, survey: DatasetSurvey, wanted: set[BlockScalar]
) -> set[BlockScalar]:
    """Returns those of the wanted that add up over the samples in batches of each pattern."""
    found, seen = set(wanted), set[BlockScalar]()
    for pattern in survey.micro_batch_patterns():
        for samples in _iter_batches(survey, pattern):
            try:
                together = _run_blocks(user, model, samples, wanted)
                alone = [_run_blocks(user, model, [s], wanted) for s in samples]
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


def _run_blocks(
    user: UserModel, model: nn.Module, samples: Sequence[Mapping[str, Any]], wanted: set[BlockScalar]
) -> dict[BlockScalar, float]:
    """Runs forward on samples; returns the scalars of the blocks that it calls, added up over their calls."""
    paths = {block: path for path, block in function_blocks_of(model).items()}
    values = dict[BlockScalar, float]()

    def run_and_add(block: FunctionBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = block.call_directly(args, kwargs)
        for scalar in wanted:
            if scalar[0] == paths[block]:
                number = take_at_path(result, scalar[1])
                values[scalar] = values.get(scalar, 0.0) + float(number)
        return result

    with torch.no_grad(), intercepted_functions(model, run_and_add):
        model(**unflatten_batch(user.collate(samples)))
    return values
