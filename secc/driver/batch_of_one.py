"""Explains why plain PyTorch gives a sample alone another gradient than twice in one batch: its forward lets
samples of a batch see each other a little, which float64 tells from rounding, its backward computes with the
whole batch (a hook that divides by a norm), or an operator is wrong for batches of one sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from secc.errors import UserError
from secc.runtime.model.source_lines import format_source_line, forward_source_line, is_internal_file
from secc.runtime.model.user_file import UserModel, extract_loss
from secc.runtime.recorder.nested_values import iter_tensors
from secc.runtime.training.eager_reference import (
    LossAndGradients,
    ResultDifference,
    compare_results,
    run_eager,
)
from secc.runtime.training.eager_watch import run_forward
from secc.runtime.training.widened_floats import widen_batch, widened_floats

_FAULT_TOLERANCES = 100  # from here on a gradient is wrong and not only rounded otherwise; float64 tells, too
_SAME = 1e-10  # relative; of values in float64


def find_fault_of_one(
    user: UserModel, model: nn.Module, samples: Sequence[Mapping[str, Any]]
) -> UserError | None:
    """Returns an error if a sample alone has another gradient than twice in one batch, while the loss is the
    same within the tolerances of float32; None if there is no such sample.

    It names the module that makes other values of a sample if another one is in its batch, or else says that
    a backward computes with the batch (two and three copies differ, too) or that an operator is wrong. The
    model draws no random numbers.
    """
    for sample in samples:
        difference = _compare_copies(user, model, sample, (1, 2))
        if difference.loss > 1:
            continue
        worst, off = difference.worst, f"{difference.gradient:.3g} tolerances"
        if difference.gradient <= _FAULT_TOLERANCES:
            worst, share = _find_worst_in_float64(user, model, sample)
            if not worst:
                continue
            off = f"{share:.3g} of its largest entry, in float64, too"
        what = (
            "plain PyTorch gives a sample alone another gradient than twice in one batch, although the loss"
            f" is the same: {worst} is off by {off}"
        )
        path = find_coupling_module(user, model, sample)
        if path:
            return UserError(
                f"{what}; {path} is the first module to return other values of a sample if another one is in"
                " its batch, by less than float32 shows in the loss",
                forward_source_line(type(model.get_submodule(path))),
                f"let {path} compute each sample by itself (attention within it, its own positions)",
            )
        if _compare_copies(user, model, sample, (2, 3)).gradient > _FAULT_TOLERANCES:
            functions = _find_functions(user, model, sample)
            named = f" (that of {', '.join(functions)})" if functions else ""
            return UserError(
                f"{what}, and three times in one batch gives a third one: a backward computes with the batch"
                f"{named}",
                next(iter(functions.values()), "") or find_parameter_place(model, worst) or str(user.path),
                "let hooks on gradients (`register_hook`) and backwards of your autograd.Functions treat each"
                " sample by itself, without norms or numbers of samples of the batch; or put them into a"
                " module of their own and name it: --whole-batch PATH computes all samples at once",
            )
        return _wrong_operator(user, model, what, worst)
    return None


def _find_functions(user: UserModel, model: nn.Module, sample: Mapping[str, Any]) -> dict[str, str]:
    """Returns the file:line of the backward of each autograd.Function behind the loss, by its name, without
    those of torch."""
    seen: set[Any] = set()
    found: dict[str, str] = {}
    nodes = [extract_loss(run_forward(model, user.collate([sample]))).grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)
        if (function := getattr(node, "_forward_cls", None)) is not None:
            code = getattr(inspect.unwrap(function.backward), "__code__", None)
            if code is not None and not is_internal_file(code.co_filename):
                found[function.__name__] = format_source_line(code, code.co_firstlineno)
    return found


def describe_fault_of_one(user: UserModel, model: nn.Module, worst: str, tolerances: float) -> UserError:
    """Returns the error of a model with samples that have the gradients of the batch in twos but not alone,
    while the loss is the same: that of parameter `worst` is off by `tolerances` times the tolerance."""
    what = (
        "plain PyTorch gives samples alone other gradients than in twos, although the loss is the same: "
        f"{worst} is off by {tolerances:.3g} tolerances"
    )
    error = _wrong_operator(user, model, what, worst)
    if tolerances > _FAULT_TOLERANCES:
        return error
    remedy = (
        "an operator behind this parameter computes otherwise for batches of one sample, or rounding decides "
        "something there: see whether it does in float64, too (`model().double()`)"
    )
    return UserError(what, error.where, remedy)


def _wrong_operator(user: UserModel, model: nn.Module, what: str, worst: str) -> UserError:
    return UserError(
        what,
        find_parameter_place(model, worst) or str(user.path),
        "an operator behind this parameter is wrong for batches of one sample (in torch 2.13 batch norm"
        " in eval mode on CPUs, before a transpose): use another module or another device",
    )


def _find_worst_in_float64(user: UserModel, model: nn.Module, sample: Mapping[str, Any]) -> tuple[str, float]:
    """Returns the parameter with the gradient of a sample alone that differs most, in float64, from that of
    the sample twice in one batch, and the difference as a share of its largest entry; "" where all are the
    same but for rounding."""
    try:
        with widened_floats(model, torch.float64):
            alone, twice = (
                run_eager(model, widen_batch(user.collate([sample] * n), torch.float64)) for n in (1, 2)
            )
    except Exception:  # the model's code or an op of it asks for float32
        return "", 0.0
    ratio = _ratio_of_losses(alone, twice)
    pairs = {
        name: (ratio * gradient, twice.gradients[name])
        for name, gradient in alone.gradients.items()
        if gradient is not None
    }
    largest = max((float(own.abs().max()) for own, _ in pairs.values()), default=0.0)
    shares = {
        name: float((own - other).abs().max()) / float(other.abs().max() or 1.0)
        for name, (own, other) in pairs.items()
        if other is not None and float((own - other).abs().max()) > _SAME * largest
    }
    return max(shares.items(), key=lambda item: item[1], default=("", 0.0))


def _ratio_of_losses(fewer: LossAndGradients, more: LossAndGradients, growth: float = 2.0) -> float:
    """Returns the growth in samples where the loss is a sum over samples, 1 where it is a mean."""
    return growth if abs(more.loss - growth * fewer.loss) < abs(more.loss - fewer.loss) else 1.0


def find_parameter_place(model: nn.Module, name: str) -> str:
    """Returns the `file:line` of the forward of the innermost module that holds a parameter and is not one of
    torch's own classes; "" if there is none with source."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        kind = type(model.get_submodule(path))
        if not kind.__module__.startswith("torch."):
            return forward_source_line(kind)
    return ""


def _compare_copies(
    user: UserModel, model: nn.Module, sample: Mapping[str, Any], counts: tuple[int, int]
) -> ResultDifference:
    """Compares two batches that hold `counts` copies of one sample, with gradients and loss scaled alike."""
    fewer, more = (run_eager(model, user.collate([sample] * n)) for n in counts)
    ratio = _ratio_of_losses(fewer, more, counts[1] / counts[0])
    scaled = {n: None if g is None else ratio * g for n, g in fewer.gradients.items()}
    return compare_results(LossAndGradients(ratio * fewer.loss, scaled), more)


def find_coupling_module(user: UserModel, model: nn.Module, sample: Mapping[str, Any]) -> str:
    """Returns the path of the innermost module that, in float64, is the first to return other values of a
    sample if it is twice in its batch; "" if there is none. Results that have no rows for the second copy are
    not compared."""
    with widened_floats(model, torch.float64), torch.no_grad():
        alone, twice = (
            _record_results(model, widen_batch(user.collate([sample] * n), torch.float64)) for n in (1, 2)
        )
    for path, calls in alone.items():
        if len(calls) == len(twice.get(path, ())):  # it is called in no loop over samples
            for own, doubled in zip(calls, twice[path], strict=True):
                if not all(map(_repeats, doubled, own)):
                    return path
    return ""


def _record_results(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, list[list[torch.Tensor]]]:
    """Returns the floating-point tensors that each call of each module returns, by paths in the order in
    which first calls end."""
    found: dict[str, list[list[torch.Tensor]]] = {}

    def make_hook(path: str) -> Callable[..., None]:
        def record_result(_module: nn.Module, _args: Any, out: Any) -> None:
            tensors = [t for _, t in iter_tensors(out) if t.is_floating_point()]
            found.setdefault(path, []).append(tensors)

        return record_result

    hooks = [m.register_forward_hook(make_hook(path)) for path, m in model.named_modules() if path]
    try:
        run_forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _repeats(doubled: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether `doubled` has the values of `own` twice along a dim that is twice as long. True for tensors
    that differ in other dims, or in none."""
    dims = [d for d, (a, b) in enumerate(zip(own.shape, doubled.shape, strict=False)) if a != b]
    if own.ndim != doubled.ndim or len(dims) != 1 or doubled.shape[dims[0]] != 2 * own.shape[dims[0]]:
        return True
    halves = doubled.chunk(2, dims[0])
    return all(float((half - own).norm()) <= _SAME * float(own.norm()) for half in halves)
