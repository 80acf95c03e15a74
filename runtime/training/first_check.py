"""Compares the plan with plain PyTorch on a few samples before the first step of a run.

A plan holds the ops between modules as they were when it was made. Files and packages are compared by
digests when a run starts, but forward may also read what no digest knows: an environment variable, a file, a
clock. If such a value has changed, the plan computes the old loss. So rank 0 builds the user's model once
more, for models that are cheap to build, and computes loss and gradients with and without the plan. It does
so in a child process, while the ranks load their weights and connect; the first step waits for the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secc.runtime.errors import UserError
from secc.runtime.host.child_processes import prepare_worker_process
from secc.runtime.model.item_seeds import seeded_rngs
from secc.runtime.model.user_file import UserModel
from secc.runtime.parameters.mixed_precision import cast_model
from secc.runtime.parameters.rank_weights import is_built_everywhere
from secc.runtime.plan.schema import Plan
from secc.runtime.training.eager_reference import REFERENCE_SEED
from secc.runtime.training.one_rank_plan import CHECK_MICRO_BATCH, OneRankPlan

SAMPLE_COUNT = 4  # two micro-batches
_LOADED_SAMPLES = 8  # those with the most input patterns are compared
_TIME_LIMIT_S = 120.0


@dataclass(frozen=True)
class FirstCheckResult:
    """What the comparison found. expected, computed: the loss of plain PyTorch and of the plan.
    loss_difference, gradient_difference: in units of the tolerances. worst: the parameter with the most
    different gradient. left_out: why nothing was compared, "" if it was."""

    expected: float = 0.0
    computed: float = 0.0
    loss_difference: float = 0.0
    gradient_difference: float = 0.0
    worst: str = ""
    left_out: str = ""


class FirstCheck:
    """The comparison in a child process of this rank. Construct it before this process has threads, process
    groups or a GPU context."""

    def __init__(self, plan: Plan, directory: Path, user: UserModel) -> None:
        self._user = user
        parent = os.getpid()
        self._pipe, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._child = os.fork()
        if self._child:
            os.close(writing)
            return
        try:
            prepare_worker_process(parent, "secc-check")
            logging.disable(logging.WARNING)  # the rank itself builds the same model, with the same warnings
            result = compare_first_samples(plan, directory, user)
            os.write(writing, json.dumps(dataclasses.asdict(result)).encode())
        finally:
            os._exit(0)  # the parent's cleanup is not the child's

    def finish(self) -> None:
        """Waits for the result. Raises UserError if the plan does not compute what plain PyTorch computes;
        prints a note if they could not be compared."""
        result = self._receive_result()
        if result.left_out:
            sys.stderr.write(f"note: the first batch was not compared: {result.left_out}\n")
        elif max(result.loss_difference, result.gradient_difference) > 1:
            raise _difference_error(result, self._user)

    def _receive_result(self) -> FirstCheckResult:
        deadline, received = time.monotonic() + _TIME_LIMIT_S, b""
        while select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                break
            received += piece
        else:
            os.kill(self._child, signal.SIGKILL)
            received = b""
        os.close(self._pipe)
        os.waitpid(self._child, 0)
        if received:
            return FirstCheckResult(**json.loads(received))
        return FirstCheckResult(left_out=f"it ended without a result, or took more than {_TIME_LIMIT_S:g} s")


def start_first_check(plan: Plan, directory: Path, user: UserModel) -> FirstCheck | None:
    """Starts the comparison in a child process; returns None for a model that is not built on every rank."""
    return FirstCheck(plan, directory, user) if is_built_everywhere(plan) else None


def compare_first_samples(plan: Plan, directory: Path, user: UserModel) -> FirstCheckResult:
    """Compares the plan in `directory` with plain PyTorch on a few samples of the dataset, on the CPU with
    the weights that `model()` makes.

    Whatever fails is a reason to leave the comparison out: the run itself says what is wrong.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with seeded_rngs(REFERENCE_SEED):
                model = user.build_model()
            cast_model(model, plan.dtype)
            rank = OneRankPlan(plan, directory, user, model)
            samples = _choose_samples(user)
            # What was accepted by name is exact where there is one micro-batch.
            micro_batch = len(samples) if plan.checks.get("accepted") else CHECK_MICRO_BATCH
            found = rank.compare_step(samples, micro_batch, rank.run_reference(samples)).decisive
    except Exception as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        return FirstCheckResult(left_out=lines[0])
    return FirstCheckResult(
        found.reference.loss,
        found.result.loss,
        found.difference.loss,
        found.difference.gradient,
        found.difference.worst,
    )


def _choose_samples(user: UserModel) -> list[Mapping[str, Any]]:
    """Returns SAMPLE_COUNT samples: one for each combination of keys among the loaded ones, then others. A
    smaller dataset repeats."""
    loaded = [user.load_sample(i) for i in user.survey_ids(_LOADED_SAMPLES)]
    first_of_pattern = {frozenset(s): s for s in reversed(loaded)}
    others = [s for s in loaded if s is not first_of_pattern[frozenset(s)]]
    chosen = [*first_of_pattern.values(), *others]
    return [chosen[i % len(chosen)] for i in range(SAMPLE_COUNT)]


def _difference_error(result: FirstCheckResult, user: UserModel) -> UserError:
    gradients = (
        f", and the gradient of {result.worst} is off by {result.gradient_difference:.3g} tolerances"
        if result.gradient_difference > 1
        else ""
    )
    return UserError(
        f"the plan does not compute what the model computes: for {SAMPLE_COUNT} samples plain PyTorch's loss"
        f" is {result.expected:.9g}, the plan's is {result.computed:.9g}{gradients}",
        user.forward_source_line or str(user.path),
        "compile the model again: what forward reads (an environment variable, a file, a global) has changed"
        " since the plan was made; --no-first-check trains the plan as it is",
    )
