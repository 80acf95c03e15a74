from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from secc.runtime.errors import UserError
from secc.runtime.kernels import launch_tuning, linear_cross_entropy, linear_cross_entropy_rows
from secc.runtime.kernels.backend import KERNELS_INTERPRETED
from secc.runtime.training.split_backward import split_backward
from tests.kernels.float64_comparison import (
    TENSOR_LAYOUTS,
    assert_agree,
    check_operator_registrations,
    example_count,
    strided_tensor,
    tensor_seeds,
)


def launch(chunk: int, block: int = 8):
    return launch_tuning.use_launch(
        "linear_cross_entropy", launch_tuning.LaunchParameters(block, chunk, columns=2 * block + 3)
    )


def reference(hidden, weight, bias, *, target, ignore_index, label_smoothing, softcap):
    logits = hidden @ weight.T + bias
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "sum"}
    return F.cross_entropy(logits.reshape(-1, weight.shape[0]), target.reshape(-1), **options)


def operator(hidden, weight, bias, **options):
    loss, count = linear_cross_entropy(hidden, weight, bias=bias, **options)
    assert count == (options["target"] != options["ignore_index"]).sum()
    return loss


@settings(max_examples=example_count(20))
@given(
    rows=st.sampled_from([(0,), (1,), (7,), (2, 3)]),
    width=st.integers(1, 9),
    vocabulary=st.integers(1, 30),
    chunk=st.integers(1, 8),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    layout=TENSOR_LAYOUTS,
    seed=tensor_seeds(),
)
def test_agrees_with_float64(rows, width, vocabulary, chunk, smoothing, softcap, layout, seed):
    hidden, weight = (
        strided_tensor([*rows, width], layout, seed, 2.0),
        strided_tensor([vocabulary, width], layout, seed + 1),
    )
    target = torch.randint(vocabulary, rows, generator=torch.Generator().manual_seed(seed))
    target[target == 0] = -1
    options = {"target": target, "ignore_index": -1, "label_smoothing": smoothing, "softcap": softcap}
    with launch(chunk):
        inputs = [hidden, weight, strided_tensor([vocabulary], "plain", seed + 2)]
        assert_agree(partial(operator, **options), partial(reference, **options), inputs, 2e-5)


@settings(max_examples=example_count(16))
@given(
    rows=st.sampled_from([(0,), (1,), (7,), (2, 3)]),
    vocabulary=st.integers(1, 30),
    chunk=st.integers(1, 8),
    smoothing=st.sampled_from([0.0, 0.1]),
    softcap=st.sampled_from([None, 2.0]),
    layout=TENSOR_LAYOUTS,
    seed=tensor_seeds(),
)
def test_weighted_rows_agree_with_float64(rows, vocabulary, chunk, smoothing, softcap, layout, seed):
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(vocabulary, rows, generator=g)
    target[target == 0] = -100
    weights = torch.randn(rows, generator=g)

    def weighted(hidden, weight, bias):
        losses = linear_cross_entropy_rows(
            hidden, weight, target, bias=bias, label_smoothing=smoothing, softcap=softcap
        )
        assert losses.shape == target.shape
        return (losses * weights.to(losses.dtype)).sum()

    def plain(hidden, weight, bias):
        logits = hidden @ weight.T + bias
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        losses = F.cross_entropy(
            logits.reshape(-1, vocabulary), target.reshape(-1), reduction="none", label_smoothing=smoothing
        )
        return (losses * weights.reshape(-1).to(losses.dtype)).sum()

    inputs = [
        strided_tensor([*rows, 5], layout, seed, 2.0),
        strided_tensor([vocabulary, 5], layout, seed + 1),
        strided_tensor([vocabulary], "plain", seed + 2),
    ]
    with launch(chunk):
        assert_agree(weighted, plain, inputs, 2e-5)


def test_large_logits_neither_overflow_nor_lose_the_loss():
    hidden, weight, bias = torch.full((2, 4), 50.0), torch.eye(5, 4) * 100, torch.zeros(5)
    options = {"target": torch.tensor([0, 4]), "ignore_index": -100, "label_smoothing": 0.0, "softcap": None}
    assert_agree(partial(operator, **options), partial(reference, **options), [hidden, weight, bias], 2e-5)


def test_token_with_bias_minus_infinity_has_no_gradient():
    bias = torch.tensor([0.0, -torch.inf, 0.0])
    weight = torch.randn(3, 4, requires_grad=True)
    with launch(2, block=1):
        loss, _ = linear_cross_entropy(torch.randn(3, 4), weight, torch.tensor([0, 2, 2]), bias=bias)
    loss.backward()
    assert loss.isfinite()
    assert torch.equal(weight.grad[1], torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_sums_in_float32(dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(12, 16).to(dtype), torch.randn(40, 16).to(dtype)]
    target = torch.randint(40, (12,))

    def mean(hidden, weight):
        loss, count = linear_cross_entropy(hidden, weight, target)
        assert loss.dtype == torch.float32
        return loss / count

    def exact(hidden, weight):
        return F.cross_entropy(hidden @ weight.T, target)

    with launch(3, 16):
        assert_agree(mean, exact, inputs, 3 * torch.finfo(dtype).eps)


def test_no_gradient_is_computed_unless_required():
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    target = torch.tensor([0, 1, 2])
    loss, _ = linear_cross_entropy(hidden, weight, target)
    assert torch.autograd.grad(loss, weight)[0].shape == (5, 4)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, target)[0].requires_grad


def test_second_backward_of_rows_gives_the_same_gradient():
    weight = torch.randn(5, 4, requires_grad=True)
    losses = linear_cross_entropy_rows(torch.randn(3, 4), weight, torch.tensor([0, 1, 2]))
    first = torch.autograd.grad(losses.sum(), weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(losses.sum(), weight)[0])


def test_second_backward_of_the_sum_is_rejected():
    weight = torch.randn(5, 4, requires_grad=True)
    loss, _ = linear_cross_entropy(torch.randn(3, 4), weight, torch.tensor([0, 1, 2]))
    torch.autograd.grad(2 * loss, weight, retain_graph=True)
    with pytest.raises(UserError, match="second time"):
        torch.autograd.grad(2 * loss, weight)


@pytest.mark.parametrize("pack", [None, torch.clone, lambda saved: saved], ids=["plain", "copies", "same"])
def test_a_split_backward_gives_the_same_gradients(pack):
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    labels = torch.tensor([0, 1, 2])
    whole = torch.autograd.grad(0.5 * linear_cross_entropy(hidden, weight, labels)[0], (hidden, weight))
    hooks = nullcontext() if pack is None else saved_tensors_hooks(pack, pack)
    with hooks:
        loss, upstream = linear_cross_entropy(hidden, weight, labels)[0], torch.tensor(0.5)
    finish = split_backward([(loss, upstream)], [hidden])
    assert torch.equal(hidden.grad, whole[0]) and weight.grad is None
    finish()
    assert torch.equal(weight.grad, whole[1])


def test_the_weights_gradient_is_scaled_in_place():
    weight = torch.randn(5, 4, requires_grad=True)
    loss, _ = linear_cross_entropy(torch.randn(3, 4), weight, torch.tensor([0, 1, 2]))
    made = [saved.data_ptr() for saved in loss.grad_fn.saved_tensors]
    (2 * loss).backward()
    assert weight.grad.data_ptr() in made


def test_autocast_computes_products_in_its_dtype():
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(6, 8), torch.randn(9, 8, requires_grad=True), torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, target)
    half = weight.detach().bfloat16().requires_grad_()
    expected, _ = linear_cross_entropy(hidden.bfloat16(), half, target)
    assert loss == expected
    gradient = torch.autograd.grad(loss, weight)[0]
    assert torch.equal(gradient.bfloat16(), torch.autograd.grad(expected, half)[0])
    assert not torch.equal(gradient.bfloat16().float(), gradient)  # summed and left in float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(5, 3)}, "do not fit"),
        ({"weight": torch.ones(5, 4, dtype=torch.float64)}, "one dtype"),
        ({"target": torch.tensor([0, 5])}, "target 5 is not in a vocabulary of 5"),
        ({"target": torch.tensor([0])}, "target"),
        ({"target": torch.ones(2)}, "token numbers"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"softcap": -1.0}, "softcap"),
        ({"bias": torch.ones(4)}, "bias"),
    ],
)
def test_invalid_arguments_are_rejected(change, message):
    fine = {"hidden": torch.ones(2, 4), "weight": torch.ones(5, 4), "target": torch.tensor([0, 1])}
    with pytest.raises(UserError, match=message):
        linear_cross_entropy(**{**fine, **change})


@pytest.mark.skipif(KERNELS_INTERPRETED, reason="tracing does not depend on the kernels")
def test_compiled_loss_equals_eager():
    torch.manual_seed(0)
    inputs, target = [torch.randn(5, 4), torch.randn(7, 4)], torch.tensor([0, 6, -100, 3, 3])

    def mean(hidden, weight):
        loss, count = linear_cross_entropy(hidden, weight, target)
        return loss / count

    assert_agree(torch.compile(mean, backend="aot_eager", fullgraph=True), mean, inputs, 1e-5)


def test_operator_registrations():
    inputs = (
        torch.randn(3, 4, requires_grad=True),
        torch.randn(6, 4, requires_grad=True),
        torch.randn(6),
        torch.tensor([0, 5, -100]),
    )
    options = -100, 0.1, 0.0, 0, 6, ""
    check_operator_registrations("linear_cross_entropy", *inputs, *options)
    check_operator_registrations("linear_cross_entropy_sum", *inputs, *options, True, True, True)
