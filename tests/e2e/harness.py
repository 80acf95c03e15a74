"""Compiles a model file, trains it on gloo ranks and in plain PyTorch, and compares the two.

Ranks are forked from a server that has imported torch and transformers once, so that a run of four ranks starts in a fraction of a
second instead of importing four times. Every wait has a limit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from secc.check import checked
from secc.compiler import Compiled, Options, compile_model
from secc.report.page import page
from secc.runtime.user_model import load, loss_of

RUN_SECONDS = 150
LEARNING_RATE = 1e-3
RECORDING_MODEL = '''
"""{name} with an optimizer that keeps the first step's gradients."""

import os
from pathlib import Path

import torch

from {name} import *  # noqa: F403
from {name} import dataset, model


def optimizer(params):
    params = list(params)
    made = torch.optim.AdamW(params, lr={rate})

    def keep(*_):
        file = Path(os.environ["GRADIENTS"]) / f"rank{{os.environ.get('RANK', '')}}.pt"
        if not file.exists():
            torch.save({{n: None if p.grad is None else p.grad.clone() for n, p in params}}, file)

    made.register_step_pre_hook(keep)
    return made
'''


@dataclass
class Trained:
    """Losses of all steps, the first step's gradients, the parameters at the end; tied parameters under one of their names."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor]


def recording_model(name: str, directory: Path, source: Path) -> Path:
    """A copy of model file `source/name.py` that records gradients."""
    path = directory / f"recording_{name}.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(source)!r})\n" + RECORDING_MODEL.format(name=name, rate=LEARNING_RATE))
    return path


def compile_to(path: Path, output: Path, check: bool = True, **options: object) -> Compiled:
    """Compile, check against the eager model, and write the plan."""
    compiled = compile_model(path, Options(**options))  # pyright: ignore[reportArgumentType]
    if check:
        compiled = checked(compiled)
    compiled.write(output, page)
    return compiled


def plain(path: Path, global_batch: int, steps: int, gradients: Path, seed: int = 0) -> Trained:
    """Train with plain PyTorch: the whole global batch in one process."""
    user = load(path)
    torch.manual_seed(seed)
    model = user.model()
    optimizer = user.optimizer([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    gradients.mkdir(exist_ok=True)
    os.environ["GRADIENTS"] = str(gradients)
    losses: list[float] = []
    length = len(user.dataset())
    for step in range(steps):
        samples = [user.sample((step * global_batch + i) % length, seed, (step * global_batch + i) // length) for i in range(global_batch)]
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(**user.collate(samples)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, torch.load(gradients / "rank.pt"), {n: p.detach() for n, p in model.named_parameters()})


def distributed(plan: Path, world_size: int, steps: int, work: Path, *options: str) -> Trained:
    """Train a plan on gloo ranks, from step 1 to `steps`."""
    from secc.runtime.checkpoint import load_full

    gradients = work / "gradients"
    gradients.mkdir(parents=True, exist_ok=True)
    arguments = ["--steps", str(steps), "--log-dir", str(work), "--save", str(work / "saved"), "--workers", "0", *options]
    run(plan, world_size, arguments, {"GRADIENTS": str(gradients)})
    found: dict[str, torch.Tensor | None] = {}
    for file in sorted(gradients.glob("rank*.pt")):
        found |= torch.load(file)
    return Trained([m["loss"] for m in metrics(work)], found, load_full(work / "saved"))


def metrics(log_dir: Path) -> list[dict[str, float]]:
    """The objects of metrics.jsonl."""
    return [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]


def run(plan: Path, world_size: int, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """Run a plan's run.py on `world_size` processes of this machine. Raises AssertionError where one fails or time is up."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "transformers", "secc.runtime.trainer"])
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(plan, rank, world_size, port, list(arguments), environment or {})) for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(RUN_SECONDS)
        assert [p.exitcode for p in ranks] == [0] * world_size
    finally:
        for process in ranks:
            process.kill()


def _rank(plan: Path, rank: int, world_size: int, port: int, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ |= environment | {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    sys.argv = ["run.py", *arguments]
    runpy.run_path(str(plan / "run.py"), run_name="__main__")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
