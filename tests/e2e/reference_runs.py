"""References that plans are compared with, in float32 and in mixed precision, and a captured model for
many plans.

In float32 the reference is plain PyTorch, within the exactness contract; under `--dtype bf16` it is the
usual handwritten recipe, within the tolerances of `eager_reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from secc.runtime.model.user_file import extract_loss, load_model_file
from secc.runtime.training.eager_reference import (
    LossAndGradients,
    Tolerances,
    compare_results,
    derive_tolerances,
)
from tests.e2e import decoders
from tests.e2e.harness import (
    LEARNING_RATE,
    LayerCaptureCache,
    TrainingResult,
    find_differences,
    replan,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tools.zoo_models import entry

MODELS_FOLDER = Path(__file__).parent.parent / "models"


def write_named_recording_model(name: str, directory: Path) -> Path:
    """A model of the tests, of `decoders` or of the zoo, recording gradients."""
    if (MODELS_FOLDER / f"{name}.py").exists():
        return write_recording_model(name, directory, MODELS_FOLDER)
    text = decoders.source(name) if name in decoders.DECODERS else entry(name).source()
    (directory / f"{name}.py").write_text(text)
    return write_recording_model(name, directory, directory)


def train_mixed_by_hand(path: Path, global_batch: int, steps: int) -> TrainingResult:
    """Trains bfloat16 parameters with float32 masters, the whole batch in one process; gradients are those
    of the first step."""
    user = load_model_file(path)
    torch.manual_seed(0)
    model = user.build_model()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    masters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in trained.items()}
    for p in model.parameters():
        p.data = p.data.bfloat16()
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE)
    losses, first = list[float](), dict[str, torch.Tensor | None]()
    for step in range(steps):
        batch = user.collate(
            [
                user.load_sample(i % len(user.dataset()))
                for i in range(step * global_batch, (step + 1) * global_batch)
            ]
        )
        model.zero_grad()
        loss = extract_loss(
            model(**{k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()})
        )
        loss.backward()
        for n, p in trained.items():
            masters[n].grad = None if p.grad is None else p.grad.float()
        first = first or {n: None if m.grad is None else m.grad.clone() for n, m in masters.items()}
        optimizer.step()
        for n, p in trained.items():
            p.data.copy_(masters[n].data)
        losses.append(loss.item())
    return TrainingResult(losses, first, {n: m.detach() for n, m in masters.items()})


BF16_TOLERANCES = derive_tolerances([torch.bfloat16])


def list_rounded_differences(
    found: TrainingResult, reference: TrainingResult, tolerances: Tolerances = BF16_TOLERANCES
) -> Iterator[str]:
    """Yields the differences of two runs under the tolerances of the dtypes that they compute in."""
    difference = compare_results(
        LossAndGradients(found.losses[0], found.gradients),
        LossAndGradients(reference.losses[0], reference.gradients),
        tolerances,
    )
    if not difference.is_exact:
        yield f"first step: {difference}"
    if len(found.losses) != len(reference.losses):
        yield f"{len(found.losses)} steps instead of {len(reference.losses)}"
    for step, (got, expected) in enumerate(zip(found.losses, reference.losses, strict=False)):
        if abs(got - expected) > tolerances.loss * abs(expected):
            yield f"loss of step {step + 1}: {got!r} instead of {expected!r}"
    for name, expected in reference.parameters.items():
        value = found.parameters[name]
        if value.dtype != expected.dtype:
            yield f"parameter {name} is saved as {value.dtype}"
        if (off := float((value - expected).abs().max())) > 2 * len(reference.losses) * LEARNING_RATE:
            yield f"parameter {name} after {len(reference.losses)} steps: off by {off:.3g}"


class ReferencedModel:
    """A model file, captured once for each dtype, and its references. pack: whether plans lay samples side by
    side; references pad them."""

    def __init__(self, name: str, folder: Path, steps: int, pack: str = "never") -> None:
        self.folder, self.steps, self.pack = folder, steps, pack
        self.path = write_named_recording_model(name, folder)
        self.compiled = cache(self._compiled)
        self._layer_cache = cache(lambda dtype: LayerCaptureCache())
        self.reference = cache(self._reference)

    def _compiled(self, dtype: str) -> CompiledPlan:
        return compile_model(self.path, CompileOptions(cluster="local:2", dtype=dtype, pack=self.pack))

    def _reference(self, dtype: str, global_batch: int) -> TrainingResult:
        if dtype:
            return train_mixed_by_hand(self.path, global_batch, self.steps)
        return train_in_one_process(self.path, global_batch, self.steps, self.folder / f"plain{global_batch}")

    def plan_with(self, options: CompileOptions) -> CompiledPlan:
        """Plans the model with these options, the dtype among them."""
        return replan(self.compiled(options.dtype), options, self._layer_cache(options.dtype))

    def list_differences(self, made: CompiledPlan, folder: Path, *run_options: str) -> list[str]:
        """Returns the differences between a run of the plan and the reference. Raises AssertionError if
        the run fails."""
        made.write_plan(folder / "plan", report_page)
        found = train_distributed(
            folder / "plan", made.plan.world_size, self.steps, folder / "run", *run_options
        )
        reference = self.reference(made.plan.dtype, made.plan.global_batch)
        return list(
            list_rounded_differences(found, reference)
            if made.plan.dtype
            else find_differences(found, reference)
        )
