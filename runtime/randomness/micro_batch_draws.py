"""The random numbers of one micro-batch: intercepts random ops while a section runs and gives each sample its
own numbers.

Recomputation (`torch.utils.checkpoint`) must draw what the forward drew. It restores the state of torch's CPU
generator, so that generator's seed is used as a register for the number of the next draw. The forward appends
the name of each draw to a list, and a recomputation in the backward reads the names again, from the number in
the register on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from secc.runtime.errors import UserError
from secc.runtime.model.function_blocks import function_blocks_of
from secc.runtime.model.source_lines import (
    SourceLines,
    current_source_line,
    module_paths_by_id,
    random_call_name,
    running_module_and_lines,
)
from secc.runtime.plan.batch_sizes import combine_sizes
from secc.runtime.plan.call_sites import parse_call_site
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.schema import RandomOp, Symbol
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.randomness import random_op_values, shard_coordinates
from secc.runtime.randomness.bits import coordinate_offsets, generate_bits, hash_key

_NO_DRAW_NUMBER = 1 << 62  # in the register while no recomputation runs
_RNN_FUNCTIONS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_UNSEEN_DRAW_REMEDY = "compile the model again with more --stats-samples, or switch the random op off"


# A call that draws at most as many numbers for a sample may decide about it by all of them
# (`torch.rand(n) < 0.1`, `torch.randint(0, 50, (n, 1)) == 0`).
_COIN_NUMBERS = 8
_extreme_coins: ContextVar[ExtremeCoins | None] = ContextVar("extreme_coins", default=None)


@dataclass
class ExtremeCoins:
    """While these are in use, random numbers come from an end of their range, so that what forward does for
    rare numbers happens often.

    A call that draws few numbers for a sample draws them all from the lowest 0.1% of their range for about
    half of the samples, and from the highest 0.1% for the others. A call that draws many (a mask; forward may
    read a single column of it) does so at half of the places of its result, and draws as usual elsewhere.

    number: decides which samples and calls draw the lowest; with 2k + 1 these are the ones that draw the
    highest with 2k. It also decides the places; with 4k + 2 and 4k + 3 they are those left out with 4k and
    4k + 1.
    were_drawn: there was such a call.
    """

    number: int
    were_drawn: bool = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        token = _extreme_coins.set(self)
        try:
            yield
        finally:
            _extreme_coins.reset(token)

    def is_low(self, call: str, key: object) -> bool:
        """Whether a call draws the lowest numbers for the sample with this key."""
        return bool((hash_key(call, key, self.number // 2) ^ self.number) & 1)

    def choose_places(self, bits: torch.Tensor) -> torch.Tensor:
        """Return which numbers are drawn so, from random bits that depend on places alone."""
        return (bits >> self.number // 4 & 1) == self.number // 2 % 2


def make_sample_keys(seed: int, samples: Sequence[SampleMeta]) -> list[int]:
    """Return the key of each sample of a global batch, from the step's seed and the dataset index. A
    sample that comes twice has two keys."""
    occurrences: Counter[int] = Counter()
    keys: list[int] = []
    for sample in samples:
        keys.append(hash_key(seed, "sample", sample.id, occurrences[sample.id]))
        occurrences[sample.id] += 1
    return keys


class ModelRandomness:
    """The plan's random ops by name, and the paths of the model's modules.

    With `dropout_off`, dropout in a section's glue changes nothing, as under `model.eval()`; modules know it
    themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        draws: Iterable[RandomOp],
        symbols: Sequence[Symbol],
        dropout_off: bool = False,
    ) -> None:
        self.dropout_off = dropout_off
        self.paths, self.symbols = module_paths_by_id(model), symbols
        self.draws = {d.call: d for d in draws}
        self.draws_by_site = Counter(call.rpartition("#")[0] for call in self.draws)
        self.functions = frozenset(function_blocks_of(model))

    def make_draws(
        self, seed: int, keys: Sequence[int], sizes: Sequence[Mapping[str, int]]
    ) -> MicroBatchDraws:
        """Return the random numbers of a micro-batch, from the keys and sizes of its samples. If it is
        padded wider than a sample, the sample's sizes have the padded widths."""
        combined = combine_sizes(sizes, self.symbols)
        widths = {s.name: combined[s.name] for s in self.symbols if s.kind == "width"}
        return MicroBatchDraws(self, seed, keys, [{**sample_sizes, **widths} for sample_sizes in sizes])


def loop_draw_name(site: str) -> str:
    """The name in a plan of all draws of a place that draws in a loop over time steps or samples."""
    return f"{site}#*"


def forward_context(draws: MicroBatchDraws | None) -> AbstractContextManager[None]:
    """Context of a micro-batch's forward; empty without random ops."""
    return nullcontext() if draws is None else draws.forward()


def backward_context(draws: MicroBatchDraws | None) -> AbstractContextManager[None]:
    """Context of a micro-batch's backward; empty without random ops."""
    return nullcontext() if draws is None else draws.backward()


class MicroBatchDraws:
    """The random numbers of one micro-batch in one section: in its forward and, for recomputation, in its
    backward."""

    def __init__(
        self, known: ModelRandomness, seed: int, keys: Sequence[int], sizes: Sequence[Mapping[str, int]]
    ) -> None:
        self._model, self._seed, self._keys, self._sizes = known, seed, keys, sizes
        self._names: list[str] = []  # of the draws so far
        self._calls_by_name: Counter[str] = Counter()
        self._given_name: str | None = None
        self._owner: str | None = None  # of a function that is a block, the module that runs it
        self._site: SourceLines = ()
        self._site_call = 0, 1  # which of the calls by these lines runs, and how many there are
        self._calls_in_site: Counter[str] = Counter()
        self._backward = False
        self._rows: dict[tuple[str, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def calls_by_site(self) -> Mapping[str, int]:
        """How often each place of the user's forward has drawn in this micro-batch."""
        return self._calls_by_name

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Let random ops inside draw this micro-batch's numbers."""
        torch.default_generator.manual_seed(len(self._names))
        with _UnfusedDropout(), _KeyedRandomOps(self):
            yield
        self._check_loops()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Let recomputation inside draw again what the forward drew."""
        self._backward = True
        torch.default_generator.manual_seed(_NO_DRAW_NUMBER)
        with _UnfusedDropout(), _KeyedRandomOps(self):
            yield

    def draw_named(self, call: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)`, a random op of a section's glue, under its name in the
        user's forward."""
        if self._model.dropout_off and random_op_values.is_dropout(function):
            return random_op_values.identity_dropout(function, *args)
        self._given_name = call
        try:
            return function(*args, **kwargs)
        finally:
            self._given_name = None

    @contextmanager
    def at_call_site(self, site: str, call: int = 0, calls: int = 1) -> Iterator[None]:
        """Give random ops of blocks that are called inside the source lines `site` of the user's forward,
        which the section's own code hides. `call`: which of the `calls` by these lines it is; other sections
        may do the calls before it."""
        self._owner, self._site = parse_call_site(site)
        self._site_call = call, calls
        self._calls_in_site.clear()
        try:
            yield
        finally:
            self._owner, self._site, self._site_call = None, (), (0, 1)

    def draw_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a random op. Raises UserError for an op, a call or a shape that the plan
        does not have."""
        if not random_op_values.is_supported(func):
            raise UserError(
                f"{func} draws random numbers that cannot be tied to samples",
                current_source_line(),
                "use another op, or switch dropout off",
            )
        call = self._next_draw_name(func)
        draws = self._model.draws
        planned = draws.get(call) or draws.get(loop_draw_name(call.rpartition("#")[0]))
        if planned is None:
            raise UserError(
                f"{func} draws random numbers where no capture saw it ({call})",
                current_source_line(),
                _UNSEEN_DRAW_REMEDY,
            )

        def make_bits(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
            bits = self._generate_entry_bits(planned, call, shape, device, self._keys)
            coins = _extreme_coins.get()
            if coins is None or not random_op_values.has_ends(func):
                return bits
            few = math.prod(shape) <= _COIN_NUMBERS * self._count_rows(planned, device)
            if not few and not random_op_values.decides_by_rows(func, args, kwargs):
                return bits
            coins.were_drawn = True
            low = self._choose_low(coins, planned, call, shape, device)
            pushed = random_op_values.push_to_ends(func, args, kwargs, bits, low)
            if few:
                return pushed
            same_for_all = self._generate_entry_bits(planned, call, shape, device, [0] * len(self._keys))
            return torch.where(coins.choose_places(same_for_all), pushed, bits)

        return random_op_values.draw_op_result(func, args, kwargs, make_bits)

    def _count_rows(self, draw: RandomOp, device: torch.device) -> int:
        """The rows of all samples in a result; 1 for one that has none."""
        return len(self._rows_by_sample(draw.rows, device)[0]) if draw.dims else 1

    def _choose_low(
        self, coins: ExtremeCoins, draw: RandomOp, call: str, shape: tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        """Return which entries of a result of `shape` are the lowest, if they are drawn from an end."""
        if not draw.dims:
            key = self._key_of_row(draw, call) if draw.has_call_per_row else ()
            return torch.full(shape, coins.is_low(call, key), device=device)
        owner = self._rows_by_sample(draw.rows, device)[0]
        low = torch.tensor([coins.is_low(call, key) for key in self._keys], device=device)[owner]
        return low.view([-1 if d == draw.dims[0] else 1 for d in range(len(shape))]).expand(shape)

    def _next_draw_name(self, func: Any) -> str:
        number = torch.default_generator.initial_seed() if self._backward else len(self._names)
        torch.default_generator.manual_seed(number + 1)
        if number < len(self._names):
            return self._names[number]
        if self._backward:
            remedy = "draw in forward, and leave torch.utils.checkpoint its preserve_rng_state"
            raise UserError(
                f"{func} draws random numbers in the backward that the forward did not draw",
                current_source_line(),
                remedy,
            )
        call = self._given_name
        if call is None:
            path, lines = running_module_and_lines(self._model.paths)
            if self._owner is not None and path in self._model.functions:
                path = self._owner
            name = random_call_name(path, lines + self._site)
            call = f"{name}#{self._number_call(name)}"
            self._calls_by_name[name] += 1
            self._calls_in_site[name] += 1
        self._names.append(call)
        return call

    def _number_call(self, name: str) -> int:
        """Return which of the draws with this name is next, in the user's forward."""
        call, calls = self._site_call
        known = self._model.draws_by_site[name]
        if calls == 1 or known % calls:  # a loop: how often it draws is not known
            return self._calls_by_name[name]
        return call * known // calls + self._calls_in_site[name]

    def _generate_entry_bits(
        self,
        draw: RandomOp,
        call: str,
        shape: tuple[int, ...],
        device: torch.device,
        keys_of_samples: Sequence[int],
    ) -> torch.Tensor:
        """Return 64 bits for each entry of a result of `shape`, of the call named `call`."""
        places = shard_coordinates.global_coordinates(shape, device)
        if not draw.dims:
            key = self._key_of_row(draw, call) if draw.has_call_per_row else (self._seed, "all", call)
            return generate_bits(
                [coordinate_offsets(d, at) for d, at in enumerate(places)], hash_key(*key), device
            )
        owner, within = self._rows_by_sample(draw.rows, device)
        if any(
            d >= len(shape) or (shape[d] != len(owner) and not shard_coordinates.holds_part(d))
            for d in draw.dims
        ):
            raise UserError(
                f"the random op {call} has a result of shape {list(shape)}, "
                f"but the samples' rows are {len(owner)}",
                draw.where,
                _UNSEEN_DRAW_REMEDY,
            )
        first_rows = places[draw.dims[0]]
        for d in draw.dims:
            places[d] = within[places[d]]
        parts = [coordinate_offsets(d, at) for d, at in enumerate(places)]
        keys = torch.tensor([hash_key(k, call) for k in keys_of_samples], dtype=torch.int64, device=device)
        parts[draw.dims[0]] = parts[draw.dims[0]] + keys[owner[first_rows]]
        return generate_bits(parts, 0, device)

    def _key_of_row(self, draw: RandomOp, call: str) -> tuple[object, ...]:
        """Return what names the numbers of a call that draws for one row: the sample, the place, and which
        of its calls this is for the sample."""
        owner, within = self._rows_by_sample(draw.rows, torch.device("cpu"))
        site, _, number = call.rpartition("#")
        if not len(owner):
            raise UserError(
                f"the random op {call} draws for a row of a sample, but the samples have none",
                draw.where,
                _UNSEEN_DRAW_REMEDY,
            )
        loop, row = divmod(int(number), len(owner))
        return self._keys[int(owner[row])], site, loop, int(within[row])

    def _check_loops(self) -> None:
        """Raise UserError if a loop over rows drew for some of them only."""
        for site, calls in self._calls_by_name.items():
            draw = self._model.draws.get(loop_draw_name(site))
            if draw is None or not draw.has_call_per_row:
                continue
            rows = len(self._rows_by_sample(draw.rows, torch.device("cpu"))[0])
            if calls % rows:
                raise UserError(
                    f"a loop drew random numbers {calls} times, but the samples' rows are {rows}",
                    draw.where,
                    _UNSEEN_DRAW_REMEDY,
                )

    def _rows_by_sample(self, rows: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each row of the micro-batch, the sample that it belongs to and its place among that
        sample's rows."""
        if (rows, device) not in self._rows:
            counts = torch.tensor([evaluate_expr(rows, sizes) for sizes in self._sizes])
            owner = torch.arange(len(counts)).repeat_interleave(counts)
            within = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
            self._rows[rows, device] = owner.to(device), within.to(device)
        return self._rows[rows, device]


class _KeyedRandomOps(TorchDispatchMode):
    """Replaces random ops by the micro-batch's draws."""

    def __init__(self, draws: MicroBatchDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if random_op_values.is_random(func, args, kwargs):
            return self._draws.draw_op(func, args, kwargs)
        return func(*args, **kwargs)


class _UnfusedDropout(TorchFunctionMode):
    """Keeps dropout out of kernels that draw by themselves: attention runs as plain ops, recurrent layers
    without cuDNN."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and (
            args[4] if len(args) > 4 else kwargs.get("dropout_p")
        ):
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _RNN_FUNCTIONS and any(isinstance(a, float) and a for a in args):
            with torch.backends.cudnn.flags(enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)
