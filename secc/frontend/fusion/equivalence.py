"""Tells whether a matched part and its replacement compute the same: values and all gradients, at several
sizes, scales and dtypes.

The part runs in float64 as the truth, and in each dtype next to the replacement, which must give the same
dtype and shape and may err little more than the user's own code does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from secc.frontend.fusion.fusion_rules import H, TrialSizes

LeafValues = dict[fx.Node, torch.Tensor]
RunResults = tuple[torch.Tensor, ...]
_DEFAULT_WIDTH = 24  # of rows where no parameter decides it
_TESTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROUNDING_BY_DTYPE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
_ERROR_SLACK = 1.5  # times the error of the user's own code
_INPUT_SCALES = (1.0, 1e-2)  # of inputs: an eps in another place shows where entries are small


@dataclass(frozen=True)
class MatchedPart:
    """What a rule matched: `root` is computed from `leaves` (pattern name to the nodes with its value) and
    parameters; the casts after it end at `end`."""

    root: fx.Node
    end: fx.Node
    leaves: Mapping[str, Sequence[fx.Node]]
    parameters: Mapping[str, torch.Tensor]

    def tested_dtypes(self) -> list[tuple[torch.dtype, torch.dtype]]:
        """Returns (dtype of leaves, dtype of parameters): both equal, and leaves of fewer bits than the
        parameters, which keep their dtype."""
        parameter_dtype = next(
            iter({p.dtype for p in self.parameters.values() if p.is_floating_point()}), None
        )
        if parameter_dtype is None:
            return [(d, d) for d in _TESTED_DTYPES]
        return list(
            dict.fromkeys(
                [
                    (torch.float32, torch.float32),
                    (parameter_dtype, parameter_dtype),
                    *((d, parameter_dtype) for d in _TESTED_DTYPES if parameter_dtype is torch.float32),
                ]
            )
        )


def find_difference(part: MatchedPart, new: fx.Node, trials: Sequence[TrialSizes]) -> str:
    """Returns why `new` may not replace the part's root, "" if it may."""
    ran = False
    for trial in trials:
        truths = _float64_results(part, trial)
        if truths is None:
            continue
        ran = True
        for dtype, of_parameters in part.tested_dtypes():
            for scale, truth in zip(_INPUT_SCALES, truths, strict=True):
                values = _random_values(part, trial, dtype, of_parameters, scale)
                reason = _compare_replacement(part, new, values, truth, _ROUNDING_BY_DTYPE[dtype])
                if reason:
                    sizes = ", ".join(f"{name} {list(shape)}" for name, shape in trial.items())
                    return f"{reason} ({_dtype_text(dtype)}, {sizes})"
    return "" if ran else "none of the sizes that it is tried at runs"


def _float64_results(part: MatchedPart, trial: TrialSizes) -> list[RunResults] | None:
    """Returns the results in float64 at each scale; None if the user's code may not take these sizes."""
    try:
        return [
            _compute_results(
                part, part.root, _random_values(part, trial, torch.float64, torch.float64, scale)
            )
            for scale in _INPUT_SCALES
        ]
    except Exception:
        return None


def _compare_replacement(
    part: MatchedPart,
    new: fx.Node,
    values: tuple[LeafValues, dict[str, torch.Tensor]],
    truth: RunResults,
    rounding: float,
) -> str:
    try:
        expected = _compute_results(part, part.root, values)
    except Exception:  # dtypes that the user's code does not take
        return ""
    try:
        replaced = _compute_results(part, new, values)
    except Exception as error:
        return f"the replacement raises {type(error).__name__}: {error}"
    for what, r, e, x in zip(_result_names(part), replaced, expected, truth, strict=True):
        if r.shape != e.shape or r.dtype != e.dtype:
            got = f"{_dtype_text(r.dtype)}{list(r.shape)}"
            return f"{what} is {got} instead of {_dtype_text(e.dtype)}{list(e.shape)}"
        error, allowed = _relative_error(r, x), _ERROR_SLACK * _relative_error(e, x) + rounding
        if not error <= allowed:
            return f"{what} errs by {error:.2g}, the module's own code by {_relative_error(e, x):.2g}"
    return ""


def _result_names(part: MatchedPart) -> Iterator[str]:
    yield "the value"
    for name in (*part.leaves, *part.parameters):
        if name not in ("cos", "sin"):
            yield f"the gradient of {name}"


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    norm = float(truth.double().norm())
    return float((found.double() - truth.double()).norm()) / norm if norm else float(found.double().norm())


def _random_values(
    part: MatchedPart, trial: TrialSizes, dtype: torch.dtype, of_parameters: torch.dtype, scale: float
) -> tuple[LeafValues, dict[str, torch.Tensor]]:
    """Returns random values for leaves and parameters, the same numbers for every dtype; tables (cos, sin)
    have no gradient."""
    draw = torch.Generator().manual_seed(0)  # torch's own generator is everybody's, and slow to seed
    width = next((p.shape[-1] for p in part.parameters.values() if p.dim()), _DEFAULT_WIDTH)
    leaves: LeafValues = {}
    for name, nodes in part.leaves.items():
        shape = [width if n == H else n for n in trial[name]]
        table = name in ("cos", "sin")
        numbers = (torch.rand if table else torch.randn)(shape, generator=draw, dtype=torch.float64)
        value = numbers if table else scale * numbers
        leaf = _round_to_all_dtypes(value).to(dtype).requires_grad_(not table)
        leaves |= dict.fromkeys(nodes, leaf)
    made = {n: torch.randn(p.shape, generator=draw, dtype=torch.float64) for n, p in part.parameters.items()}
    parameters = {n: _round_to_all_dtypes(p).to(of_parameters) for n, p in made.items()}
    return leaves, {n: p.requires_grad_() for n, p in parameters.items()}


def _round_to_all_dtypes(value: torch.Tensor) -> torch.Tensor:
    """Rounds to numbers that every dtype has, so that all dtypes compute from the same ones."""
    return value.to(torch.bfloat16).to(torch.float16).double()


def _compute_results(
    part: MatchedPart, root: fx.Node, values: tuple[LeafValues, dict[str, torch.Tensor]]
) -> RunResults:
    """Returns the value at the part's end with `root` in its place, and gradients of leaves and parameters
    for a fixed upstream gradient."""
    leaves, parameters = values
    known: dict[fx.Node, Any] = dict(leaves)
    known[part.root] = evaluate_node(root, known, parameters)
    out = evaluate_node(part.end, known, parameters)
    wanted = [
        t
        for t in (*(leaves[nodes[0]] for nodes in part.leaves.values()), *parameters.values())
        if t.requires_grad
    ]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        torch.bfloat16
    )
    gradients = torch.autograd.grad(
        out, wanted, upstream.to(out.dtype), materialize_grads=True, allow_unused=True
    )
    return (out.detach(), *gradients)


def evaluate_node(node: fx.Node, known: dict[fx.Node, Any], parameters: Mapping[str, torch.Tensor]) -> Any:
    """Returns the value of a node from known ones. `parameters` are tensors of any shape by the targets of
    `get_attr` nodes. Raises KeyError if the node depends on anything else."""
    if node not in known:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: evaluate_node(n, known, parameters))
        if node.op == "get_attr":
            known[node] = parameters[str(node.target)]
        elif node.op == "call_function":
            known[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        elif node.op == "call_method":
            known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            raise KeyError(node.name)
    return known[node]
