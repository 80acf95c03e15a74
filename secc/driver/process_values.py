"""Finds values that differ from process to process and that reach the loss: a process's number, its rank, its
clock, a hash of a text, random numbers that are drawn while a file is imported, and whatever a function with
a cache keeps of them.

Plain PyTorch computes in one process, a plan in one for each rank, and samples are loaded in others. So the
user's files are imported twice, as two processes would, and the plan computes a step in both.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import io
import os
import platform
import random
import socket
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from secc.errors import NotEnoughMemory, UserError
from secc.runtime.host.hidden_ranks import are_ranks_hidden
from secc.runtime.model.imported_code import find_imported_files
from secc.runtime.model.item_seeds import seeded_rngs
from secc.runtime.model.source_lines import format_source_line
from secc.runtime.model.user_file import CALLBACKS, UserModel, are_same_values, load_model_file
from secc.runtime.parameters.mixed_precision import cast_model
from secc.runtime.plan.schema import Plan
from secc.runtime.training.eager_reference import REFERENCE_SEED, LossAndGradients, compare_results
from secc.runtime.training.one_rank_plan import OneRankPlan

_PID = 91_003
_MOST_BYTES = 1 << 28  # of parameters in float32: the model is built twice more
_OF_PROCESS = {
    *("getpid", "getppid", "environ", "getenv", "gethostname", "node", "urandom", "getnode", "hash"),
    *(f"uuid{version}" for version in range(1, 9)),
}
_OF_TIME_OR_CACHE = {"time", "time_ns", "monotonic", "perf_counter", "random", "lru_cache", "cache"}
_OF_RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "HOSTNAME": "node1"}
_PASSING_MODULES = {"os", "collections.abc", "_collections_abc"}  # whatever calls these reads the environment
_BETWEEN_STEPS = {*CALLBACKS, "optimizer", "scheduler", "metrics"}
_Read = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class _ProcessStep:
    """What a step gave in one process, and the items of the dataset; None for the step if it failed."""

    result: LossAndGradients | None
    model: nn.Module
    items: Sequence[Mapping[str, Any]]


def refuse_process_values(
    plan: Plan,
    user: UserModel,
    write_sections: Callable[[Path], None],
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    indices: Sequence[int],
) -> None:
    """Raises UserError if a step of the plan on these samples, or the dataset's items with these indices,
    are others in another process. Models that are too large to be built twice more are left out."""
    imported = find_imported_files(user.module, model)
    files = {str(user.path.resolve()), *map(str, imported.values())}
    names = {name for file in sorted(files) for name in _names_of_steps(file)}
    if names.isdisjoint(_OF_PROCESS | _OF_TIME_OR_CACHE):
        return
    if sum(p.numel() * 4 for p in model.parameters()) > _MOST_BYTES:
        return
    if names.isdisjoint(_OF_PROCESS):
        indices = ()  # a data set may be long in the making
    reads = list[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "plan"
        write_sections(directory)

        def run(weights: nn.Module | None) -> _ProcessStep | None:
            with _imported_again(imported), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _run_process(plan, user, directory, samples, indices, weights)

        try:
            with _seeded(0):
                first = run(None)
            with _seeded(1), _another_process(files, reads):
                other = run(first.model if first else None)
        except Exception:  # a file that cannot be imported twice, a model that cannot be built twice
            return
    if first is None or other is None or first.result is None:
        return
    if other.result is None or not compare_results(other.result, first.result).is_exact:
        raise _process_error("the loss", reads, user)
    if any(not are_same_values(a, b) for a, b in zip(first.items, other.items, strict=True)):
        raise _process_error("what dataset() returns for a sample", reads, user)


def _names_of_steps(file: str) -> Iterator[str]:
    """Yields the names that the code of a file uses or imports, but for functions that run between steps."""
    tree = ast.parse(Path(file).read_bytes())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.FunctionDef) and n.name in _BETWEEN_STEPS)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


def _process_error(what: str, reads: Sequence[tuple[str, str]], user: UserModel) -> UserError:
    drawn = "a random number that an import or a function with a cache draws"
    named = " or ".join(dict.fromkeys(name for name, _ in reads)) or drawn
    return UserError(
        f"{what} depends on {named}, which differs from process to process: ranks and their loaders are"
        " processes of their own",
        next((where for _, where in reads), "") or str(user.path),
        "let it follow from the sample, the weights or a constant; numbers that dataset() draws for a sample"
        " are seeded by (seed, epoch, i)",
    )


def _run_process(
    plan: Plan,
    user: UserModel,
    directory: Path,
    samples: Sequence[Mapping[str, Any]],
    indices: Sequence[int],
    weights: nn.Module | None,
) -> _ProcessStep:
    """Imports the model file, builds the model, with these weights if any are given, and computes a step of
    the plan."""
    again = load_model_file(user.path)
    again.function_blocks = user.function_blocks
    if user.is_small:
        again = again.as_small()
    with contextlib.redirect_stdout(io.StringIO()):
        with seeded_rngs(REFERENCE_SEED):
            model = again.build_model()
        items = [again.load_sample(i) for i in indices]
    cast_model(model, plan.dtype)
    if weights is not None:
        _copy_weights(weights, model)
    rank = OneRankPlan(plan, directory, again, model)
    try:
        return _ProcessStep(rank.run_step(samples), model, items)
    except NotEnoughMemory:
        raise  # nothing is compared then
    except Exception:  # whatever the user's code raises
        return _ProcessStep(None, model, items)


@torch.no_grad()
def _copy_weights(weights: nn.Module, model: nn.Module) -> None:
    """One process builds the weights of a run, whatever builds the model there."""
    given = dict((*weights.named_parameters(), *weights.named_buffers()))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.copy_(given[name])


@contextmanager
def _imported_again(imported: Mapping[str, Path]) -> Iterator[None]:
    """Lets these modules be imported again, and gives the present ones back."""
    present = {name: sys.modules.pop(name) for name in imported}
    try:
        yield
    finally:
        sys.modules.update(present)


@contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Begins with other states of all generators for another number, and gives them back."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def _another_process(files: set[str], reads: list[tuple[str, str]]) -> Iterator[None]:
    """Gives code in these files what it would read in another process, and adds what it reads, and the line,
    to `reads`."""

    def make_reader(name: str, read: _Read, read_there: _Read) -> _Read:
        def read_changed(*args: Any) -> Any:
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            while frame.f_globals.get("__name__") in _PASSING_MODULES and frame.f_back is not None:
                frame = frame.f_back
            changed = read_there(*args) if frame.f_code.co_filename in files else None
            if changed is None:
                return read(*args)
            reads.append((name, format_source_line(frame.f_code, frame.f_lineno)))
            return changed

        return read_changed

    node, pid, hour = f"{platform.node()}-1", os.getpid() + _PID, 3600.0
    read_time, read_clock, read_timer = time.time, time.monotonic, time.perf_counter
    changes: list[tuple[Any, str, str, _Read]] = [
        (os, "getpid", "os.getpid()", lambda: pid),
        (os, "getppid", "os.getppid()", lambda: pid),
        (os, "urandom", "os.urandom()", random.randbytes),
        (type(os.environ), "__getitem__", "os.environ", _read_variable),
        (socket, "gethostname", "socket.gethostname()", lambda: node),
        (platform, "node", "platform.node()", lambda: node),
        (uuid, "getnode", "uuid.getnode()", lambda: pid),
        (uuid, "uuid1", "uuid.uuid1()", lambda *_: uuid.UUID(int=random.getrandbits(128))),
        (uuid, "uuid4", "uuid.uuid4()", lambda: uuid.UUID(int=random.getrandbits(128))),
        (time, "time", "time.time()", lambda: read_time() + hour),
        (time, "time_ns", "time.time_ns()", lambda: int((read_time() + hour) * 1e9)),
        (time, "monotonic", "time.monotonic()", lambda: read_clock() + hour),
        (time, "perf_counter", "time.perf_counter()", lambda: read_timer() + hour),
        (builtins, "hash", "the hash of a text", _hash_text),
    ]
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _, _ in changes]
    for owner, attribute, name, read_there in changes:
        setattr(owner, attribute, make_reader(name, getattr(owner, attribute), read_there))
    try:
        yield
    finally:
        for owner, attribute, read in before:
            setattr(owner, attribute, read)


def _read_variable(_environment: Any, name: str) -> str | None:
    """Returns a variable of another rank; None for what is the same there. Code that makes models and loads
    samples sees one process."""
    return None if are_ranks_hidden() else _OF_RANK.get(name)


def _hash_text(content: Any) -> int | None:
    """Returns the hash of a text in another process; None for what has the same hash there."""
    return hash(("another process", content)) if isinstance(content, (str, bytes)) else None
