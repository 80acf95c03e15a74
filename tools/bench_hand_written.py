"""Compares steps of a plan with steps of the same model trained by hand on this machine, in wall-clock time.

    python -m tools.bench_hand_written --ranks 2 --steps 16

The model is `tools/models/mixed_captions.py`: text, and images in a third of the samples, in very uneven
amounts. The plan is what the compiler chooses with costs measured here. Against it, in the same processes,
one step of each in turn, on the same global batches:

- DDP over the whole model, which has to look for parameters that a micro-batch does not use;
- DDP where a micro-batch without images is given one dummy tile, so that every parameter is used;
- FSDP2 (parameters stay gathered between forward and backward), with the dummy tile, without which it hangs
  (`tools/hand_written/fsdp_without_image.py`);
- torch.distributed.pipelining (1F1B), encoder and decoder as stages, on two ranks. Its shapes are fixed for a
  step: texts are padded to the longest of the global batch.

Each is given what a careful user does: gradients accumulated over micro-batches of the size that is fastest
here, samples sorted by length before they are dealt to ranks and micro-batches, gradients weighted by the
tokens of the global batch. All losses must agree, or the benchmark fails. Ranks have one thread. Prints
Markdown; `--json FILE` writes the table.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from secc.runtime.model.user_file import UserModel, load_model_file
from secc.runtime.plan.plan_file import load_plan
from tools.bench_runtime import WARM_UP_STEPS, join_training, model_gradients, run_on_ranks, time_step
from tools.bench_training import MIXED_MODEL, compile_with_measured_costs, describe_sections
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.models import mixed_captions

MICRO_BATCHES = (1, 2, 4, 8)  # samples; the fastest is taken
TUNING_STEPS = 2
LOSS_TOLERANCE = 1e-3  # relative, after some steps of AdamW, which amplifies rounding
Sample = dict[str, torch.Tensor]
StepFunction = Callable[[], float]


def count_targets(labels: torch.Tensor) -> int:
    """Counts the positions of labels [B, S] that the loss averages over."""
    return int((labels[:, 1:] != -100).sum())


def sum_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sums the next-token losses of logits [B, S, V] and labels [B, S]."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def add_dummy_tile(batch: Sample) -> Sample:
    """Returns a batch that has at least one tile; no position of the text takes it up."""
    tile = torch.zeros(1, mixed_captions.PATCHES, mixed_captions.PATCH)
    return batch if "tiles" in batch else batch | {"tiles": tile}


class BatchReader:
    """Reads the global batches in turn, with samples sorted by length."""

    def __init__(self, user: UserModel, global_batch: int) -> None:
        self.samples, self.global_batch, self.first = user.dataset(), global_batch, 0

    def read_batch(self) -> list[Sample]:
        """Returns the next global batch, longest texts first."""
        indices = range(self.first, self.first + self.global_batch)
        self.first += self.global_batch
        return sorted((self.samples[i] for i in indices), key=lambda s: len(s["ids"]), reverse=True)


class AccumulatingTrainer:
    """Data parallelism by hand: gradients of several micro-batches are accumulated, then reduced once.

    Args:
        parallelism: "ddp", "ddp-dummy" or "fsdp-dummy".
        micro_batch: samples.
    """

    def __init__(self, user: UserModel, global_batch: int, parallelism: str, micro_batch: int) -> None:
        torch.manual_seed(0)
        model: Any = user.build_model()
        self.uses_dummy = parallelism != "ddp"
        if parallelism == "fsdp-dummy":
            for tower in (model.encoder, model.decoder):
                for layer in tower.layers:
                    fully_shard(layer, reshard_after_forward=False)
            self.model: Any = fully_shard(model, reshard_after_forward=False)
        else:
            self.model = DistributedDataParallel(
                model, gradient_as_bucket_view=True, find_unused_parameters=not self.uses_dummy
            )
        self.optimizer = user.build_optimizer(list(model.named_parameters()))
        self.user, self.micro_batch, self.reader = user, micro_batch, BatchReader(user, global_batch)

    def train_step(self) -> float:
        """Makes one optimizer step. Returns the loss of the global batch."""
        rank, world = dist.get_rank(), dist.get_world_size()
        samples = self.reader.read_batch()
        own = samples[rank::world]
        targets = sum(count_targets(s["labels"][None]) for s in samples)
        batches = [
            self.user.collate(own[i : i + self.micro_batch]) for i in range(0, len(own), self.micro_batch)
        ]
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for i, batch in enumerate(batches):
            with self._reduction(is_last=i == len(batches) - 1):
                loss = self.model(**(add_dummy_tile(batch) if self.uses_dummy else batch))
                # wrappers average over ranks, the model over a micro-batch; the step's loss over targets
                share = count_targets(batch["labels"]) / targets
                (loss * (share * world)).backward()
                total += loss.detach() * share
        norm = get_total_norm(model_gradients(self.model))
        dist.all_reduce(total)
        self.optimizer.step()
        norm.item()
        return total.item()

    def _reduction(self, is_last: bool) -> AbstractContextManager[object]:
        """Lets only the last micro-batch reduce gradients."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
            return nullcontext()
        return nullcontext() if is_last else self.model.no_sync()


class EncoderStage(nn.Module):
    """The first stage: computes the decoder's input from ids [B, S] and tiles [B, T, patches, values]. Tiles
    after a sample's own are padding."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.patches, self.encoder, self.merge, self.words = (
            model.patches,
            model.encoder,
            model.merge,
            model.words,
        )

    def forward(self, ids: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        hidden, places = self.words(ids), ids == mixed_captions.PLACE
        counts = places.sum(1) // mixed_captions.TOKENS
        real = torch.arange(tiles.shape[1]) < counts[:, None]
        if not real.any():
            return hidden
        seen = self.merge(self.encoder(self.patches(tiles[real])).reshape(-1, self.merge.in_features))
        return hidden.masked_scatter(places[..., None].expand_as(hidden), seen)


class DecoderStage(nn.Module):
    """The second stage: logits from what the first one sends."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.head = model.decoder, model.head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(hidden))


class PipelineTrainer:
    """PyTorch's 1F1B over two ranks. A stage has fixed shapes: stage and schedule are made for
    each step, for texts and tiles padded to the largest sample of the global batch."""

    def __init__(self, user: UserModel, global_batch: int, micro_batch: int) -> None:
        torch.manual_seed(0)
        model = user.build_model()
        self.is_first = dist.get_rank() == 0
        self.stage = EncoderStage(model) if self.is_first else DecoderStage(model)
        self.optimizer = user.build_optimizer(list(self.stage.named_parameters()))
        self.user, self.micro_batch, self.reader = user, micro_batch, BatchReader(user, global_batch)

    def train_step(self) -> float:
        """Makes one optimizer step. Returns the loss of the global batch."""
        samples = self.reader.read_batch()
        texts = self.user.collate([{k: s[k] for k in ("ids", "labels")} for s in samples])
        targets, size, losses = count_targets(texts["labels"]), self.micro_batch, list[torch.Tensor]()
        hidden = torch.empty(size, texts["ids"].shape[1], 128, device="meta", requires_grad=True)
        logits = torch.empty(*hidden.shape[:2], mixed_captions.WORDS, device="meta")
        self.optimizer.zero_grad()
        if self.is_first:
            tiles = nn.utils.rnn.pad_sequence(
                [
                    s.get("tiles", torch.zeros(1, mixed_captions.PATCHES, mixed_captions.PATCH))
                    for s in samples
                ],
                batch_first=True,
            )
            inputs = (texts["ids"], tiles)
            examples = (tuple(x[:size].to("meta") for x in inputs), hidden)
        else:
            inputs, examples = (), ((hidden,), logits)
        stage = PipelineStage(
            self.stage,
            0 if self.is_first else 1,
            2,
            torch.device("cpu"),
            input_args=examples[0],
            output_args=examples[1],
        )
        schedule = Schedule1F1B(
            stage,
            len(samples) // size,
            lambda out, labels: sum_losses(out, labels) / targets,
            scale_grads=False,
        )
        if self.is_first:
            schedule.step(*inputs)
        else:
            schedule.step(target=texts["labels"], losses=losses)
        loss = torch.zeros(()) if self.is_first else torch.stack(losses).detach().sum()
        totals = torch.stack([loss, get_total_norm(model_gradients(self.stage)).square()])
        dist.all_reduce(totals)
        self.optimizer.step()
        totals[1].sqrt().item()
        return totals[0].item()


def make_tuned_step(
    make: Callable[[int], Any], sizes: Sequence[int], device: torch.device
) -> tuple[Any, int]:
    """Returns the trainer with the fastest micro-batch, and its size. All ranks choose the same."""
    seconds = list[float]()
    for size in sizes:
        trainer = make(size)
        seconds.append(min(time_step(trainer.train_step, device)[0] for _ in range(TUNING_STEPS)))
    slowest = torch.tensor(seconds)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    best = sizes[int(slowest.argmin())]
    return make(best), best


def run_rank(plan: Path, rank: int, world: int, port: int, steps: int, pipe: Any) -> None:
    """Trains with each trainer in turn on one rank. Sends {name: (micro-batch, seconds of steps, losses)}."""
    with join_training(plan, rank, world, port, steps) as (context, trainer, batches):
        user, device = load_model_file(context.user_model.path), context.device
        batch = context.plan.global_batch
        makers: dict[str, Callable[[int], Any]] = {
            "DDP": lambda size: AccumulatingTrainer(user, batch, "ddp", size),
            "DDP, dummy image": lambda size: AccumulatingTrainer(user, batch, "ddp-dummy", size),
            "FSDP2, dummy image": lambda size: AccumulatingTrainer(user, batch, "fsdp-dummy", size),
        }
        if world == 2:
            makers["torch.distributed.pipelining"] = lambda size: PipelineTrainer(user, batch, size)
        sizes = [size for size in MICRO_BATCHES if batch // world % size == 0]
        tuned = {name: make_tuned_step(make, sizes, device) for name, make in makers.items()}
        functions: dict[str, StepFunction] = {
            "secc": lambda: trainer.train_step(next(batches)),
            **{name: made.train_step for name, (made, _) in tuned.items()},
        }
        times = {name: list[float]() for name in functions}
        losses = {name: list[float]() for name in functions}
        for _ in range(WARM_UP_STEPS + steps):
            for name, step in functions.items():
                times[name].append(time_step(lambda s=step, n=name: losses[n].append(s()), device)[0])
        pipe.send(
            {
                name: (tuned[name][1] if name in tuned else 0, times[name][WARM_UP_STEPS:], losses[name])
                for name in functions
            }
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--shares", nargs="*", default=["0.33"], help="of samples with images")
    parser.add_argument("--strategy", default="auto", help="as in secc compile")
    parser.add_argument("--set", nargs="*", default=[], help="pinned choices, as in secc compile")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a folder for costs and plan, used again")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    table = BenchmarkTable(
        ("P(image)", "ranks", "trained by", "micro-batch", "step, s", "over the plan's", "loss difference"),
        "Wall-clock time of a step by hand over the plan's, in turn in the same processes: median of the "
        "steps' ratios; largest relative difference of a loss from the plan's.",
        options.json,
    )
    for share in options.shares:
        os.environ["IMAGE_SHARE"] = share
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.keep or Path(temporary)) / f"share_{share}"
            folder.mkdir(parents=True, exist_ok=True)
            directory = compile_with_measured_costs(MIXED_MODEL, folder, options)
            results = run_on_ranks(run_rank, directory, options.ranks, options.steps)[0]
            plan = load_plan(directory)
        _, own_times, own_losses = results["secc"]
        for name, (size, times, losses) in results.items():
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses, own_losses, strict=True))
            if worst > LOSS_TOLERANCE:
                raise SystemExit(
                    f"{name}: a loss differs from the plan's by {worst:.1e}, expected {LOSS_TOLERANCE}"
                )
            ratio = median(a / b for a, b in zip(times, own_times, strict=True))
            trained_by = f"secc: {describe_sections(plan)}" if name == "secc" else name
            cells = (trained_by, size or "-", f"{median(times):.3f}", f"{ratio:.3f}", f"{worst:.1e}")
            table.add_row(share, options.ranks, *cells)


if __name__ == "__main__":
    main()
