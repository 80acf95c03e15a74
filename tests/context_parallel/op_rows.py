"""Compares torch's ops on a rank's rows with the whole op: results, dtypes and gradients of all inputs.

    python -m tests.context_parallel.op_rows                          all ops of torch's own tests
    python -m tests.context_parallel.op_rows --only 'roll|topk'       those with names that match

`torch.testing._internal` has sample inputs for about 700 ops (`op_db`). Each is called on two ranks (threads)
as a function, as a method and, where there is one, in place; in turns each dim of its first tensor holds
rows, alone or together with all tensors of that shape, and so do those of its second tensor. Ops that draw
random numbers are left out, as are those that torch gives no plain result for.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from secc.frontend.tp_search.thread_ranks import ThreadGroup, run_thread_ranks
from secc.runtime.context_parallel import row_exchange
from secc.runtime.context_parallel.row_mode import RowMode
from secc.runtime.context_parallel.row_rules import RowsNotWritable

RANKS, MOST_SAMPLES, MOST_ENTRIES = 2, 40, 4000
RANDOM = re.compile(
    "rand|bernoulli|multinomial|normal|empty|uniform|cauchy|exponential|geometric|rrelu|dropout"
)
DRAWING_SAMPLES = ("dropout_p", "training")  # keyword arguments of samples that draw

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class RowClaim:
    """What a call on rows showed: "" if it is as the whole one, else how it differs."""

    op: str
    call: str
    difference: str
    on_rows: bool  # no function in it got gathered tensors


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


def _on_tensors(change: Callable[[torch.Tensor], Any], values: Any) -> Any:
    return tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, values)


def _copied(call: Call) -> Call:
    return _on_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), call)


def _not_leaves(call: Call) -> Call:
    """Arguments that may be written in place."""
    return _on_tensors(lambda t: t.clone() if t.requires_grad else t, call)


def _run_backward(outs: Any) -> None:
    ends, generator = [t for t in _tensors(outs) if t.requires_grad], torch.Generator().manual_seed(1)
    if ends:
        weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in ends]
        torch.autograd.backward(ends, weights)


def _run_whole(function: Callable[..., Any], call: Call) -> tuple[Any, list[torch.Tensor | None]]:
    own = _copied(call)
    args, kwargs = _not_leaves(own)
    out = function(*args, **kwargs)
    _run_backward(out)
    return out, [t.grad for t in _tensors(own) if t.requires_grad]


def _run_rows(
    function: Callable[..., Any], call: Call, in_rows: tuple[int, ...], dim: int, group: ThreadGroup
) -> tuple[Any, list[torch.Tensor | None], bool]:
    own, mode = _copied(call), RowMode(group)
    number = iter(range(len(_tensors(own))))

    def enter(tensor: torch.Tensor) -> torch.Tensor:
        entered = row_exchange.enter_section(tensor, group)
        if next(number) in in_rows:
            return mode.take_own_rows(entered, dim)
        return entered.clone() if entered.requires_grad else entered

    args, kwargs = _on_tensors(enter, own)
    with mode:
        out = function(*args, **kwargs)
    out = _on_tensors(lambda t: row_exchange.leave_section(t, group), out)
    _run_backward(out)
    return out, [t.grad for t in _tensors(own) if t.requires_grad], not mode.gathered


def _difference(expected: Any, found: Any) -> str:
    """Says how results differ, "" if they do not."""
    wanted, given = tree_leaves(expected), tree_leaves(found)
    if len(wanted) != len(given):
        return f"{len(given)} results, not {len(wanted)}"
    for a, b in zip(wanted, given, strict=True):
        if not isinstance(a, torch.Tensor):
            if isinstance(a, bool | int) and a != b:
                return f"{b}, not {a}"
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}"
        if not torch.allclose(_as_double(a), _as_double(b), rtol=1e-7, atol=1e-9, equal_nan=True):
            return "other values"
    return ""


def _as_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _compare(
    name: str, function: Callable[..., Any], call: Call, in_rows: tuple[int, ...], dim: int
) -> RowClaim | None:
    """Compares one call; None where writing into rows is refused."""
    shapes = [tuple(t.shape) for t in _tensors(call)]
    others = [a for a in call[0] if not isinstance(a, torch.Tensor)]
    text = f"{shapes} {others} {call[1]}, dim {dim} of {in_rows}"
    whole, gradients = _run_whole(function, call)
    try:
        ranks = run_thread_ranks(RANKS, lambda group: _run_rows(function, call, in_rows, dim, group))
    except RowsNotWritable:
        return None
    except Exception as error:
        return RowClaim(name, text, f"{type(error).__name__}: {error}", False)
    difference = ""
    for out, found, _ in ranks:
        difference = difference or _difference(whole, out)
        for wanted, given in zip(gradients, found, strict=True):
            if wanted is not None and not difference:
                given = torch.zeros_like(wanted) if given is None else given
                difference = "gradient: " * bool(unlike := _difference(wanted, given)) + unlike
    return RowClaim(name, text, difference, ranks[0][2])


def iter_claims(op: Any) -> Iterator[RowClaim]:
    """Compares an op of `op_db` on rows with the whole op, one call after the other."""
    name = ".".join(filter(None, (op.name, op.variant_test_name)))
    dtypes = op.supported_dtypes("cpu")
    dtype = next((t for t in (torch.float64, torch.float32, torch.int64, torch.bool) if t in dtypes), None)
    if dtype is None or RANDOM.search(name):
        return
    try:
        samples = list(
            op.sample_inputs("cpu", dtype, requires_grad=dtype.is_floating_point and op.supports_autograd)
        )
    except Exception:  # samples of another device or library
        return
    functions = {"": op.op, ".method": op.method_variant, ".inplace": op.inplace_variant}
    for sample in samples[:: -(-len(samples) // MOST_SAMPLES) or 1]:
        call: Call = ((sample.input, *sample.args), dict(sample.kwargs))
        tensors = _tensors(call)
        large = any(t.layout != torch.strided or t.numel() > MOST_ENTRIES for t in tensors)
        if not tensors or large or any(call[1].get(key) for key in DRAWING_SAMPLES):
            continue
        for kind, function in functions.items():
            if function is None:
                continue
            try:
                _run_whole(function, call)
            except Exception:  # not as a method, or not in place
                continue
            yield from _iter_rows(name + kind, function, call, tensors)


def _iter_rows(
    name: str, function: Callable[..., Any], call: Call, tensors: list[torch.Tensor]
) -> Iterator[RowClaim]:
    for dim in range(tensors[0].ndim):
        alike = tuple(i for i, t in enumerate(tensors) if t.shape == tensors[0].shape)
        second = [(1,)] if len(tensors) > 1 and tensors[1].ndim > dim else []
        for in_rows in dict.fromkeys([(0,), alike, *second]):
            if tensors[in_rows[0]].shape[dim] > 1:
                claim = _compare(name, function, call, in_rows, dim)
                if claim is not None:
                    yield claim


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a pattern for names of ops")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    count: Counter[str] = Counter()
    for op in op_db:
        if re.search(given.only, op.name):
            for claim in iter_claims(op):
                count["other" if claim.difference else "on rows" if claim.on_rows else "gathered"] += 1
                if claim.difference:
                    print(claim.op, claim.call[:150], claim.difference[:150], sep="   ", flush=True)
    print(dict(count))


if __name__ == "__main__":
    main()
