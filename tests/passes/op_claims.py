"""Compares what the loss tables say of PyTorch's ops and modules with numbers: does one along the samples
keep them apart, add them up, or mix them?

    python -m tests.passes.op_claims --json FILE         all ops and modules of torch's own tests
    python -m tests.passes.op_claims --only 'cumsum|nn'  those with names that match

`torch.testing._internal` has sample inputs for about 700 ops (`op_db`) and 110 modules (`module_db`). Each
dim of a sample input is taken for the samples: a model applies the op to a batch of rows. Other arguments
are fixed; where the op then needs another size of them, those with the same size along the dim are rows, too.
The model returns the sum of squared results times samples' weights, which is separable if each sample's
results are its own, or the plain sum, which also is if the op adds up over samples. `normalize-loss` accepts
or refuses each; a loss computed from uneven micro-batches as it says, and its gradients, are held against
plain PyTorch. Each op runs in a process of its own with a time limit: given sizes that an op does not
expect, some end the process.
"""

from __future__ import annotations

import argparse
import enum
import json
import multiprocessing
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from secc import pass_pipeline
from secc.errors import UserError
from secc.frontend.capture.block_layouts import annotate_block_layouts
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
_MOST_INPUTS = 3  # sample inputs of an op or module
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


_NOTABLE = (Verdict.FALSE_SEPARABLE, Verdict.FALSE_MIXING, Verdict.NOT_CAPTURED)


@dataclass(frozen=True)
class OpClaim:
    """One op, dim and loss."""

    op: str
    dim: int
    loss: str
    verdict: Verdict
    message: str = ""


@dataclass(frozen=True)
class _Subject:
    """An op or module with a sample input. `make` builds what is applied: the op, or a module with its
    parameters, equal for each call."""

    name: str
    make: Callable[[], Callable[..., Any]]
    input: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Application:
    """How a model applies a subject: the samples are at `dim`, `row_args` are the positions of other
    arguments with a row for each sample, and `weighted` says whether results have one."""

    subject: _Subject
    dim: int
    loss: str
    row_args: tuple[int, ...] = ()
    weighted: bool = False


class _Applied(nn.Module):
    """Applies a subject to rows of samples, and adds up the result."""

    def __init__(self, given: _Application) -> None:
        super().__init__()
        self.given, self.function = given, given.subject.make()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        a: torch.Tensor | None = None,
        b: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = self.given
        result = self.apply_rows(x, a, b, c)
        if given.loss == "sum":
            return result.sum()
        if given.weighted:
            result = result.movedim(given.dim, -1) * weight
        return result.square().sum()

    def apply_rows(self, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        """The first floating result for rows [samples, ...] of the input and of other arguments."""
        given = self.given
        args = list(given.subject.args)
        for i, rows in zip(given.row_args, others, strict=False):
            assert rows is not None
            args[i] = rows.movedim(0, given.dim)
        y = self.function((x * self.scale).movedim(0, given.dim), *args, **given.subject.kwargs)
        values = _flatten(y)
        return next(v for v in values if v.is_floating_point())


def _flatten(value: Any) -> list[torch.Tensor]:
    """The tensors of a result, which may be a tuple of tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _flatten(v)] if isinstance(value, list | tuple) else []


_OTHERS = ("a", "b", "c")  # names of arguments with rows, besides the input
LOSSES = ("squares", "sum")
_Sample = dict[str, torch.Tensor]
_current: list[Any] = []


def current_model() -> nn.Module:
    """The model that is compared now."""
    torch.manual_seed(0)
    return _Applied(_current[0])


def current_dataset() -> list[_Sample]:
    """The samples for it."""
    return _current[1]


def claims_of_entry(entry: Any) -> Iterator[OpClaim]:
    """Compares an entry of `op_db` or `module_db` for each dim of its usable sample inputs."""
    torch.manual_seed(0)  # modules' inputs are drawn
    for subject in _subjects_of_op(entry) if hasattr(entry, "sample_inputs") else _subjects_of_module(entry):
        for dim in range(subject.input.dim()):
            for loss in LOSSES:
                claim = _compare(subject, dim, loss)
                yield claim
                if claim.verdict in (Verdict.SEPARABLE, Verdict.NOT_APPLICABLE):
                    break


def _subjects_of_op(op: Any) -> list[_Subject]:
    """The first sample inputs with several entries along two dims, else with one such dim."""
    if torch.float32 not in op.supported_dtypes("cpu") or not op.supports_autograd:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = [s for s in op.sample_inputs("cpu", torch.float32) if _is_usable(s.input)]
    rank = max((min(s.input.dim(), 2) for s in samples), default=0)
    samples = [s for s in samples if min(s.input.dim(), 2) == rank]
    return _first_distinct(
        _Subject(name_of(op), lambda: op.op, s.input.detach(), tuple(s.args), dict(s.kwargs)) for s in samples
    )


def _subjects_of_module(info: Any) -> list[_Subject]:
    """A module with the first of its constructors' and forward's arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        )
    found: list[_Subject] = []
    for given in inputs:
        made, called = given.constructor_input, given.forward_input
        if called is None or not called.args or not _is_usable(called.args[0]):
            continue

        def make(made: Any = made) -> Callable[..., Any]:
            return info.module_cls(*made.args, **made.kwargs)

        x, *args = called.args
        found.append(_Subject(info.name, make, x.detach(), tuple(args), dict(called.kwargs)))
    return _first_distinct(found)


def _is_usable(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.dim() > 0
        and min(value.shape) > 1
        and value.numel() <= _MOST_ENTRIES
    )


def _first_distinct(subjects: Iterable[_Subject]) -> list[_Subject]:
    """The first few that differ in rank or in arguments that are no tensors."""
    found: dict[str, _Subject] = {}
    for s in subjects:
        plain = [a for a in (*s.args, *s.kwargs.items()) if not isinstance(a, torch.Tensor)]
        found.setdefault(f"{s.input.dim()} {plain}", s)
    return list(found.values())[:_MOST_INPUTS]


def name_of(entry: Any) -> str:
    """The name of an entry with its variant."""
    variant = getattr(entry, "variant_test_name", "")
    return entry.name + (f".{variant}" if variant else "")


def _compare(subject: _Subject, dim: int, loss: str) -> OpClaim:
    def claim(verdict: Verdict, message: str = "") -> OpClaim:
        return OpClaim(subject.name, dim, loss, verdict, message[:200])

    try:
        given, samples = _apply_to_rows(subject, dim, loss)
        torch.manual_seed(0)
        model = _Applied(given)
        whole = _loss_and_gradient(model, samples[:7])
        parts = [_loss_and_gradient(model, samples[:7][s]) for s in _SPLIT]
        if _draws_numbers(model, samples[:7]):
            return claim(Verdict.NOT_APPLICABLE, "draws random numbers")
    except Exception as error:  # whatever the op raises for other sizes of the dim
        return claim(Verdict.NOT_APPLICABLE, f"{type(error).__name__}: {error}")
    if not torch.isfinite(whole).all():
        return claim(Verdict.NOT_APPLICABLE, "not finite")
    adds_up = _is_close(whole, torch.stack(parts).sum(0))
    _current[:] = [given, samples]
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


def _draws_numbers(model: _Applied, samples: Sequence[_Sample]) -> bool:
    """Whether a batch has another loss with another seed. Torch's own tests seed some ops at each call."""
    found: list[torch.Tensor] = []
    with mock.patch("torch.manual_seed"):
        for seed in range(3):
            torch.default_generator.manual_seed(seed)
            found.append(_loss_and_gradient(model, samples))
    return not all(torch.equal(found[0], f) for f in found)


def _apply_to_rows(subject: _Subject, dim: int, loss: str) -> tuple[_Application, list[_Sample]]:
    """A subject with the other arguments fixed, or, where that raises, with rows of those that have as many
    entries along `dim`; and samples for it. Raises what the subject raises if neither works."""
    fits = tuple(
        i
        for i, a in enumerate(subject.args)
        if isinstance(a, torch.Tensor) and a.dim() > dim and a.shape[dim] == subject.input.shape[dim]
    )
    for row_args in dict.fromkeys([(), fits[: len(_OTHERS)]]):
        given = _Application(subject, dim, loss, row_args)
        samples = _draw_samples(given)
        try:
            model = _Applied(given)
            with torch.no_grad():
                shapes = {n: _apply_to_batch(model, samples[:n]).shape for n in (5, 7)}
        except Exception:
            if row_args or not fits:
                raise
            continue
        weighted = all(len(shape) > dim and shape[dim] == n for n, shape in shapes.items())
        return _Application(subject, dim, loss, row_args, weighted), samples
    raise AssertionError("the last try returns or raises")


def _draw_samples(given: _Application) -> list[_Sample]:
    """Rows of the sample input, again and again, slightly changed."""
    g = torch.Generator().manual_seed(0)
    rows = given.subject.input.movedim(given.dim, 0)
    others = [given.subject.args[i].detach().movedim(given.dim, 0) for i in given.row_args]
    found: list[_Sample] = []
    for i in range(_SAMPLES):
        row = i % len(rows)
        x = rows[row] * (1 + 0.01 * torch.rand(rows.shape[1:], generator=g))
        weight = torch.rand((), generator=g) + 0.5
        found.append({"x": x, "weight": weight} | {k: v[row] for k, v in zip(_OTHERS, others, strict=False)})
    return found


def _apply_to_batch(model: _Applied, samples: Sequence[_Sample]) -> torch.Tensor:
    batch = _batch(samples)
    return model.apply_rows(batch["x"], *(batch[key] for key in _OTHERS if key in batch))


def _batch(samples: Sequence[_Sample]) -> dict[str, torch.Tensor]:
    """Samples, stacked."""
    return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def _is_close(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether losses and gradients agree, up to rounding of the larger one."""
    return bool((wanted - found).abs().max() <= _TOLERANCE * wanted.abs().max().clamp(min=1))


def _loss_and_gradient(model: _Applied, samples: Sequence[_Sample]) -> torch.Tensor:
    """The loss of a batch and its gradients."""
    return _with_gradients(model(**_batch(samples)), model)


def _with_gradients(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """A loss and its gradients by all parameters, as one vector."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return torch.cat([loss.detach().reshape(1), *(g.reshape(-1) for g in gradients)]).double()


def _planned_loss_and_gradient(samples: Sequence[_Sample]) -> torch.Tensor:
    """The same from micro-batches, by the terms that `normalize-loss` writes. Raises UserError if it refuses
    the loss."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.py"
        path.write_text(_MODEL_FILE)
        user = load_model_file(path)
        survey = survey_dataset(user, _SAMPLES)
        meta = build_meta_model(user)
        captured = capture_model(user, meta, survey, describe_inputs(user, survey))
    module = capture_to_ir(captured)
    annotate_block_layouts(module, meta)
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
    return _with_gradients(loss, model)


def all_entries() -> list[Any]:
    """The entries of `op_db` and `module_db`, in their order."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return [*op_db, *module_db]


def claims_in_a_process(entry: Any, seconds: float) -> list[OpClaim]:
    """The claims of an entry, found by a child process, which may crash or take too long: the last claim
    then says so."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_send_claims, args=(entry, sender))
    child.start()
    sender.close()
    found: list[OpClaim] = []
    end = ""
    try:
        while receiver.poll(seconds):
            found.append(receiver.recv())
        end = f"takes more than {seconds:.0f} s"
    except EOFError:
        child.join()
        end = f"ends its process with {child.exitcode}" if child.exitcode else ""
    child.kill()
    child.join()
    return found + ([OpClaim(name_of(entry), -1, "", Verdict.NOT_APPLICABLE, end)] if end else [])


def _send_claims(entry: Any, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    for claim in claims_of_entry(entry):
        sender.send(claim)


def _format_claims(found: Sequence[OpClaim]) -> str:
    """Claims as JSON, one a line; messages of those that need attention only."""
    head = {
        "command": "python -m tests.passes.op_claims --json FILE",
        "about": "Whether each op and module of torch's own tests keeps the samples along a dim apart, as "
        "normalize-loss says and as losses and gradients of uneven micro-batches show.",
        "torch": torch.__version__,
        "counts": Counter(c.verdict.value for c in found),
        "columns": [f.name for f in fields(OpClaim)],
    }
    lines = [f" {json.dumps(k)}: {json.dumps(v)}," for k, v in head.items()]
    short = [c if c.verdict in _NOTABLE else replace(c, message="") for c in found]
    rows = ",\n".join(f"  {json.dumps(list(asdict(c).values()))}" for c in short)
    return "\n".join(["{", *lines, ' "rows": [', rows, " ]", "}"]) + "\n"


def _read_claims(path: Path) -> list[OpClaim]:
    """The claims that a run wrote, without those of its last op, which may be incomplete."""
    rows = json.loads(path.read_text())["rows"]
    last = rows[-1][0]
    return [
        OpClaim(op, dim, loss, Verdict(verdict), message)
        for op, dim, loss, verdict, message in rows
        if op != last
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="ops and modules with names that match")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the claims; goes on where it stopped"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of one comparison")
    options = parser.parse_args()
    found = _read_claims(options.json) if options.json and options.json.exists() else list[OpClaim]()
    done = {c.op for c in found}
    for entry in all_entries():
        if name_of(entry) in done or (options.only and not re.search(options.only, entry.name)):
            continue
        for claim in claims_in_a_process(entry, options.seconds):
            found.append(claim)
            if claim.verdict in _NOTABLE:
                print(
                    f"{claim.op} dim {claim.dim} {claim.loss}: {claim.verdict}  {claim.message}", flush=True
                )
        if options.json:
            options.json.write_text(_format_claims(found))
    counts = Counter(c.verdict.value for c in found)
    print(", ".join(f"{verdict}: {count}" for verdict, count in counts.items()))
    return 1 if counts[Verdict.FALSE_SEPARABLE.value] else 0


if __name__ == "__main__":
    from tests.passes import op_claims  # what the model file imports, too

    sys.exit(op_claims.main())
