"""Finds blocks of the user's functions and statements that give a sample another result when certain other
samples come with it: such code is a block because the captures of several batches differ, and it may do
something else for one number of samples (`torch.cross` without a dim works along the samples if there are
three).

Shapes do not tell rows that each sample gives alone from others, numbers do: forward is run on samples
together and on some of them alone, in plain PyTorch. The comparison of the plan with plain PyTorch has
micro-batches of few sizes only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from secc.frontend.capture.summed_results import trial_model
from secc.frontend.dataset.input_symbols import ModelInputs
from secc.frontend.dataset.survey import DatasetSurvey, Sample
from secc.runtime.model.function_blocks import FunctionBlock, function_blocks_of, intercepted_functions
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import pad_batch, read_symbol_sizes
from secc.runtime.recorder import Hazard, take_at_path
from secc.runtime.recorder.nested_values import iter_tensors
from secc.runtime.training.eager_watch import run_forward

_BATCHES = 4  # of each pattern, with 2, 3, 4 and 5 samples
_SECONDS = 20.0  # of processor time, after which no further batch is compared
_TOLERANCE = 1e-3  # of the largest entry, or
_ROUNDINGS = 16  # units in the last place of the model's coarsest dtype

_SampleDims = Mapping[tuple[str, str], int]  # the dim of the samples, by a block's path and a result's place
_Results = dict[tuple[str, str, int], torch.Tensor]  # by path, place and number of the call


def find_mixed_rows(
    user: UserModel, meta: nn.Module, survey: DatasetSurvey, inputs: ModelInputs, graphs: Sequence[fx.Graph]
) -> list[Hazard]:
    """Returns a hazard for each function or range of statements that is a block of captured graphs and does
    not keep the samples of its results apart. Returns none for a model that is too large to be run and has no
    small one."""
    blocks, samples = function_blocks_of(meta), inputs.symbols[0].name
    dims, lines = dict[tuple[str, str], int](), dict[str, str]()
    for node in (n for graph in graphs for n in graph.nodes if n.target is take_at_path):
        call, place = node.args
        own = [d for d, size in enumerate(node.meta["shape"]) if str(size) == samples]
        if call.target in blocks and len(own) == 1 and node.meta["dtype"].is_floating_point:
            dims[call.target, place], lines[call.target] = own[0], call.meta["where"]
    if not dims:
        return []
    with trial_model(user, meta) as model:
        found = {} if model is None else dict(_find_mixing(user, model, survey, inputs, dims))
    return [Hazard(path, "mixed_rows", f"among {n} of them", lines[path]) for path, n in found.items()]


def _find_mixing(
    user: UserModel, model: nn.Module, survey: DatasetSurvey, inputs: ModelInputs, dims: _SampleDims
) -> Iterator[tuple[str, int]]:
    """Yields blocks that mix samples, and a number of samples at which they do."""
    end = time.process_time() + _SECONDS
    for pattern in survey.micro_batch_patterns():
        for samples in survey.without_crops().compose_batches(pattern)[:_BATCHES]:
            if time.process_time() > end:
                return
            try:
                yield from ((path, len(samples)) for path in _compare(user, model, inputs, dims, samples))
            except Exception:  # whatever the user's code raises, or padding that follows no rule
                continue


def _compare(
    user: UserModel, model: nn.Module, inputs: ModelInputs, dims: _SampleDims, samples: Sequence[Sample]
) -> Iterator[str]:
    """Yields blocks in which the first or the last of some samples has other rows than it has alone, padded
    as much."""
    batch = user.collate(samples)
    widths = read_symbol_sizes(batch, [s for s in inputs.symbols if s.is_padded])
    alone = [pad_batch(user.collate([s]), inputs.inputs, widths) for s in (samples[0], samples[-1])]
    together, redrawn = (_run_blocks(model, batch, seed) for seed in (0, 1))
    own_results = [_run_blocks(model, b, 0) for b in alone if b.keys() == batch.keys()]
    unit = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
    for key, rows in together.items():
        path, place, _ = key
        if (path, place) not in dims or key not in redrawn or not torch.equal(rows, redrawn[key]):
            continue
        own_rows = [r[key] for r in own_results if key in r]
        if any(_lacks_row(rows, own, dims[path, place], unit) for own in own_rows):
            yield path


def _run_blocks(model: nn.Module, batch: Mapping[str, Any], seed: int) -> _Results:
    """Runs forward; returns the tensors that its functions and statements return."""
    results, calls = _Results(), dict[str, int]()
    paths = {block: path for path, block in function_blocks_of(model).items()}

    def run_block(block: FunctionBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = block.call_directly(args, kwargs)
        path = paths[block]
        calls[path] = calls.get(path, 0) + 1
        results.update({(path, place, calls[path]): t.detach() for place, t in iter_tensors(result)})
        return result

    torch.manual_seed(seed)
    with intercepted_functions(model, run_block):
        run_forward(model, batch)
    return results


def _lacks_row(rows: torch.Tensor, own: torch.Tensor, dim: int, unit: float) -> bool:
    """Whether no row of a result is what one sample gives alone. Rows may have another order."""
    if own.dim() != rows.dim() or own.shape[dim] != 1:
        return False
    if rows.shape[:dim] + rows.shape[dim + 1 :] != own.shape[:dim] + own.shape[dim + 1 :]:
        return False
    limit = max(_TOLERANCE, _ROUNDINGS * unit) * max(float(own.abs().max()), float(rows.abs().max()))
    off = (rows - own).abs().movedim(dim, 0).flatten(1).amax(1)
    return bool(torch.isfinite(off).all() and off.min() > limit)
