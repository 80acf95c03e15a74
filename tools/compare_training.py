"""Trains a plan on gloo ranks of this machine and its model file in plain PyTorch, and compares the two.

Ranks are forked from a server that has imported torch and transformers once, so that a run of four ranks
starts in a fraction of a second. Every wait has a time limit. The end-to-end tests and the model zoo use this
module.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_model

from secc.runtime.model.user_file import load_model_file
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan
from secc.runtime.tensor_parallel.parameter_cuts import cut_of_shard
from secc.runtime.training.eager_reference import (
    GRADIENT_FLOOR,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    run_eager,
)
from secc.runtime.training.widened_floats import widen_batch, widened_floats
from tools.train_plain import nudge_weights, train_model

PRELOADED_MODULES = ["secc.runtime.training.trainer", "torch.distributed.checkpoint", "torch._dynamo"] + [
    f"transformers.models.{m}.modeling_{m}"
    for m in ("clip", "internvl", "llama", "llava", "qwen2", "qwen3", "whisper")
]
RUN_LIMIT_S = 150
# "fork" for a process that has imported all this and has no other threads
start_method: Literal["fork", "forkserver"] = "forkserver"
LEARNING_RATE = 1e-3
LATER_LOSS_TOLERANCE = 1e-4  # relative, for losses after the first step
# Gradient entries below this share of the global norm (a key's bias) are rounding noise, which AdamW turns
# into steps of any sign.
NOISE_SHARE = 1e-6
RECORDING_MODEL_SOURCE = '''
"""{name} with an optimizer that keeps the first step's gradients."""

import os
from pathlib import Path
from typing import Literal

import torch

from {name} import *  # noqa: F403
from {name} import dataset, model
from secc.runtime.parameters.optimizer_parts import is_trial_step


def optimizer(params):
    made, kept = torch.optim.AdamW(params, lr={rate}), {{}}

    def keep(optimizer, *_):  # called for each part of a step, if states are in host memory
        if is_trial_step():
            return
        file = Path(os.environ["GRADIENTS"]) / f"rank{{os.environ.get('RANK', '')}}.pt"
        groups = optimizer.param_groups
        held = dict(pair for group in groups for pair in zip(group["param_names"], group["params"]))
        if held.keys() - kept.keys() and (kept or not file.exists()):
            kept.update({{n: None if p.grad is None else p.grad.clone() for n, p in held.items()}})
            torch.save(kept, file)

    made.register_step_pre_hook(keep)
    return made
'''


@dataclass
class TrainingResult:
    """Losses of all steps, gradients of the first step, and parameters at the end; tied parameters have one
    of their names."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor]


def write_recording_model(name: str, directory: Path, source: Path) -> Path:
    """Writes a copy of the model file `source/name.py` that records gradients; returns its path."""
    path = directory / f"recording_{name}.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(source)!r})\n"
        + RECORDING_MODEL_SOURCE.format(name=name, rate=LEARNING_RATE)
    )
    return path


def train_in_one_process(
    path: Path,
    global_batch: int,
    steps: int,
    gradients: Path,
    seed: int = 0,
    device: torch.device | str = "cpu",
    nudge: int = 0,
) -> TrainingResult:
    """Trains with plain PyTorch: the whole global batch in one process. The results are on the CPU. `nudge`:
    see `train_model`."""
    gradients.mkdir(exist_ok=True)
    os.environ["GRADIENTS"] = str(gradients)
    model, losses = train_model(load_model_file(path), steps, global_batch, seed, device=device, nudge=nudge)
    return TrainingResult(
        losses,
        torch.load(gradients / "rank.pt", map_location="cpu"),
        {n: p.detach().cpu() for n, p in model.named_parameters()},
    )


def compute_exact_gradients(path: Path, global_batch: int, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """The gradients of the first step in float64, of the weights that `train_in_one_process` starts with."""
    torch.manual_seed(seed)
    user = load_model_file(path)
    model, length = user.build_model(), len(user.dataset())
    batch = user.collate([user.load_sample(i % length, seed, epoch=i // length) for i in range(global_batch)])
    with widened_floats(model, torch.float64):
        return run_eager(model, widen_batch(batch, torch.float64)).gradients


def save_nudged_weights(path: Path, folder: Path, nudge: int, seed: int = 0) -> None:
    """Saves a model file's initial weights, nudged as `train_model` does, for `--init`."""
    torch.manual_seed(seed)
    model = load_model_file(path).build_model()
    nudge_weights(model, nudge)
    folder.mkdir()
    save_model(model, str(folder / "model.safetensors"))


def train_distributed(plan: Path, world_size: int, steps: int, work: Path, *options: str) -> TrainingResult:
    """Trains a plan on gloo ranks, from step 1 to `steps`."""
    from secc.runtime.parameters.checkpoint import load_full_state_dict

    gradients = work / "gradients"
    gradients.mkdir(parents=True, exist_ok=True)
    arguments = [
        "--steps",
        str(steps),
        "--log-dir",
        str(work),
        "--save",
        str(work / "saved"),
        "--workers",
        "0",
        "--no-first-check",  # the run is compared with plain PyTorch anyway
        *options,
    ]
    run_plan_ranks(plan, world_size, arguments, {"GRADIENTS": str(gradients)})
    parameters = load_full_state_dict(work / "saved")
    parts: dict[str, dict[int, torch.Tensor | None]] = {}
    for file in sorted(gradients.glob("rank*.pt")):
        for name, gradient in torch.load(file, map_location="cpu").items():
            parts.setdefault(name, {})[int(file.stem.removeprefix("rank"))] = gradient
    made = load_plan(plan)
    found = {
        name: _assemble_gradient(made, name, held, parameters[name].shape) for name, held in parts.items()
    }
    return TrainingResult([m["loss"] for m in read_metrics(work)], found, parameters)


def _assemble_gradient(
    plan: Plan, name: str, held: Mapping[int, torch.Tensor | None], shape: torch.Size
) -> torch.Tensor | None:
    """Assembles a parameter's gradient from what each rank holds: parts on tensor-parallel ranks, otherwise
    all of it on each."""
    section = next((s for s in plan.sections if max(s.mesh.tp, s.mesh.ep) > 1 and name in s.params), None)
    if section is None or name in section.partial:
        return _join_slices(list(held.values()), shape)
    shard, tp = next((s for s in section.shards if s.name == name), None), section.mesh.tp
    # Ranks with different parts: of a replica, or of several with different experts.
    replicas, size = 1 if shard is None else shard.replicas, section.mesh.replica_size
    count = tp * replicas
    places: list[list[torch.Tensor | None]] = [[] for _ in range(count)]
    for i, rank in enumerate(section.mesh.ranks):
        if rank in held:
            places[i // size % replicas * tp + i % tp].append(held[rank])
    if shard is None:
        return _join_slices(places[0], shape)
    cuts = [cut_of_shard(shard, shape, place % tp, tp, place // tp) for place in range(count)]
    own = [_join_slices(some, cut.local_shape) for some, cut in zip(places, cuts, strict=True)]
    if all(g is None for g in own):
        return None
    whole = torch.zeros(shape)
    for cut, part in zip(cuts, own, strict=True):
        if not cut.local_shape.numel():
            continue  # another rank has all of it
        assert part is not None
        sizes = [stop - start for start, stop in cut.ranges]
        for (start, stop), piece in zip(cut.ranges, part.split(sizes, cut.dim), strict=True):
            experts = whole[slice(*cut.experts)] if cut.ep > 1 else whole
            experts.narrow(cut.dim, start, stop - start).copy_(piece)
    return whole


def _join_slices(held: Sequence[torch.Tensor | None], shape: torch.Size) -> torch.Tensor | None:
    """Joins a gradient from replicas: each holds all of it or, with a sharded optimizer, one slice."""
    present = [g for g in held if g is not None]
    if not present:
        return None
    return (
        present[-1] if present[-1].shape == shape else torch.cat([g.flatten() for g in present]).view(shape)
    )


def read_metrics(log_dir: Path) -> list[dict[str, float]]:
    """Returns the objects in metrics.jsonl."""
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Difference:
    """How far one quantity of a run is from plain PyTorch, in units of its tolerance; `text` says it."""

    quantity: str
    tolerances: float
    text: str

    @property
    def is_beyond(self) -> bool:
        """Whether it is larger than the tolerance, or no number."""
        return not self.tolerances <= 1


def find_differences(found: TrainingResult, reference: TrainingResult) -> Iterator[str]:
    """Yields one line for each way in which a run differs from plain PyTorch beyond the tolerances."""
    return (d.text for d in measure_differences(found, reference) if d.is_beyond)


def measure_differences(found: TrainingResult, reference: TrainingResult) -> Iterator[Difference]:
    """Yields how far each loss, gradient and parameter of a run is from plain PyTorch's."""
    yield from _loss_differences(found, reference)
    yield from _gradient_differences(found, reference)
    yield from _parameter_differences(found, reference)


def _loss_differences(found: TrainingResult, reference: TrainingResult) -> Iterator[Difference]:
    if len(found.losses) != len(reference.losses):
        yield Difference(
            "steps", float("inf"), f"{len(found.losses)} steps instead of {len(reference.losses)}"
        )
    for step, (got, expected) in enumerate(zip(found.losses, reference.losses, strict=False)):
        tolerance = (LATER_LOSS_TOLERANCE if step else LOSS_TOLERANCE) * abs(expected)
        quantity = f"loss of step {step + 1}"
        yield Difference(
            quantity,
            _in_tolerances(abs(got - expected), tolerance),
            f"{quantity}: {got!r} instead of {expected!r}",
        )


def _gradient_differences(found: TrainingResult, reference: TrainingResult) -> Iterator[Difference]:
    total = _global_norm(reference)
    for name, expected in reference.gradients.items():
        got, quantity = found.gradients.get(name), f"gradient of {name}"
        if expected is None or got is None:
            if got is not expected:
                text = f"{quantity}: {'none' if got is None else 'one'}, unlike in plain PyTorch"
                yield Difference(quantity, float("inf"), text)
            continue
        error, norm = float((got - expected).norm()), float(expected.norm())
        tolerance = GRADIENT_TOLERANCE * norm + GRADIENT_FLOOR * total
        yield Difference(
            quantity, _in_tolerances(error, tolerance), f"{quantity}: off by {error:.3g} of {norm:.3g}"
        )


def _parameter_differences(found: TrainingResult, reference: TrainingResult) -> Iterator[Difference]:
    total, largest = _global_norm(reference), 2 * len(reference.losses) * LEARNING_RATE
    for name, expected in reference.parameters.items():
        difference = (found.parameters[name] - expected).abs()
        gradient = reference.gradients.get(name)
        noise = (
            torch.ones_like(difference, dtype=torch.bool)
            if gradient is None
            else gradient.abs() < NOISE_SHARE * total
        )
        if not difference.numel():
            continue
        tolerances = (difference / torch.where(noise, largest, LATER_LOSS_TOLERANCE)).max()
        steps = len(reference.losses)
        text = f"parameter {name} after {steps} steps: off by {float(difference.max()):.3g}"
        yield Difference(f"parameter {name}", float(tolerances), text)


def _in_tolerances(error: float, tolerance: float) -> float:
    return error / tolerance if tolerance else 0.0 if error == 0 else float("inf")


def _global_norm(reference: TrainingResult) -> float:
    return float(torch.stack([g.norm() for g in reference.gradients.values() if g is not None]).norm())


def run_plan_ranks(
    plan: Path,
    world_size: int,
    arguments: Sequence[str],
    environment: dict[str, str] | None = None,
    limit_s: float = RUN_LIMIT_S,
) -> None:
    """Runs a plan's run.py on `world_size` processes. Raises AssertionError if one fails or takes longer than
    the limit."""
    if start_method == "fork":
        context = multiprocessing.get_context("fork")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED_MODULES)
    place = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    with tempfile.TemporaryDirectory() as errors:
        files = [Path(errors) / str(rank) for rank in range(world_size)]
        ranks = [
            context.Process(
                target=_run_rank, args=(plan, rank, file, list(arguments), (environment or {}) | place)
            )
            for rank, file in enumerate(files)
        ]
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(limit_s)
            codes = [p.exitcode for p in ranks]
            assert codes == [0] * world_size, f"the ranks ended with {codes}: {_first_error(files)}"
        finally:
            for process in ranks:
                if process.pid is not None:  # started
                    process.kill()


def _first_error(files: Sequence[Path]) -> str:
    """Returns the first error message of a rank, else the last line of a traceback."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return next(
        (line for line in lines if line.startswith("error: ")),
        next((line for line in reversed(lines) if "Error" in line), "no message"),
    )


def _run_rank(plan: Path, rank: int, errors: Path, arguments: list[str], environment: dict[str, str]) -> None:
    with errors.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = ["run.py", *arguments]
    runpy.run_path(str(plan / "run.py"), run_name="__main__")


def find_free_port() -> int:
    """Returns a port that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
