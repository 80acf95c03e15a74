"""Compares an operator with plain PyTorch in float64: values and all gradients, on the same numbers and
strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from secc.runtime.kernels.backend import KERNELS_INTERPRETED

Tensors = Sequence[torch.Tensor]
Function = Callable[..., torch.Tensor | Tensors]
NUDGED_RUNS = 8
ABSOLUTE_NORM_FLOOR = 0.05  # errors relative to smaller norms count as absolute


def example_count(n: int) -> int:
    """Returns the number of hypothesis examples: fewer through the interpreter, which is slow."""
    return n // 3 if KERNELS_INTERPRETED else n


def tensor_seeds() -> st.SearchStrategy[int]:
    """Seeds that tests fill tensors from, so that a failing example prints as a few integers."""
    return st.integers(0, 2**20)


def strided_tensor(shape: Sequence[int], layout: str, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Returns random float32 entries, laid out `plain`, as every other entry of a longer row (`stepped`), or
    with the first and last dims swapped in memory (`swapped`)."""
    generator = torch.Generator().manual_seed(seed)
    shape = list(shape)
    if layout == "stepped":
        return scale * torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)[..., ::2]
    if layout == "swapped" and len(shape) > 1:
        return scale * torch.randn(shape[-1], *shape[1:-1], shape[0], generator=generator).transpose(0, -1)
    return scale * torch.randn(*shape, generator=generator)


def check_operator_registrations(operator: str, *inputs: object) -> None:
    """Checks that an operator's schema, fake and autograd registrations agree with what it does; without the
    (slow) interpreter also when traced."""
    parts = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        getattr(torch.ops.secc, operator).default, inputs, test_utils=parts if KERNELS_INTERPRETED else "ALL"
    )


TENSOR_LAYOUTS = st.sampled_from(["plain", "stepped", "swapped"])


def outputs_and_gradients(
    function: Function, inputs: Tensors, upstream: Sequence[float]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns (floating outputs, gradients of their weighted sum with respect to the inputs); a ramp makes
    the outputs' gradients uneven."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    found = function(*inputs)
    outputs = [t for t in ([found] if isinstance(found, torch.Tensor) else found) if t.is_floating_point()]
    total = sum((0.0 * x.sum() for x in inputs), torch.zeros((), dtype=outputs[0].dtype))
    for output, weight in zip(outputs, upstream, strict=False):
        ramp = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).reshape(output.shape)
        total = total + weight * (output * ramp).sum()
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    return [o.detach() for o in outputs], [
        torch.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True)
    ]


def assert_agree(
    operator: Function,
    reference: Function,
    inputs: Tensors,
    tolerance: float,
    upstream: Sequence[float] = (0.7, -0.4),
) -> None:
    """Asserts that the operator on `inputs` gives what `reference` gives in float64, within `tolerance` of
    each tensor's norm.

    Where numbers cancel (deviations from the mean of a row of nearly equal entries), float32 is not that
    precise. So three times the error of `reference` in the inputs' own dtype is allowed, too: the largest
    over several inputs that differ in the last bits, because a single one may be small by chance. Outputs
    that are not floating are ignored; gradients must have their input's dtype.
    """
    found = outputs_and_gradients(operator, inputs, upstream)
    wanted = outputs_and_gradients(reference, [x.double() for x in inputs], upstream)
    for kind, ours, theirs in zip(("output", "gradient"), found, wanted, strict=True):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.shape == b.shape, f"{kind} {i}: {list(a.shape)}, not {list(b.shape)}"
            assert kind == "output" or a.dtype == inputs[i].dtype
            error, norm = float((a.double() - b).norm()), float(b.norm())
            if error > tolerance * (norm + ABSOLUTE_NORM_FLOOR):
                assert error <= 3 * plain_error(reference, inputs, upstream, kind, i), (
                    f"{kind} {i}: error {error:.2e} of norm {norm:.2e}"
                )


def plain_error(reference: Function, inputs: Tensors, upstream: Sequence[float], kind: str, i: int) -> float:
    """Returns the largest error, by norm, of an output or gradient of `reference` in the inputs' own dtype,
    over `NUDGED_RUNS` slightly different inputs."""
    errors: list[float] = []
    for turn in range(NUDGED_RUNS):
        generator = torch.Generator().manual_seed(turn)
        last = [
            torch.randint(-1, 2, x.shape, generator=generator) * min(turn, 1) * torch.finfo(x.dtype).eps
            for x in inputs
        ]
        nudged = [x.detach() * (1 + bits.to(x.dtype)) for x, bits in zip(inputs, last, strict=True)]
        found = outputs_and_gradients(reference, nudged, upstream)[kind == "gradient"][i]
        wanted = outputs_and_gradients(reference, [x.double() for x in nudged], upstream)[kind == "gradient"][
            i
        ]
        errors.append(float((found.double() - wanted).norm()))
    return max(errors)
