"""Measures the cost of secc's runtime: steps of a plan against steps of plain PyTorch, DDP and PyTorch's
pipelines.

    python -m tools.bench_runtime [MODEL.py] --global-batch 16 --steps 20
    python -m tools.bench_runtime --stages 2     a decoder in stages, against torch.distributed.pipelining

Both train in the same processes, one step of each in turn, so that other load on the machine affects both;
ranks have one thread. A step is complete: loading and collating samples, forward, backward, gradients and
their global norm, the optimizer, and the loss of the global batch, which every rank reads with the norm. The
plan has one micro-batch per rank (pipelines as many as the other side). Medians of wall time, and of CPU time
over all ranks: on a busy machine CPU time says more.

Only secc seeds each sample, collates it alone for its metadata, sends that to all ranks, and writes lines to
metrics.jsonl and times.jsonl. The others draw samples as they come. DDP's gradients are views of its buckets,
which saves a copy. Prints Markdown; `--json FILE` writes the table.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.utils import _pytree as pytree

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from secc.runtime.model.user_file import UserModel, extract_loss, load_model_file
from secc.runtime.plan.schema import Plan
from secc.runtime.sections.base import load_section_module
from secc.runtime.training.options import parse_options
from secc.runtime.training.rank_context import RankContext
from secc.runtime.training.trainer import Trainer
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.compare_training import find_free_port

DECODER_FILE = Path(__file__).parent / "bench_decoder.py"
WARM_UP_STEPS = 3  # steps before the clock runs
StepSeconds = list[tuple[float, float]]  # wall and CPU seconds of a step


class PlainTrainer:
    """Training by hand: this rank's share of each global batch, under DDP if there are several ranks."""

    def __init__(self, user: UserModel, global_batch: int, device: torch.device) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = user.build_model().to(device)
        self.optimizer = user.build_optimizer(
            [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        )
        self.model: nn.Module = (
            DistributedDataParallel(model, gradient_as_bucket_view=True) if world > 1 else model
        )
        self.user, self.share, self.samples = user, global_batch // world, user.dataset()
        self.first, self.stride, self.world = rank * self.share, global_batch, world
        self.device = device

    def train_step(self) -> tuple[float, float]:
        """Makes one optimizer step. Returns the loss of the global batch and the gradient norm, as for
        a log."""
        samples = [self.samples[i % len(self.samples)] for i in range(self.first, self.first + self.share)]
        self.first += self.stride
        self.optimizer.zero_grad()
        batch = pytree.tree_map_only(torch.Tensor, self._move, self.user.collate(samples))
        loss = extract_loss(self.model(**batch))
        loss.backward()
        norm = get_total_norm(model_gradients(self.model))
        global_loss = loss.detach() / self.world
        if self.world > 1:
            dist.all_reduce(global_loss)
        self.optimizer.step()
        return global_loss.item(), norm.item()

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)


def model_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Returns the gradients of a model's parameters."""
    return [p.grad for p in model.parameters() if p.grad is not None]


class DecoderStage(nn.Module):
    """A stage of tools/bench_decoder.py: some of its blocks, with the embedding in the first stage and the
    head in the last."""

    def __init__(self, model: Any, blocks: range) -> None:
        super().__init__()
        whole = len(model.blocks)
        self.embed = model.embed if blocks.start == 0 else nn.Identity()
        self.blocks = nn.Sequential(*(model.blocks[i] for i in blocks))
        self.end = nn.Sequential(model.norm, model.head) if blocks.stop == whole else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.blocks(self.embed(x)))


class PipelineTrainer:
    """Training by hand with PyTorch's own 1F1B, in the stages of a plan: all ranks load the batch, the last
    one computes the loss."""

    def __init__(self, user: UserModel, plan: Plan) -> None:
        torch.manual_seed(0)
        counts = [sum(b.startswith("blocks.") for b in s.blocks) for s in plan.sections]
        rank, ends = dist.get_rank(), list(accumulate(counts))
        stage = DecoderStage(user.build_model(), range(ends[rank] - counts[rank], ends[rank]))
        micro_batches = plan.global_batch // plan.sections[0].micro_batch
        self.optimizer = user.build_optimizer(list(stage.named_parameters()))
        self.schedule = Schedule1F1B(
            PipelineStage(stage, rank, len(counts), torch.device("cpu")), micro_batches, next_token_loss
        )
        self.stage, self.user, self.samples = stage, user, user.dataset()
        self.batch, self.first = plan.global_batch, 0
        self.ends = rank == 0, rank == len(counts) - 1

    def train_step(self) -> tuple[float, float]:
        """Makes one optimizer step. Returns the loss of the global batch and the norm of all stages'
        gradients, as for a log."""
        samples = [self.samples[i % len(self.samples)] for i in range(self.first, self.first + self.batch)]
        self.first += self.batch
        ids, losses = self.user.collate(samples)["input_ids"], list[torch.Tensor]()
        self.optimizer.zero_grad()
        is_first, is_last = self.ends
        if is_last:
            self.schedule.step(*[ids] * is_first, target=ids, losses=losses)
        else:
            self.schedule.step(*[ids] * is_first)
        loss = torch.stack(losses).detach().mean() if is_last else torch.zeros(())
        totals = torch.stack([loss, get_total_norm(model_gradients(self.stage)).square()])
        dist.all_reduce(totals)
        self.optimizer.step()
        return totals[0].item(), totals[1].sqrt().item()


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the decoder's loss from logits [B, S, V] and tokens [B, S]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def time_step(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Returns the wall and CPU seconds of a step that all ranks start together, until the device is done."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - wall, time.process_time() - cpu


@contextmanager
def join_training(
    plan: Path, rank: int, world: int, port: int, steps: int
) -> Iterator[tuple[RankContext, Trainer, Iterator[Any]]]:
    """Context manager: this process as a rank of a plan, with its trainer and its steps; all ranks are on
    this machine, without loader processes."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_PORT": port,
    }
    os.environ |= {k: str(v) for k, v in environment.items()} | {"MASTER_ADDR": "127.0.0.1"}
    sys.path.insert(0, str(plan))
    terms: Any = importlib.import_module("sections.terms")
    arguments = ["--steps", str(WARM_UP_STEPS + steps), "--workers", "0", "--log-dir", str(plan / "logs")]
    with RankContext(plan, parse_options(arguments), terms) as context:
        model = context.load_model()
        own_sections = [s for s in context.plan.sections if rank in s.mesh.ranks]
        trainer = Trainer(context, model, [load_section_module(plan, s, model) for s in own_sections])
        yield context, trainer, trainer.plan_steps()


def run_rank(plan: Path, rank: int, world: int, port: int, steps: int, pipe: Any) -> None:
    """Times both trainers on one rank and sends (secc's times, the other's)."""
    with join_training(plan, rank, world, port, steps) as (context, trainer, batches):
        user = load_model_file(context.user_model.path)
        own_sections = [s for s in context.plan.sections if rank in s.mesh.ranks]
        plain = (
            PipelineTrainer(user, context.plan)
            if len(context.plan.sections) > len(own_sections)
            else PlainTrainer(user, context.plan.global_batch, context.device)
        )
        times_of_both: tuple[StepSeconds, StepSeconds] = [], []
        for _ in range(WARM_UP_STEPS + steps):
            times_of_both[0].append(time_step(lambda: trainer.train_step(next(batches)), context.device))
            times_of_both[1].append(time_step(plain.train_step, context.device))
        pipe.send(tuple(times[WARM_UP_STEPS:] for times in times_of_both))


def run_on_ranks(target: Callable[..., None], plan: Path, world: int, steps: int) -> list[Any]:
    """Runs `target(plan, rank, world, port, steps, pipe)` on `world` processes of this machine, each with one
    thread. Returns what each sends. Raises EOFError if one fails."""
    context, port = multiprocessing.get_context("spawn"), find_free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(target=target, args=(plan, r, world, port, steps, pipes[r][1])) for r in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        for _, far_end in pipes:
            far_end.close()
        return [pipe.recv() for pipe, _ in pipes]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def compile_plan(path: Path, world: int, global_batch: int) -> CompiledPlan:
    """Compiles a plan with one micro-batch per rank: all sections on one rank, or pure data parallelism on
    several."""
    options = {
        "cluster": f"local:{world}",
        "global_batch": global_batch,
        "strategy": "uniform" if world > 1 else "colocate",
    }
    names = compile_model(path, CompileOptions(**options)).plan.pipelines  # pyright: ignore[reportArgumentType]
    choices = tuple(f"{name}.micro_batch={global_batch // world}" for name in names)
    choices += tuple(f"{name}.dp={world}" for name in names) + tuple(
        f"{name}.sharding=none" for name in names
    )
    return compile_model(path, CompileOptions(**options, set=choices))  # pyright: ignore[reportArgumentType]


def compile_stages(path: Path, stages: int, global_batch: int, micro_batch: int) -> CompiledPlan:
    """Compiles a plan of one pipeline."""
    (name,) = compile_model(path, CompileOptions(cluster="local:1", global_batch=global_batch)).plan.pipelines
    choices = (
        f"{name}.pp={stages}",
        f"{name}.dp=1",
        f"{name}.micro_batch={micro_batch}",
        f"{name}.sharding=none",
        f"{name}.recompute=none",
    )
    return compile_model(
        path, CompileOptions(cluster=f"local:{stages}", global_batch=global_batch, set=choices)
    )


def compare_plan(compiled: CompiledPlan, world: int, steps: int, other: str) -> tuple[str, ...]:
    """The cells of a row: a plan's steps on `world` ranks against those of `other`."""
    with tempfile.TemporaryDirectory() as directory:
        plan = Path(directory) / "plan"
        compiled.write_plan(plan, report_page)
        ranks: list[tuple[StepSeconds, StepSeconds]] = run_on_ranks(run_rank, plan, world, steps)
    wall = [median(t for t, _ in ranks[0][which]) for which in (0, 1)]
    ratio = median(a / b for (a, _), (b, _) in zip(*ranks[0], strict=True))
    cpu = [median(sum(r[which][step][1] for r in ranks) for step in range(steps)) for which in (0, 1)]
    return (
        Path(compiled.plan.model.path).stem,
        f"{world}",
        f"{len(compiled.plan.sections)}",
        other,
        f"{1e3 * wall[0]:.1f}",
        f"{1e3 * wall[1]:.1f}",
        f"{ratio:.3f}",
        f"{1e3 * cpu[0]:.1f}",
        f"{1e3 * cpu[1]:.1f}",
        f"{cpu[0] / cpu[1]:.3f}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=DECODER_FILE)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, help="the decoder in this many stages")
    parser.add_argument("--micro-batch", type=int, default=2, help="samples in a micro-batch, for --stages")
    add_json_option(parser)
    asked = parser.parse_args(arguments)
    times = ("secc, ms", "other, ms", "ratio", "secc, CPU ms", "other, CPU ms", "CPU ratio")
    table = BenchmarkTable(
        ("model", "ranks", "sections", "against", *times),
        "A plan's step over the same step by hand, in turn. Medians; CPU time of all ranks.",
        asked.json,
    )
    if asked.stages:
        made = compile_stages(DECODER_FILE, asked.stages, asked.global_batch, asked.micro_batch)
        table.add_row(*compare_plan(made, asked.stages, asked.steps, "torch.distributed.pipelining"))
        return
    for world in asked.ranks:
        made = compile_plan(asked.model, world, asked.global_batch)
        table.add_row(*compare_plan(made, world, asked.steps, "plain PyTorch" if world == 1 else "DDP"))


if __name__ == "__main__":
    main()
