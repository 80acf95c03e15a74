"""What plans are compared with, in float32 and in mixed precision, and a capture of which many plans are
made.

In float32 that is plain PyTorch, within the contract; under `--dtype bf16` it is the recipe that people write
by hand, within the tolerances of `secc.frontend.dataset.eager_reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from secc.driver.compile import Compiled, Options, compile_model
from secc.frontend.dataset.eager_reference import ROUNDED, Result, compare
from secc.report.html_page import page
from secc.runtime.model.user_file import load, loss_of
from tests.e2e.harness import (
    LEARNING_RATE,
    Layered,
    Trained,
    differences,
    distributed,
    plain,
    recording_model,
    replanned,
)
from tools.zoo_models import entry

MODELS = Path(__file__).parent.parent / "models"


def model_file(name: str, directory: Path) -> Path:
    """A model of the tests or of the zoo, recording gradients."""
    if (MODELS / f"{name}.py").exists():
        return recording_model(name, directory, MODELS)
    (directory / f"{name}.py").write_text(entry(name).source())
    return recording_model(name, directory, directory)


def by_hand(path: Path, global_batch: int, steps: int) -> Trained:
    """bfloat16 parameters with float32 masters, the whole batch in one process; gradients are those of the
    first step."""
    user = load(path)
    torch.manual_seed(0)
    model = user.model()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    masters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in trained.items()}
    for p in model.parameters():
        p.data = p.data.bfloat16()
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE)
    losses, first = list[float](), dict[str, torch.Tensor | None]()
    for step in range(steps):
        batch = user.collate(
            [
                user.sample(i % len(user.dataset()))
                for i in range(step * global_batch, (step + 1) * global_batch)
            ]
        )
        model.zero_grad()
        loss = loss_of(model(**{k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}))
        loss.backward()
        for n, p in trained.items():
            masters[n].grad = None if p.grad is None else p.grad.float()
        first = first or {n: None if m.grad is None else m.grad.clone() for n, m in masters.items()}
        optimizer.step()
        for n, p in trained.items():
            p.data.copy_(masters[n].data)
        losses.append(loss.item())
    return Trained(losses, first, {n: m.detach() for n, m in masters.items()})


def rounded_differences(found: Trained, reference: Trained, dtype: str) -> Iterator[str]:
    """What `differences` says of float32, under the tolerances of a plan's dtype."""
    difference = compare(
        Result(found.losses[0], found.gradients), Result(reference.losses[0], reference.gradients), dtype
    )
    if not difference.exact:
        yield f"first step: {difference}"
    if len(found.losses) != len(reference.losses):
        yield f"{len(found.losses)} steps instead of {len(reference.losses)}"
    for step, (got, expected) in enumerate(zip(found.losses, reference.losses, strict=False)):
        if abs(got - expected) > ROUNDED[dtype][0] * abs(expected):
            yield f"loss of step {step + 1}: {got!r} instead of {expected!r}"
    for name, expected in reference.parameters.items():
        value = found.parameters[name]
        if value.dtype != torch.float32:
            yield f"parameter {name} is saved as {value.dtype}"
        if (off := float((value - expected).abs().max())) > 2 * len(reference.losses) * LEARNING_RATE:
            yield f"parameter {name} after {len(reference.losses)} steps: off by {off:.3g}"


class Captured:
    """A model file, captured once for each dtype, and what it is compared with."""

    def __init__(self, name: str, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.path = model_file(name, folder)
        self.compiled = cache(self._compiled)
        self._layered = cache(lambda dtype: Layered())
        self.reference = cache(self._reference)

    def _compiled(self, dtype: str) -> Compiled:
        return compile_model(self.path, Options(cluster="local:2", dtype=dtype))

    def _reference(self, dtype: str, global_batch: int) -> Trained:
        if dtype:
            return by_hand(self.path, global_batch, self.steps)
        return plain(self.path, global_batch, self.steps, self.folder / f"plain{global_batch}")

    def planned(self, options: Options) -> Compiled:
        """The model under a plan with these options, the dtype among them."""
        return replanned(self.compiled(options.dtype), options, self._layered(options.dtype))

    def differences(self, made: Compiled, folder: Path, *run_options: str) -> list[str]:
        """In what a run of the plan differs from the reference. Raises AssertionError for one that does not
        end well."""
        made.write(folder / "plan", page)
        found = distributed(folder / "plan", made.plan.world_size, self.steps, folder / "run", *run_options)
        reference = self.reference(made.plan.dtype, made.plan.global_batch)
        return list(
            rounded_differences(found, reference, made.plan.dtype)
            if made.plan.dtype
            else differences(found, reference)
        )
