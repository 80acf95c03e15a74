"""Compares what the loss tables say of PyTorch's ops with numbers: does an op along the samples keep them
apart, add them up, or mix them?

    python -m tests.passes.op_claims --json FILE         every op of torch's own tests
    python -m tests.passes.op_claims --only 'cumsum|nn'  ops with names that match

`torch.testing._internal.common_methods_invocations.op_db` has sample inputs for about 600 ops. Each dim of a
sample input is taken for the samples: a model applies the op to a batch of rows. It returns the sum of
squared results times samples' weights, which is separable if each sample's results are its own, or the plain
sum, which also is if the op adds up over samples. `normalize-loss` accepts or refuses each; a loss computed
from uneven micro-batches as it says, and its gradient, are held against plain PyTorch.
"""

from __future__ import annotations

import argparse
import enum
import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secc import pass_pipeline
from secc.errors import UserError
from secc.frontend.capture.capture import capture_model
from secc.frontend.capture.to_ir import capture_to_ir
from secc.frontend.dataset.input_symbols import describe_inputs
from secc.frontend.dataset.sampling import survey_dataset
from secc.ir.dialect.ops import graph_of
from secc.runtime.model.meta_build import build_meta_model
from secc.runtime.model.user_file import load_model_file
from secc.runtime.plan.batch_sizes import read_symbol_sizes
from tests.passes.case_interpreter import Source, distributed_loss

_PASSES = "canonicalize,dce,normalize-loss,dce"
_SPLIT = (slice(0, 3), slice(3, 5), slice(5, 7))
_SAMPLES = 24
_MOST_ENTRIES = 4096
_TOLERANCE = 2e-4  # of the largest entry: ops without many digits in float32 (determinants, inverses)
_MODEL_FILE = """
from tests.passes.op_claims import current_model as model, current_dataset as dataset
"""


class Verdict(enum.StrEnum):
    """What a comparison showed."""

    SEPARABLE = "separable"  # accepted, and right
    FALSE_SEPARABLE = "false separable"  # accepted, and wrong
    MIXING = "mixing"  # refused, and the loss of parts does not add up
    FALSE_MIXING = "false mixing"  # refused, although the loss of parts adds up
    NOT_APPLICABLE = "not applicable"  # plain PyTorch has no gradient here, or wants another size of the dim
    NOT_CAPTURED = "not captured"  # refused before the loss is followed


@dataclass(frozen=True)
class OpClaim:
    """One op, dim and loss."""

    op: str
    dim: int
    loss: str
    verdict: Verdict
    message: str = ""


class _Applied(nn.Module):
    """Applies an op to rows of samples along `dim`, and adds up what `end` makes of the result."""

    def __init__(self, function: Callable[..., Any], dim: int, loss: str) -> None:
        super().__init__()
        self.function, self.dim, self.loss = function, dim, loss
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = self.function((x * self.scale).movedim(0, self.dim))
        values = [y] if isinstance(y, torch.Tensor) else list(y)
        result = next(v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
        if self.loss == "sum":
            return result.sum()
        if result.dim() > self.dim and result.shape[self.dim] == len(weight):
            result = result.movedim(self.dim, -1) * weight
        return result.square().sum()


LOSSES = ("squares", "sum")
_Sample = dict[str, torch.Tensor]
_current: list[Any] = []


def current_model() -> nn.Module:
    """The model that is compared now."""
    return _Applied(*_current[0])


def current_dataset() -> list[_Sample]:
    """The samples for it."""
    return _current[1]


def claims_of_op(op: Any) -> Iterator[OpClaim]:
    """Compares an entry of `op_db` for each dim of its first usable sample input."""
    sample = _usable_sample(op)
    if sample is None:
        return
    for dim in range(sample.input.dim()):
        for loss in LOSSES:
            claim = _compare(op, sample, dim, loss)
            yield claim
            if claim.verdict in (Verdict.SEPARABLE, Verdict.NOT_APPLICABLE):
                break


def _usable_sample(op: Any) -> Any:
    """The first sample input with several entries along two dims, else with one such dim."""
    if torch.float32 not in op.supported_dtypes("cpu") or not op.supports_autograd:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = [s for s in op.sample_inputs("cpu", torch.float32) if isinstance(s.input, torch.Tensor)]
    usable = [
        s
        for s in samples
        if s.input.dim()
        and min(s.input.shape) > 1
        and s.input.numel() <= _MOST_ENTRIES
        and s.input.is_floating_point()
        and s.input.layout == torch.strided
    ]
    return max(usable, key=lambda s: min(s.input.dim(), 2), default=None)


def _compare(op: Any, sample: Any, dim: int, loss: str) -> OpClaim:
    name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")

    def claim(verdict: Verdict, message: str = "") -> OpClaim:
        return OpClaim(name, dim, loss, verdict, message[:200])

    def function(x: torch.Tensor) -> Any:
        return op.op(x, *sample.args, **sample.kwargs)

    g = torch.Generator().manual_seed(0)
    rows = sample.input.detach().movedim(dim, 0)
    drawn = [
        rows[i % len(rows)] * (1 + 0.01 * torch.rand(rows.shape[1:], generator=g)) for i in range(_SAMPLES)
    ]
    samples = [{"x": row, "weight": torch.rand((), generator=g) + 0.5} for row in drawn]
    model = _Applied(function, dim, loss)
    try:
        whole = _loss_and_gradient(model, samples[:7])
        parts = [_loss_and_gradient(model, samples[:7][s]) for s in _SPLIT]
    except Exception as error:  # whatever the op raises for other sizes of the dim
        return claim(Verdict.NOT_APPLICABLE, f"{type(error).__name__}: {error}")
    if not torch.isfinite(whole).all():
        return claim(Verdict.NOT_APPLICABLE, "not finite")
    adds_up = _is_close(whole, torch.stack(parts).sum(0))
    _current[:] = [(function, dim, loss), samples]
    try:
        found = _planned_loss_and_gradient(samples[:7])
    except UserError as error:
        if "not separable" not in error.message:
            return claim(Verdict.NOT_CAPTURED, error.message)
        return claim(Verdict.FALSE_MIXING if adds_up else Verdict.MIXING, error.message)
    except Exception as error:
        return claim(Verdict.NOT_CAPTURED, f"{type(error).__name__}: {error}")
    same = _is_close(whole, found)
    return claim(Verdict.SEPARABLE if same else Verdict.FALSE_SEPARABLE, "" if same else f"{whole} {found}")


def _is_close(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether losses and gradients agree, up to rounding of the larger one."""
    return bool((wanted - found).abs().max() <= _TOLERANCE * wanted.abs().max().clamp(min=1))


def _loss_and_gradient(model: _Applied, samples: Sequence[_Sample]) -> torch.Tensor:
    """The loss of a batch and its gradient with respect to the scale, [2]."""
    loss = model(*(torch.stack([s[key] for s in samples]) for key in ("x", "weight")))
    (gradient,) = torch.autograd.grad(loss, [model.scale])
    return torch.stack([loss.detach(), gradient]).double()


def _planned_loss_and_gradient(samples: Sequence[_Sample]) -> torch.Tensor:
    """The same from micro-batches, by the terms that `normalize-loss` writes. Raises UserError if it refuses
    the loss."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.py"
        path.write_text(_MODEL_FILE)
        user = load_model_file(path)
        survey = survey_dataset(user, _SAMPLES)
        captured = capture_model(user, build_meta_model(user), survey, describe_inputs(user, survey))
    module = capture_to_ir(captured)
    pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline(_PASSES))
    (case,) = graph_of(module).cases
    model = user.build_model()
    symbols = captured.inputs.symbols

    def source(rows: Sequence[_Sample]) -> Source:
        batch = user.collate(list(rows))
        return Source(batch, model, captured.constants, read_symbol_sizes(batch, symbols, len(rows)))

    whole = source(samples).sizes
    loss = distributed_loss(
        case, [source(samples[s]) for s in _SPLIT], [source([row]) for row in samples], whole
    )
    (gradient,) = torch.autograd.grad(loss, list(model.parameters()))
    return torch.stack([loss.detach(), gradient]).double()


def named_ops() -> list[Any]:
    """The entries of `op_db`, in its order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="ops with names that match")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the claims")
    options = parser.parse_args()
    found = list[OpClaim]()
    for op in named_ops():
        if options.only and not re.search(options.only, op.name):
            continue
        for claim in claims_of_op(op):
            found.append(claim)
            if claim.verdict not in (Verdict.SEPARABLE, Verdict.MIXING, Verdict.NOT_APPLICABLE):
                print(
                    f"{claim.op} dim {claim.dim} {claim.loss}: {claim.verdict}  {claim.message}", flush=True
                )
    counts = Counter(c.verdict.value for c in found)
    print(", ".join(f"{verdict}: {count}" for verdict, count in counts.items()))
    if options.json:
        rows = [json.dumps(list(asdict(c).values())) for c in found]
        head = {"command": "python -m tests.passes.op_claims --json FILE", "torch": torch.__version__}
        lines = [f" {json.dumps(k)}: {json.dumps(v)}," for k, v in head.items()]
        columns = json.dumps(["op", "dim", "loss", "verdict", "message"])
        text = [
            "{",
            *lines,
            f' "columns": {columns},',
            ' "rows": [',
            ",\n".join(f"  {r}" for r in rows),
            " ]",
            "}",
        ]
        options.json.write_text("\n".join(text) + "\n")
    return 1 if counts[Verdict.FALSE_SEPARABLE.value] else 0


if __name__ == "__main__":
    from tests.passes import op_claims  # what the model file imports, too

    sys.exit(op_claims.main())
