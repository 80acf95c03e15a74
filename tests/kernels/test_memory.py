from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from secc.runtime.kernels import launch_tuning, linear_cross_entropy, linear_kl, linear_kl_ce

ROWS, VOCABULARY, CHUNK = 512, 4096, 16


def largest_allocation(run) -> int:
    """Returns the bytes of the largest tensor that `run` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    return max(event.self_cpu_memory_usage for event in record.events())


def test_only_one_chunk_of_logits_exists():
    hidden, weight = torch.randn(ROWS, 4, requires_grad=True), torch.randn(VOCABULARY, 4, requires_grad=True)
    target = torch.zeros(ROWS, dtype=torch.int64)

    def both():
        divergence, _, labels, _ = linear_kl_ce(hidden, weight, hidden, weight, target)
        (divergence + labels).backward()

    launch = launch_tuning.LaunchParameters(4096, CHUNK, columns=4096)
    with (
        launch_tuning.use_launch("linear_cross_entropy", launch),
        launch_tuning.use_launch("linear_kl", launch),
        launch_tuning.use_launch("linear_kl_ce", launch),
    ):
        for run in (
            lambda: linear_cross_entropy(hidden, weight, target)[0].backward(),
            lambda: linear_kl(hidden, weight, hidden, weight),
            both,
        ):
            assert largest_allocation(run) <= 4 * CHUNK * VOCABULARY
