"""Divergences between two softmaxes over one vocabulary, row by row, from chunks of logits: Triton kernels
and their PyTorch reference.

With p = softmax(teacher / T), q = softmax(student / T) and m = beta * p + (1 - beta) * q:

    kind      divergence                                                 gradient by a student's logit
    forward   sum p log(p / q)                                           (q - p) / T
    reverse   sum q log(q / p)                                           q (log(q / p) - R) / T, R this sum
    js        beta * sum p log(p / m) + (1 - beta) * sum q log(q / m)    (1 - beta) q (log(q / m) - R) / T,
                                                                         R = sum q log(q / m)

Logits may be capped: z = cap * tanh(z0 / cap), each model with its own cap; a student's logit z0 then has the
gradient above times 1 - (z / cap)^2. Rows may be weighted.

Terms are summed as p log(p / q) + q - p (the same sum, because p and q each add up to one), by a series where
p and q are close, so that no term is negative and nothing cancels. A token of probability zero adds nothing
on the side that it weighs. `compute_row_norms` reads the logits once; `compute_value_and_gradient_` reads
them once more, and a third time for kinds with a gradient that needs R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from secc.runtime.kernels import launch_tuning
from secc.runtime.kernels.activations import apply_softcap
from secc.runtime.kernels.backend import accumulator_dtype, check_argument, has_kernels, jit, on_device, tl
from secc.runtime.kernels.vocab_group import VocabGroup, combine_softmax_partials

DivergenceKind = Literal["forward", "reverse", "js"]
DIVERGENCE_KINDS = ("forward", "reverse", "js")


@dataclass(frozen=True)
class Divergence:
    """A kind of divergence, its temperature, for `js` the teacher's share `beta` of the mixture, and the caps
    of both models' logits, 0 for none."""

    kind: str
    beta: float
    temperature: float
    student_softcap: float = 0.0
    teacher_softcap: float = 0.0

    def check_options(self, name: str) -> None:
        """Raises UserError for a kind, beta or temperature without a meaning."""
        check_argument(
            self.kind in DIVERGENCE_KINDS,
            f"{name}: no divergence is called {self.kind!r}",
            f"choose from {', '.join(DIVERGENCE_KINDS)}",
        )
        check_argument(self.temperature > 0, f"{name}: temperature must be positive, not {self.temperature}")
        caps = self.student_softcap, self.teacher_softcap
        check_argument(min(caps) >= 0, f"{name}: softcap must be positive", "None means no cap")
        if self.kind == "js":
            check_argument(
                0 < self.beta < 1,
                f"{name}: with beta {self.beta} js is zero everywhere",
                "choose kind forward or reverse",
            )

    @property
    def needs_row_value(self) -> bool:
        """Whether a logit's gradient needs a sum over its whole row."""
        return self.kind != "forward"


@jit
def _update_running_norm(top, total, z):
    """Updates the running maximum and the sum of exponentials above it by one block of logits."""
    higher = tl.maximum(top, tl.max(z, 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(top - base) + tl.sum(tl.exp(z - base), 0)


@jit
def _norms_kernel(
    student, teacher, out, student_stride, teacher_stride, width, scale, student_cap, teacher_cap,
    STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    student_top = tl.full((), float("-inf"), tl.float32)
    teacher_top = tl.full((), float("-inf"), tl.float32)
    student_sum = tl.zeros((), tl.float32)
    teacher_sum = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z = tl.load(student + row * student_stride + columns, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, apply_softcap(z, student_cap, STUDENT_CAP) * scale, float("-inf"))
        student_top, student_sum = _update_running_norm(student_top, student_sum, z)
        z = tl.load(teacher + row * teacher_stride + columns, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, apply_softcap(z, teacher_cap, TEACHER_CAP) * scale, float("-inf"))
        teacher_top, teacher_sum = _update_running_norm(teacher_top, teacher_sum, z)
    tl.store(out + row * 4, student_top)
    tl.store(out + row * 4 + 1, student_sum)
    tl.store(out + row * 4 + 2, teacher_top)
    tl.store(out + row * 4 + 3, teacher_sum)


def cap_logits(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """Returns a chunk's logits in the dtype of sums, capped where `softcap` is not 0."""
    z = logits.to(accumulator_dtype(logits.dtype))
    return softcap * torch.tanh(z / softcap) if softcap else z


def _norms_reference(student: torch.Tensor, teacher: torch.Tensor, rule: Divergence) -> torch.Tensor:
    parts = []
    for logits, softcap in ((student, rule.student_softcap), (teacher, rule.teacher_softcap)):
        z = cap_logits(logits, softcap) / rule.temperature
        top = z.amax(1) if z.shape[1] else z.new_full((z.shape[0],), -torch.inf)
        parts += [top, (z - torch.where(top == -torch.inf, 0.0, top).unsqueeze(1)).exp_().sum(1)]
    return torch.stack(parts, 1)


def compute_row_norms(
    name: str, student: torch.Tensor, teacher: torch.Tensor, rule: Divergence, shards: VocabGroup
) -> torch.Tensor:
    """Returns [4, rows]: the norms (see `combine_softmax_partials`) of a chunk's student and teacher logits,
    capped and divided by the temperature, over all shards."""
    rows, width = student.shape
    if has_kernels(student):
        out = student.new_empty(rows, 4, dtype=torch.float32)
        launch = launch_tuning.choose_launch(name, width or 1, student)
        with on_device(student):
            _norms_kernel[(rows,)](
                student, teacher, out, student.stride(0), teacher.stride(0), width, 1 / rule.temperature,
                rule.student_softcap or 1.0, rule.teacher_softcap or 1.0,
                STUDENT_CAP=rule.student_softcap != 0, TEACHER_CAP=rule.teacher_softcap != 0,
                BLOCK=launch.block, num_warps=launch.warps,
            )  # fmt: skip
    else:
        out = _norms_reference(student, teacher, rule)
    partials = shards.all_gather(out)
    return torch.cat(
        [
            combine_softmax_partials(partials[:, :, 0], partials[:, :, 1]),
            combine_softmax_partials(partials[:, :, 2], partials[:, :, 3]),
        ]
    )


@jit
def log_mixture(log_p, log_q, beta):
    """Returns log(beta * p + (1 - beta) * q)."""
    a = log_p + tl.log(beta)
    b = log_q + tl.log(1.0 - beta)
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + tl.log(tl.exp(a - base) + tl.exp(b - base))


@jit
def _weigh_log_ratio(p, log_ratio):
    return tl.where(p > 0, p * log_ratio, 0.0)


@jit
def _divergence_term(log_p, log_q):
    """Returns p log(p / q) + q - p without cancellation."""
    p = tl.exp(log_p)
    x = log_p - log_q
    series = x * x * (0.5 - x * (1.0 / 6.0) * (1.0 - x * 0.25 * (1.0 - x * 0.2)))
    return tl.where(tl.abs(x) < 0.1, p * series, _weigh_log_ratio(p, x) + tl.exp(log_q) - p)


@jit
def value_at_token(log_q, log_p, beta, KIND: tl.constexpr):
    """Returns a token's share of the row's divergence, and of R (see the module)."""
    if KIND == "forward":
        value = _divergence_term(log_p, log_q)
        inner = value
    elif KIND == "reverse":
        value = _divergence_term(log_q, log_p)
        inner = value
    else:
        log_m = log_mixture(log_p, log_q, beta)
        inner = _divergence_term(log_q, log_m)
        value = beta * _divergence_term(log_p, log_m) + (1.0 - beta) * inner
    return value, inner


@jit
def gradient_at_token(log_q, log_p, inner, beta, KIND: tl.constexpr):
    """Returns T times the derivative of the row's divergence with respect to a student's logit."""
    q = tl.exp(log_q)
    if KIND == "forward":
        change = q - tl.exp(log_p)
    elif KIND == "reverse":
        change = _weigh_log_ratio(q, log_q - log_p - inner)
    else:
        change = (1.0 - beta) * _weigh_log_ratio(q, log_q - log_mixture(log_p, log_q, beta) - inner)
    return change


@jit
def _value_and_gradient_kernel(
    student, teacher, norms, inner, weights, out, rows, student_stride, teacher_stride, width, scale, beta,
    student_cap, teacher_cap, KIND: tl.constexpr, VALUE: tl.constexpr, GRADIENT: tl.constexpr,
    STUDENT_CAP: tl.constexpr, TEACHER_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    student_top = tl.load(norms + row)
    student_log = tl.load(norms + rows + row)
    teacher_top = tl.load(norms + 2 * rows + row)
    teacher_log = tl.load(norms + 3 * rows + row)
    weight = tl.load(weights + row)
    row_inner = tl.load(inner + row)
    value = tl.zeros((), tl.float32)
    new_inner = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        place = student + row * student_stride + columns
        z = apply_softcap(tl.load(place, mask=inside, other=0.0).to(tl.float32), student_cap, STUDENT_CAP)
        log_q = tl.where(inside, z * scale - student_top - student_log, float("-inf"))
        t = tl.load(teacher + row * teacher_stride + columns, mask=inside, other=0.0).to(tl.float32)
        t = apply_softcap(t, teacher_cap, TEACHER_CAP)
        log_p = tl.where(inside, t * scale - teacher_top - teacher_log, float("-inf"))
        if VALUE:
            token_value, token_inner = value_at_token(log_q, log_p, beta, KIND)
            value += tl.sum(tl.where(inside, token_value, 0.0), 0)
            new_inner += tl.sum(tl.where(inside, token_inner, 0.0), 0)
        if GRADIENT:
            change = scale * gradient_at_token(log_q, log_p, row_inner, beta, KIND)
            if STUDENT_CAP:  # the capped logit again, so that no register holds it until here
                ratio = (log_q + student_top + student_log) / (scale * student_cap)
                change *= 1.0 - ratio * ratio
            change = tl.where(weight != 0, weight * change, 0.0)
            tl.store(place, change.to(student.dtype.element_ty), mask=inside)
    if VALUE:
        tl.store(out + row, tl.where(weight != 0, weight * value, 0.0))
        tl.store(out + rows + row, new_inner)


def chunk_log_softmax(
    logits: torch.Tensor, norms: torch.Tensor, temperature: float, softcap: float
) -> torch.Tensor:
    """Returns log-probabilities [rows, width] from a chunk's logits and its norms [2, rows]."""
    return cap_logits(logits, softcap) / temperature - norms[0].unsqueeze(1) - norms[1].unsqueeze(1)


def cap_slope(logits: torch.Tensor, softcap: float) -> torch.Tensor | float:
    """Returns the derivative of `cap_logits`."""
    return 1 - (cap_logits(logits, softcap) / softcap) ** 2 if softcap else 1.0


def _value_and_gradient_reference(
    student: torch.Tensor, teacher: torch.Tensor, norms: torch.Tensor, inner: torch.Tensor,
    weights: torch.Tensor, out: torch.Tensor, rule: Divergence, value: bool, gradient: bool,
) -> None:  # fmt: skip
    log_q = chunk_log_softmax(student, norms[:2], rule.temperature, rule.student_softcap)
    log_p = chunk_log_softmax(teacher, norms[2:4], rule.temperature, rule.teacher_softcap)
    if value:
        whole, share = _value_reference(log_q, log_p, rule)
        out[0], out[1] = (weights * whole).masked_fill(weights == 0, 0.0), share
    if gradient:
        change = gradient_at_token_reference(log_q, log_p, inner, rule)
        change *= weights.unsqueeze(1) * cap_slope(student, rule.student_softcap)
        student.copy_(change.masked_fill_((weights == 0).unsqueeze(1), 0.0))


def _weigh_log_ratio_reference(p: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.where(p > 0, p * log_ratio, 0.0)


def _log_mixture_reference(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.logaddexp(
        log_p + torch.tensor(beta, dtype=log_p.dtype).log(),
        log_q + torch.tensor(1 - beta, dtype=log_q.dtype).log(),
    )


def _divergence_term_reference(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    p, x = log_p.exp(), log_p - log_q
    series = x * x * (0.5 - x / 6 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6 * (1 - x / 7)))))
    return torch.where(
        x.abs() < (0.1 if p.dtype == torch.float32 else 0.005),
        p * series,
        _weigh_log_ratio_reference(p, x) + log_q.exp() - p,
    )


def _value_reference(
    log_q: torch.Tensor, log_p: torch.Tensor, rule: Divergence
) -> tuple[torch.Tensor, torch.Tensor]:
    if rule.kind != "js":
        value = (
            _divergence_term_reference(log_p, log_q)
            if rule.kind == "forward"
            else _divergence_term_reference(log_q, log_p)
        )
        return value.sum(1), value.sum(1)
    log_m = _log_mixture_reference(log_p, log_q, rule.beta)
    inner = _divergence_term_reference(log_q, log_m).sum(1)
    return rule.beta * _divergence_term_reference(log_p, log_m).sum(1) + (1 - rule.beta) * inner, inner


def gradient_at_token_reference(
    log_q: torch.Tensor, log_p: torch.Tensor, inner: torch.Tensor, rule: Divergence
) -> torch.Tensor:
    """Returns the derivative [rows, width] of the rows' divergences with respect to the student's logits.
    `log_q` and `log_p` [rows, width] are log-probabilities of student and teacher; `inner` [rows] is R (see
    the module)."""
    q = log_q.exp()
    if rule.kind == "forward":
        change = q - log_p.exp()
    elif rule.kind == "reverse":
        change = _weigh_log_ratio_reference(q, log_q - log_p - inner.unsqueeze(1))
    else:
        log_m = _log_mixture_reference(log_p, log_q, rule.beta)
        change = (1 - rule.beta) * _weigh_log_ratio_reference(q, log_q - log_m - inner.unsqueeze(1))
    return change / rule.temperature


def compute_value_and_gradient_(
    name: str, student: torch.Tensor, teacher: torch.Tensor, norms: torch.Tensor, inner: torch.Tensor,
    weights: torch.Tensor, rule: Divergence, *, value: bool, gradient: bool,
) -> torch.Tensor:  # fmt: skip
    """Reads a chunk again. Returns [2, rows]: with `value`, this shard's values times the rows' weights, and
    shares of R without them.

    With `gradient`, the student's logits are overwritten by the derivative of the summed values; for kinds
    that need it, `inner` must hold R.
    """
    rows, width = student.shape
    out = norms.new_zeros(2, rows)
    if not has_kernels(student):
        _value_and_gradient_reference(student, teacher, norms, inner, weights, out, rule, value, gradient)
        return out
    launch = launch_tuning.choose_launch(name, width or 1, student)
    with on_device(student):
        _value_and_gradient_kernel[(rows,)](
            student, teacher, norms, inner, weights, out, rows, student.stride(0), teacher.stride(0), width,
            1 / rule.temperature, rule.beta, rule.student_softcap or 1.0, rule.teacher_softcap or 1.0,
            KIND=rule.kind, VALUE=value, GRADIENT=gradient, STUDENT_CAP=rule.student_softcap != 0,
            TEACHER_CAP=rule.teacher_softcap != 0, BLOCK=launch.block, num_warps=launch.warps,
        )  # fmt: skip
    return out


def compute_row_values(
    name: str, student: torch.Tensor, teacher: torch.Tensor, norms: torch.Tensor, weights: torch.Tensor,
    rule: Divergence, shards: VocabGroup, *, gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (this shard's values [rows], R [rows] of all shards); with `gradient`, the student's logits are
    overwritten by their derivative. `student` and `teacher` are logits [rows, width], `norms` [4, rows] is
    from `compute_row_norms`; `weights` [rows] are the rows', 0 for those that do not count."""
    once = gradient and not rule.needs_row_value
    values, inner = compute_value_and_gradient_(
        name, student, teacher, norms, norms[0], weights, rule, value=True, gradient=once
    )
    if rule.needs_row_value:
        inner = shards.sum_in_rank_order(inner)
        if gradient:
            compute_value_and_gradient_(
                name, student, teacher, norms, inner.contiguous(), weights, rule, value=False, gradient=True
            )
    return values, inner
