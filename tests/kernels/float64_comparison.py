"""An operator against plain PyTorch in float64: values and every gradient, on the same numbers and
strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st

from secc.runtime.kernels.backend import KERNELS_INTERPRETED

Tensors = Sequence[torch.Tensor]
Function = Callable[..., torch.Tensor | Tensors]
NUDGED_RUNS = 8
ABSOLUTE_NORM_FLOOR = 0.05  # of a norm: below it an error counts as absolute


def example_count(n: int) -> int:
    """How many examples hypothesis draws: fewer through the interpreter, which is slow."""
    return n // 2 if KERNELS_INTERPRETED else n


def tensor_seeds() -> st.SearchStrategy[int]:
    """What a test fills its tensors from, so that a failing example prints as a few integers."""
    return st.integers(0, 2**20)


def strided_tensor(shape: Sequence[int], layout: str, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Random float32 entries: `plain`, every other entry of a longer row (`stepped`), or with its first and
    last dims swapped in memory."""
    generator = torch.Generator().manual_seed(seed)
    shape = list(shape)
    if layout == "stepped":
        return scale * torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)[..., ::2]
    if layout == "swapped" and len(shape) > 1:
        return scale * torch.randn(shape[-1], *shape[1:-1], shape[0], generator=generator).transpose(0, -1)
    return scale * torch.randn(*shape, generator=generator)


def check_operator_registrations(operator: str, *inputs: object) -> None:
    """An operator's schema, fake and autograd registrations agree with what it does; without the interpreter
    (slow) also when traced."""
    parts = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        getattr(torch.ops.secc, operator).default, inputs, test_utils=parts if KERNELS_INTERPRETED else "ALL"
    )


TENSOR_LAYOUTS = st.sampled_from(["plain", "stepped", "swapped"])


def outputs_and_gradients(
    function: Function, inputs: Tensors, upstream: Sequence[float]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(floating outputs, gradients of their weighted sum by the inputs); gradients of outputs are made uneven
    by a ramp."""
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
    """The operator on `inputs` gives what `reference` gives on them in float64, within `tolerance` of each
    tensor's norm.

    Where numbers cancel (deviations from the mean of a row whose entries are nearly equal) float32 tells no
    more, so thrice the error of `reference` in the inputs' own dtype is allowed, too: the largest of several
    that differ in the inputs' last bits, since one alone may be small by chance. Outputs that are no floats
    are left out; gradients must have their input's dtype.
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
    """The largest error of an output's or gradient's norm that `reference` has in the inputs' own dtype, on
    `TURNS` that hardly differ."""
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
