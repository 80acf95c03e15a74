"""Finds blocks with results of a size that values decide, such as how many keypoints a detector finds: all
batches that were recorded may have had the same number, and another batch of the same sizes has another one.
Or as many as the longest sample has: a micro-batch that is padded to the width of the global batch has fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn

from secc.errors import UserError
from secc.frontend.capture.capture import Capture
from secc.ir.dialect.size_expr import evaluate_size
from secc.runtime.model.source_lines import forward_source_line
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import pad_batch, read_symbol_sizes
from secc.runtime.plan.schema import Input, Symbol
from secc.runtime.recorder.nested_values import iter_tensors, take_at_path
from secc.runtime.training.eager_watch import run_forward


def find_size_of_values(
    user: UserModel,
    model: nn.Module,
    capture: Capture,
    symbols: Sequence[Symbol],
    batches: Sequence[Sequence[Mapping[str, Any]]],
) -> UserError | None:
    """Returns an error that names a block with a result of another size than captures showed, in one of
    `batches` of samples; None if there is none. Sizes that the capture knows to depend on values are not
    compared."""
    modules = dict(model.named_modules())
    for samples in batches:
        batch = user.collate(samples)
        sizes = read_symbol_sizes(batch, symbols, len(samples))
        pattern = capture.optional_keys & batch.keys()
        results = _record_results(model, [p for p in capture.blocks if p in modules], batch)
        for case in capture.cases:
            if case.pattern != pattern or case.is_fallback:
                continue
            for path, name, captured, tensor in _pair_results(case.generic.graph, results):
                expected = _evaluate_shape(captured, sizes)
                if expected is None or len(expected) != tensor.dim() or expected == [*tensor.shape]:
                    continue
                dim = next(d for d, (a, b) in enumerate(zip(expected, tensor.shape, strict=True)) if a != b)
                return UserError(
                    f"a size of what {path} returns depends on values that it computes: dim {dim} of"
                    f" {name or 'its result'} has {tensor.shape[dim]} entries where {expected[dim]} were"
                    " expected by the other batches",
                    capture.blocks[path].where,
                    "let inputs decide sizes: count in dataset(), or fill up to a fixed number of entries,"
                    " with a mask by which the loss leaves the others out",
                )
    return None


def find_result_without_padding(
    user: UserModel,
    model: nn.Module,
    inputs: Sequence[Input],
    symbols: Sequence[Symbol],
    samples: Sequence[Mapping[str, Any]],
) -> UserError | None:
    """Returns an error that names the innermost module with a result that is longer for a longer sample, but
    not for the same sample with padding; None if there is none."""
    for symbol in (s for s in symbols if s.is_padded):
        alone = [user.collate([s]) for s in samples]
        lengths = [read_symbol_sizes(batch, [symbol])[symbol.name] for batch in alone]
        short, long = (alone[lengths.index(n)] for n in (min(lengths), max(lengths)))
        widths = {
            s.name: max(read_symbol_sizes(b, [s])[s.name] for b in (short, long))
            for s in symbols
            if s.is_padded
        }
        try:
            padded = pad_batch(short, inputs, widths)
        except UserError:
            continue
        seen = [_record_shapes(model, batch) for batch in (short, padded, long)]
        for (path, own, found), (padded_path, wider, same), (long_path, _, longer) in zip(
            *seen, strict=False
        ):
            if not path == padded_path == long_path:
                break
            if own != wider and found == same and len(found) == len(longer) and found != longer:
                dim, size, expected = next(
                    (d, a, b)
                    for ours, theirs in zip(found, longer, strict=True)
                    for d, (a, b) in enumerate(zip(ours, theirs, strict=False))
                    if a != b
                )
                module = model.get_submodule(path)
                return UserError(
                    f"{path} ({type(module).__name__}) returns as much as the longest of its samples has,"
                    f" not what its padded inputs have: in a micro-batch that is padded to the width of the"
                    f" global batch, dim {dim} of its result has {size} entries in place of {expected}",
                    forward_source_line(type(module)),
                    "let its result be as wide as its input, as pad_packed_sequence with"
                    " total_length=x.shape[1] or F.pad make it",
                )
    return None


_Shapes = tuple[tuple[int, ...], ...]


def _record_shapes(model: nn.Module, batch: Mapping[str, Any]) -> list[tuple[str, _Shapes, _Shapes]]:
    """Returns path, shapes of arguments and shapes of results of all calls of submodules, in the order in
    which plain PyTorch completes them; those before the first that fails."""
    found = list[tuple[str, _Shapes, _Shapes]]()

    def make_hook(path: str) -> Any:
        def record_shapes(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            found.append((path, _shapes_in((args, kwargs)), _shapes_in(out)))

        return record_shapes

    hooks = [
        module.register_forward_hook(make_hook(path), with_kwargs=True)
        for path, module in model.named_modules()
        if path
    ]
    try:
        with torch.no_grad(), suppress(Exception):  # whatever the user's code raises for padded inputs
            run_forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _shapes_in(value: Any) -> _Shapes:
    return tuple(tuple(t.shape) for _, t in iter_tensors(value))


def _record_results(
    model: nn.Module, paths: Sequence[str], batch: Mapping[str, Any]
) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Returns the tensors of each call of each block by their access paths, as plain PyTorch computes
    them."""
    found: dict[str, list[dict[str, torch.Tensor]]] = {path: [] for path in paths}

    def make_hook(path: str) -> Any:
        def record_result(_module: nn.Module, _args: Any, out: Any) -> None:
            found[path].append(dict(iter_tensors(out)))

        return record_result

    hooks = [model.get_submodule(path).register_forward_hook(make_hook(path)) for path in paths]
    try:
        with torch.no_grad():
            run_forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _pair_results(
    graph: fx.Graph, results: Mapping[str, Sequence[Mapping[str, torch.Tensor]]]
) -> Iterator[tuple[str, str, Sequence[Any], torch.Tensor]]:
    """Yields block, access path, captured shape and tensor of each result of each call of a block that was
    called as often as in the capture."""
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    for path, nodes in calls.items():
        if len(nodes) != len(results.get(path, ())):
            continue
        for node, tensors in zip(nodes, results[path], strict=True):
            for out in (u for u in node.users if u.target is take_at_path):
                if (tensor := tensors.get(name := str(out.args[1]))) is not None:
                    yield path, name, out.meta["shape"], tensor


def _evaluate_shape(shape: Sequence[Any], sizes: Mapping[str, int]) -> list[int] | None:
    """Returns the shape at these sizes; None if it has symbols that inputs' values decide."""
    try:
        return [int(evaluate_size(dim, sizes)) for dim in shape]
    except ValueError:
        return None
