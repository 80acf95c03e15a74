from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from secc.runtime.errors import UserError
from secc.runtime.kernels import (
    chunked_head,
    kl,
    kl_cross_entropy,
    launch_tuning,
    linear_kl,
    linear_kl_ce,
)
from tests.kernels.float64_comparison import (
    TENSOR_LAYOUTS,
    assert_agree,
    check_operator_registrations,
    example_count,
    strided_tensor,
    tensor_seeds,
)

KINDS = st.sampled_from(["forward", "reverse", "js"])
ROWS = st.sampled_from([(0,), (1,), (7,), (2, 3)])


def launch(chunk: int, block: int = 8):
    return launch_tuning.use_launch("linear_kl", launch_tuning.LaunchParameters(block, chunk))


def launch_both(chunk: int, block: int = 8):
    return launch_tuning.use_launch("linear_kl_ce", launch_tuning.LaunchParameters(block, chunk))


def cap(logits, softcap):
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def reference(
    student,
    student_weight,
    student_bias=None,
    *,
    teacher,
    teacher_weight,
    teacher_bias=None,
    mask=None,
    temperature=1.0,
    kind="forward",
    beta=0.5,
    student_softcap=None,
    teacher_softcap=None,
):
    """The divergence by its formula, summed over the rows of `mask`."""
    teacher_bias = None if teacher_bias is None else teacher_bias.double()
    z = cap(F.linear(student, student_weight, student_bias), student_softcap)
    teacher_z = cap(F.linear(teacher.double(), teacher_weight.double(), teacher_bias), teacher_softcap)
    log_q, log_p = F.log_softmax(z / temperature, -1), F.log_softmax(teacher_z / temperature, -1)
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    token = {"forward": p * (log_p - log_q), "reverse": q * (log_q - log_p)}
    token["js"] = beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)
    rows = token[kind].sum(-1)
    return (rows if mask is None else rows * mask).sum()


def operator(student, student_weight, student_bias=None, *, teacher, teacher_weight, mask=None, **options):
    loss, count = linear_kl(
        student, student_weight, teacher, teacher_weight, mask, student_bias=student_bias, **options
    )
    assert count == (teacher.shape[:-1].numel() if mask is None else (mask != 0).sum())
    return loss


def random_mask(rows, seed):
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < 0.7


@settings(max_examples=example_count(30))
@given(
    rows=ROWS,
    width=st.integers(1, 9),
    teacher_width=st.integers(1, 5),
    vocabulary=st.integers(1, 30),
    chunk=st.integers(1, 8),
    kind=KINDS,
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    beta=st.sampled_from([0.1, 0.5, 0.8]),
    masked=st.booleans(),
    layout=TENSOR_LAYOUTS,
    seed=tensor_seeds(),
)
def test_agrees_with_float64(
    rows, width, teacher_width, vocabulary, chunk, kind, temperature, beta, masked, layout, seed
):
    options = {
        "teacher": strided_tensor([*rows, teacher_width], layout, seed),
        "teacher_weight": strided_tensor([vocabulary, teacher_width], layout, seed + 1),
        "mask": random_mask(rows, seed) if masked else None,
        "kind": kind,
        "temperature": temperature,
        "beta": beta,
    }
    inputs = [
        strided_tensor([*rows, width], layout, seed + 2),
        strided_tensor([vocabulary, width], layout, seed + 3),
    ]
    with launch(chunk):
        assert_agree(partial(operator, **options), partial(reference, **options), inputs, 5e-5)


@settings(max_examples=example_count(16))
@given(
    rows=ROWS,
    vocabulary=st.integers(1, 20),
    chunk=st.integers(1, 8),
    kind=KINDS,
    temperature=st.sampled_from([1.0, 2.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    masked=st.booleans(),
    layout=TENSOR_LAYOUTS,
    seed=tensor_seeds(),
)
def test_with_cross_entropy_agrees_with_float64(
    rows, vocabulary, chunk, kind, temperature, smoothing, masked, layout, seed
):
    options = {
        "teacher": strided_tensor([*rows, 3], layout, seed),
        "teacher_weight": strided_tensor([vocabulary, 3], layout, seed + 1),
    }
    options |= {"mask": random_mask(rows, seed) if masked else None, "kind": kind, "temperature": temperature}
    target = torch.randint(vocabulary, rows, generator=torch.Generator().manual_seed(seed))
    target[target == 0] = -100

    def both(student, weight):
        teacher = options["teacher"], options["teacher_weight"]
        return linear_kl_ce(
            student,
            weight,
            *teacher,
            target,
            options["mask"],
            temperature=temperature,
            kind=kind,
            label_smoothing=smoothing,
        )

    def separate(student, weight):
        logits = (student @ weight.T).reshape(-1, vocabulary)
        labels = F.cross_entropy(logits, target.reshape(-1), reduction="sum", label_smoothing=smoothing)
        return reference(student, weight, **options), labels

    with launch_both(chunk):
        assert_agree(
            both,
            separate,
            [strided_tensor([*rows, 4], layout, seed + 2), strided_tensor([vocabulary, 4], layout, seed + 3)],
            5e-5,
        )


@settings(max_examples=example_count(20))
@given(
    rows=ROWS,
    vocabulary=st.integers(1, 20),
    chunk=st.integers(1, 8),
    kind=KINDS,
    caps=st.sampled_from([(None, None), (2.0, None), (None, 3.0), (30.0, 1.5)]),
    biased=st.sampled_from([(True, False), (False, True), (True, True)]),
    temperature=st.sampled_from([1.0, 2.0]),
    layout=TENSOR_LAYOUTS,
    seed=tensor_seeds(),
)
def test_biases_caps_and_weighted_rows_agree_with_float64(
    rows, vocabulary, chunk, kind, caps, biased, temperature, layout, seed
):
    g = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, generator=g) * (torch.rand(rows, generator=g) < 0.8) - 0.2
    options = {
        "teacher": strided_tensor([*rows, 3], layout, seed),
        "teacher_weight": strided_tensor([vocabulary, 3], layout, seed + 1),
        "teacher_bias": strided_tensor([vocabulary], "plain", seed + 5) if biased[1] else None,
        "student_softcap": caps[0],
        "teacher_softcap": caps[1],
        "temperature": temperature,
        "kind": kind,
        "mask": weights,
    }
    inputs = [
        strided_tensor([*rows, 4], layout, seed + 2, 2.0),
        strided_tensor([vocabulary, 4], layout, seed + 3),
        *([strided_tensor([vocabulary], "plain", seed + 4)] if biased[0] else []),
    ]
    target = torch.randint(vocabulary, rows, generator=g)
    target[target == 0] = -100

    def both(student, weight, bias=None):
        teacher = options["teacher"], options["teacher_weight"]
        more = {k: v for k, v in options.items() if k not in ("teacher", "teacher_weight")}
        return linear_kl_ce(student, weight, *teacher, target, student_bias=bias, **more)

    def separate(student, weight, bias=None):
        logits = cap(F.linear(student, weight, bias), caps[0]).reshape(-1, vocabulary)
        labels = F.cross_entropy(logits, target.reshape(-1), reduction="sum")
        return reference(student, weight, bias, **options), labels

    with launch(chunk), launch_both(chunk):
        assert_agree(partial(operator, **options), partial(reference, **options), inputs, 5e-5)
        assert_agree(both, separate, inputs, 5e-5)


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_equal_models_have_no_divergence_and_no_gradient(kind):
    hidden, weight = torch.randn(4, 6, requires_grad=True), 3 * torch.randn(50, 6)
    loss, _ = linear_kl(hidden, weight, hidden, weight, kind=kind)
    assert abs(loss.item()) < 1e-6
    assert torch.autograd.grad(loss, hidden)[0].norm() < 1e-5


def test_small_divergence_keeps_its_digits():
    torch.manual_seed(1)
    weight = torch.randn(100, 8)
    inputs = [torch.randn(5, 8), weight + 1e-3 * torch.randn(100, 8)]
    options = {"teacher": inputs[0], "teacher_weight": weight}
    found, wanted = operator(*inputs, **options), reference(*[t.double() for t in inputs], **options)
    assert wanted.item() < 1e-4
    assert abs(found.item() / wanted.item() - 1) < 5e-4


def test_the_teacher_gets_no_gradient():
    student, weight, teacher, teacher_weight = (torch.randn(4, 4, requires_grad=True) for _ in range(4))
    loss, _ = linear_kl(student, weight, teacher, teacher_weight)
    other, _, labels, _ = linear_kl_ce(student, weight, teacher, teacher_weight, torch.arange(4))
    (loss + other + labels).backward()
    assert student.grad is not None
    assert teacher.grad is None
    assert teacher_weight.grad is None


def test_second_backward_is_rejected():
    student, weight = torch.randn(3, 4), torch.randn(7, 4, requires_grad=True)
    loss, _ = linear_kl(student, weight, student + 1, weight.detach())
    loss.backward(retain_graph=True)
    with pytest.raises(UserError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_a_teacher_in_smaller_parts_gives_the_same(monkeypatch, kind):
    torch.manual_seed(0)
    student, weight = torch.randn(7, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    teacher, labels = (torch.randn(7, 3), torch.randn(9, 3)), torch.arange(7)

    def run():
        divergence, _, cross_entropy, _ = linear_kl_ce(student, weight, *teacher, labels, kind=kind)
        losses = [linear_kl(student, weight, *teacher, kind=kind)[0], divergence + 2 * cross_entropy]
        return [torch.stack(losses), *torch.autograd.grad(losses, (student, weight))]

    def by_two(rows, *_):
        for part in chunked_head.split_rows(rows.stop - rows.start, 2):
            yield slice(rows.start + part.start, rows.start + part.stop), part

    with launch(5), launch_both(5):
        whole = run()
        monkeypatch.setattr(kl, "split_for_teacher", by_two)
        monkeypatch.setattr(kl_cross_entropy, "split_for_teacher", by_two)
        torch.testing.assert_close(run(), whole)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "chunk", "sum_dtype"),
    [
        (8192, 4096, torch.bfloat16, 1376, torch.bfloat16),
        (2048, 4096, torch.bfloat16, 1024, torch.bfloat16),
        (100_000, 1024, torch.bfloat16, 2176, torch.float32),  # a sixth of the rows has 5 GB of logits
        (8192, 4096, torch.float32, 1024, torch.float32),
    ],
)
def test_chunks_on_a_gpu(rows, width, dtype, chunk, sum_dtype):
    class OnGpu:  # what the choice reads
        is_cuda, shape, device = True, (rows, width), torch.device("cuda")

        def element_size(self):
            return dtype.itemsize

    hidden, weight = OnGpu(), OnGpu()
    hidden.dtype = weight.dtype = dtype
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_tuning, "choose_launch", lambda *_: launch_tuning.LaunchParameters(1024, 0))
        found = chunked_head.choose_chunk_rows("linear_kl", hidden, weight, 151_936)
        assert found == chunk
        assert chunked_head.weight_sum_dtype(hidden, weight, found) == sum_dtype
    parts = list(chunked_head.split_for_teacher(slice(chunk, 2 * chunk), hidden, 151_936))
    assert parts[0][0].start == chunk and parts[-1][1].stop == chunk
    assert len(parts) == -(-chunk // (384 if dtype == torch.bfloat16 else 256))


def test_one_of_both_losses_used_alone():
    student, weight, teacher = torch.randn(3, 4), torch.randn(7, 4, requires_grad=True), torch.randn(3, 4)
    labels = torch.tensor([1, 2, 3])
    divergence, _, cross_entropy, _ = linear_kl_ce(student, weight, teacher, weight.detach(), labels)
    alone = linear_kl(student, weight, teacher, weight.detach())[0]
    torch.testing.assert_close(
        torch.autograd.grad(divergence, weight, retain_graph=True), torch.autograd.grad(alone, weight)
    )
    expected = F.cross_entropy(student @ weight.T, labels, reduction="sum")
    torch.testing.assert_close(
        torch.autograd.grad(cross_entropy, weight), torch.autograd.grad(expected, weight)
    )


@pytest.mark.parametrize("kind", ["forward", "js"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_sums_in_float32(dtype, kind):
    torch.manual_seed(0)
    options = {
        "teacher": torch.randn(12, 8).to(dtype),
        "teacher_weight": torch.randn(40, 8).to(dtype),
        "kind": kind,
    }
    inputs = [torch.randn(12, 16).to(dtype), torch.randn(40, 16).to(dtype)]
    with launch(5, 16):
        assert_agree(
            partial(operator, **options), partial(reference, **options), inputs, 3 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_weight": torch.ones(6, 3)}, "the student has 5 tokens, the teacher 6"),
        ({"teacher_hidden": torch.ones(3, 3)}, "rows"),
        ({"teacher_hidden": torch.ones(2, 4)}, "the teacher: hidden"),
        ({"mask": torch.ones(3)}, "mask"),
        ({"mask": torch.ones(2, requires_grad=True)}, "weights get no gradient"),
        ({"student_bias": torch.ones(4)}, "one bias for each of 5 tokens"),
        ({"teacher_softcap": -1.0}, "softcap must be positive"),
        ({"kind": "sideways"}, "sideways"),
        ({"kind": "js", "beta": 0.0}, "zero everywhere"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_invalid_arguments_are_rejected(change, message):
    fine = {"student_hidden": torch.ones(2, 4), "student_weight": torch.ones(5, 4)}
    fine |= {"teacher_hidden": torch.ones(2, 3), "teacher_weight": torch.ones(5, 3)}
    with pytest.raises(UserError, match=message):
        linear_kl(**{**fine, **change})
    with pytest.raises(UserError, match=message):
        linear_kl_ce(**{**fine, **change}, target=torch.tensor([0, 1]))


def test_operator_registrations():
    heads = (
        torch.randn(3, 4, requires_grad=True),
        torch.randn(6, 4, requires_grad=True),
        torch.randn(3, 2),
        torch.randn(6, 2),
    )
    mask, target = torch.tensor([True, False, True]), torch.tensor([0, 5, -100])
    biases, caps = (torch.randn(6, requires_grad=True), torch.randn(6)), (3.0, 0.0)
    check_operator_registrations(
        "linear_kl", *heads, *biases, mask, 2.0, "forward", 0.5, *caps, 6, "", True, True, True
    )
    check_operator_registrations(
        "linear_kl_ce", *heads, *biases, target, mask, 2.0, "reverse", 0.5, *caps, -100, 0.1, 0, 6, ""
    )
    check_operator_registrations(
        "linear_kl", *heads, None, None, None, 2.0, "js", 0.5, 0.0, 0.0, 6, "", True, True, False
    )
