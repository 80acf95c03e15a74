"""Finds blocks with results of a size that values decide, such as how many keypoints a detector finds: all
batches that were recorded may have had the same number, and another batch of the same sizes has another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from secc.errors import UserError
from secc.frontend.capture.capture import Capture
from secc.ir.dialect.size_expr import evaluate_size
from secc.runtime.model.nested_batch import unflatten_batch
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import read_symbol_sizes
from secc.runtime.plan.schema import Symbol
from secc.runtime.recorder.nested_values import iter_tensors, take_at_path


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
            model(**unflatten_batch(batch))
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
