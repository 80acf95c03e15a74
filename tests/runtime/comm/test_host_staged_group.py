"""Ranks that share a GPU talk through the host's memory. Here CPU tensors are copied as a GPU's would be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from secc.runtime.comm.host_staged_group import BACKEND_NAME, register_backend
from tests.e2e.harness import (
    compile_and_write,
    find_differences,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tests.runtime.gloo_ranks import run_ranks

MODELS = Path(__file__).parents[2] / "models"


@pytest.mark.gloo
def test_every_operation_returns_what_gloo_returns() -> None:
    def target(rank: int) -> list[list[float]]:
        dist.init_process_group(register_backend(stage_all=True))
        outer = dist.new_group([0, 2])
        assert dist.get_backend() == BACKEND_NAME
        total, own = torch.arange(3.0) + rank, torch.full((2,), float(rank))
        dist.all_reduce(total)
        gathered = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(gathered, own)
        scattered, exchanged = torch.zeros(2), torch.zeros(3)
        dist.reduce_scatter_tensor(scattered, torch.arange(6.0) + rank)
        dist.all_to_all_single(exchanged, torch.arange(3.0) + 10 * rank)
        first = own.clone()
        dist.broadcast(first, 1)
        received = torch.zeros(2)
        ends = [
            dist.P2POp(dist.isend, own, (rank + 1) % 3, tag=1),
            dist.P2POp(dist.irecv, received, (rank - 1) % 3, tag=1),
        ]
        for work in dist.batch_isend_irecv(ends):
            work.wait()
        if rank != 1:
            dist.all_reduce(own, group=outer)
        dist.barrier()
        return [t.tolist() for t in (total, *gathered, scattered, exchanged, first, received, own)]

    for rank, found in enumerate(run_ranks(3, target)):
        before = (rank - 1) % 3
        assert found == [
            [3.0, 6.0, 9.0], [0.0] * 2, [1.0] * 2, [2.0] * 2,
            [6.0 * rank + 3, 6.0 * rank + 6], [rank, 10.0 + rank, 20.0 + rank],
            [1.0] * 2, [float(before)] * 2, [1.0 if rank == 1 else 2.0] * 2,
        ]  # fmt: skip


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "choices"),
    [
        ("llava_tiny", 5, ("language_model.pp=2", "language_model.tp=2", "vision_tower.dp=1")),
        ("qwen_distil", 3, ("student.sharding=zero3", "student.dp=2")),
        ("llava_tiny", 3, ("language_model.tp=2", "vision_tower.dp=1")),  # with a head that tp divides
    ],
)
def test_ranks_that_share_a_device_train_as_plain_pytorch(
    name: str, ranks: int, choices: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_recording_model(name, tmp_path, MODELS)
    reference = train_in_one_process(model, 12, 3, tmp_path / "plain")
    compiled = compile_and_write(
        model, tmp_path / "plan", cluster=f"local:{ranks}", global_batch=12, set=choices, fuse=True
    )
    found = train_distributed(
        tmp_path / "plan", compiled.plan.world_size, 3, tmp_path / "run", "--share-gpus"
    )
    assert list(find_differences(found, reference)) == []
