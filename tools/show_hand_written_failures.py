"""Shows how two usual ways to train a model with optional images go wrong, and that a plan does not.

    python -m tools.show_hand_written_failures fsdp     FSDP2 when one rank's samples have no image
    python -m tools.show_hand_written_failures dummy    DDP with a dummy image when a global batch has none

`fsdp`: the encoder is a group of its own, as usual. The rank without an image never gathers the encoder's
parameters, so that the ranks' collectives no longer match: they hang, until this script ends them after
`--wait` seconds, or fail.

`dummy`: a dummy image makes every gradient of the encoder zero instead of none. AdamW decays weights with a
zero gradient and moves them by their momentum; it leaves weights without gradient as they are. After one
batch with images and three without, the encoder differs from plain PyTorch's.

The model is `tools/models/rare_pictures.py`, on two CPU ranks; the plan trains the same batches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from secc.runtime.model.user_file import UserModel, load_model_file
from tools.compare_training import (
    find_differences,
    find_free_port,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

MODELS = Path(__file__).parent / "models"
WORLD, GLOBAL_BATCH, STEPS = 2, 8, 4
Batch = dict[str, torch.Tensor]


def read_share(user: UserModel, step: int, rank: int) -> Batch:
    """Returns a rank's samples of a step, dealt in turn as by DistributedSampler: rank 0 has texts alone, and
    rank 1 has images in the first step."""
    samples = user.dataset()
    return user.collate([samples[step * GLOBAL_BATCH + i] for i in range(rank, GLOBAL_BATCH, WORLD)])


def train_with_fsdp(user: UserModel, rank: int) -> None:
    """Makes the first step with FSDP2, without a dummy image."""
    model: Any = user.build_model()
    fully_shard(model.encoder)
    fully_shard(model)
    batch = read_share(user, 0, rank)
    model(**batch).backward()


def train_with_dummy_images(user: UserModel, rank: int) -> dict[str, np.ndarray]:
    """Trains with DDP, with a dummy image where a rank's samples have none. Returns the parameters."""
    torch.manual_seed(0)
    model: Any = user.build_model()
    optimizer = user.build_optimizer(list(model.named_parameters()))
    wrapped = DistributedDataParallel(model)
    for step in range(STEPS):
        batch = read_share(user, step, rank)
        targets = torch.tensor(float((batch["labels"][:, 1:] != -100).sum()))
        own = targets.item()
        dist.all_reduce(targets)
        optimizer.zero_grad()
        loss = wrapped(**{"picture": torch.zeros(1, 16, 16), **batch})
        (loss * (own * WORLD / targets.item())).backward()
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def run_rank(train: Callable[[UserModel, int], Any], path: Path, rank: int, port: int, pipe: Any) -> None:
    """Joins the group and trains. Sends what `train` returns, or the text of its error."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        pipe.send(train(load_model_file(path), rank))
    except RuntimeError as error:
        pipe.send(str(error).strip().splitlines()[0])


def run_ranks(train: Callable[[UserModel, int], Any], path: Path, wait_s: float) -> list[Any]:
    """Runs `train` on two processes. Returns what each sent, and a sentence for one that sent nothing
    within `wait_s` seconds. Then both are ended."""
    context, port = multiprocessing.get_context("spawn"), find_free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(WORLD)]
    ranks = [
        context.Process(target=run_rank, args=(train, path, rank, port, pipes[rank][1]), daemon=True)
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    try:
        end = time.monotonic() + wait_s
        return [
            pipe.recv()
            if pipe.poll(max(0.0, end - time.monotonic()))
            else f"hangs: no end after {wait_s:.0f} s"
            for pipe, _ in pipes
        ]
    finally:
        for process in ranks:
            process.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints what happens by hand, and what the plan does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("way", choices=("fsdp", "dummy"))
    parser.add_argument("--wait", type=float, default=60.0, help="seconds until ranks count as hanging")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        path = write_recording_model("rare_pictures", work, MODELS)
        plain = train_in_one_process(path, GLOBAL_BATCH, STEPS, work / "plain")
        if options.way == "fsdp":
            for rank, outcome in enumerate(run_ranks(train_with_fsdp, path, options.wait)):
                print(f"FSDP2 without dummy image, rank {rank}: {outcome or 'finished'}")
        else:
            os.environ["GRADIENTS"] = str(work)
            sent = run_ranks(train_with_dummy_images, path, options.wait)[0]
            by_hand = {name: torch.from_numpy(array) for name, array in sent.items()}
            print(f"DDP with dummy image: {describe_distance(by_hand, plain.parameters)}")
        compiled = compile_model(path, CompileOptions(cluster="local:2", global_batch=GLOBAL_BATCH))
        compiled.write_plan(work / "plan", report_page)
        trained = train_distributed(work / "plan", WORLD, STEPS, work / "run")
        print(f"secc: {describe_distance(trained.parameters, plain.parameters)}")
        for difference in find_differences(trained, plain):
            raise SystemExit(f"the plan differs from plain PyTorch: {difference}")


def describe_distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    """Says how far the encoder's and the other parameters are from plain PyTorch's after all steps."""
    largest = {True: 0.0, False: 0.0}
    for name, parameter in expected.items():
        is_encoder = name.startswith(("encoder", "pixels"))
        largest[is_encoder] = max(largest[is_encoder], float((found[name] - parameter).abs().max()))
    return (
        f"after {STEPS} steps the encoder is off by {largest[True]:.1e}, the rest by {largest[False]:.1e} "
        "from plain PyTorch (largest difference of a parameter)"
    )


if __name__ == "__main__":
    main()
