"""Optimizer states in host memory: training is bit-equal to training with states on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secc.runtime.parameters import gradient_reduction, host_copies, offloaded_optimizer
from secc.runtime.parameters.elementwise_check import why_not_stepwise
from secc.runtime.parameters.host_copies import HostCopies
from secc.runtime.parameters.offloaded_optimizer import OffloadedOptimizer
from secc.runtime.parameters.sharded_optimizer import MasterGroup
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import plan_to_json
from tests.runtime.captioner_plans import TOGETHER, UNEVEN, Layout
from tests.runtime.parameters.test_checkpoint import assert_same_contents
from tests.runtime.parameters.test_sharded_optimizer import Lamb, train, write_sharded
from tests.runtime.train_captioner import metrics

STEPS = 4
CPU = torch.device("cpu")


def write_offloaded(
    directory: Path, layout: Layout, sharding: Mapping[str, str], offloaded: tuple[str, ...]
) -> None:
    write_sharded(directory, layout, sharding)
    plan = load_plan(directory)
    sections = tuple(
        replace(s, offload="optimizer" if s.name in offloaded else "none") for s in plan.sections
    )
    (directory / "plan.json").write_text(plan_to_json(replace(plan, sections=sections)))


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(offloaded_optimizer, "BUCKET_BYTES", 600)
    monkeypatch.setattr(gradient_reduction, "BUCKET_BYTES", 600)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("layout", "sharding"),
    [
        (TOGETHER, {}),
        (TOGETHER, {"encoder": "zero1", "decoder": "zero2"}),
        (UNEVEN, {"decoder": "zero3", "teacher": "zero3"}),
    ],
    ids=["none", "zero1", "zero3"],
)
def test_offloading_changes_no_bit(
    tmp_path: Path,
    layout: Layout,
    sharding: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpoints after some steps, with averages of the weights, are equal, and either run goes on from the
    other's."""
    monkeypatch.setenv(host_copies.COPY_RATE_VARIABLE, "5e6")
    for name, offloaded in (("kept", ()), ("offloaded", ("encoder", "decoder"))):
        write_offloaded(tmp_path / name, layout, sharding, offloaded)
    common = ("--ema", "0.5", "--clip", "0.1")
    for name in ("kept", "offloaded"):
        train(tmp_path / name, layout, STEPS, *common, "--save", str(tmp_path / f"{name}-4"))
    kept, offloaded_rows = (metrics(tmp_path / name) for name in ("kept", "offloaded"))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in kept] == [row[key] for row in offloaded_rows]
    assert_same_contents(*(tmp_path / f"{name}-4" / "step_00000004" for name in ("kept", "offloaded")))
    for first, second in (("kept", "offloaded"), ("offloaded", "kept")):
        resumed = ("--resume", str(tmp_path / f"{first}-4"), "--save", str(tmp_path / f"{second}-6"))
        train(tmp_path / second, layout, STEPS + 2, *common, *resumed, "--log-dir", str(tmp_path / "logs"))
    assert_same_contents(*(tmp_path / f"{name}-6" / "step_00000006" for name in ("kept", "offloaded")))


def make_offloaded(count: int, size: int) -> tuple[OffloadedOptimizer, list[nn.Parameter]]:
    """An Adam on `count` masters of `size` entries, each in a bucket of its own."""
    params = [nn.Parameter(torch.ones(size)) for _ in range(count)]
    optimizer = torch.optim.Adam(params)
    masters = [MasterGroup(p.data, (p,), lambda: None) for p in params]
    return OffloadedOptimizer(optimizer, params, masters, HostCopies(CPU)), params


def device_bytes(offload: OffloadedOptimizer, params: list[nn.Parameter]) -> int:
    return sum(p.untyped_storage().nbytes() for p in params)


def test_at_most_three_buckets_are_on_the_device() -> None:
    offload, params = make_offloaded(count=8, size=1000)
    most: list[int] = []
    offload.optimizer.register_step_pre_hook(lambda *_: most.append(device_bytes(offload, params)))
    assert device_bytes(offload, params) == 0
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        offload.prefetch()
        offload.step()
        offload.wait_until_on_host()
        assert device_bytes(offload, params) == 0
    assert len(most) == 16 and max(most) == 3 * 4000
    assert all(state["exp_avg"].shape == (1000,) for state in offload.optimizer.state.values())


class Counting(torch.optim.SGD):
    """An optimizer with a learning rate that depends on the number of its steps."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                p.data -= p.grad / group["count"]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (torch.optim.AdamW, None),
        (Lamb, None),
        (torch.optim.Adafactor, None),
        (Counting, "Counting updates a parameter differently where others"),
    ],
)
def test_optimizers_that_step_on_some_parameters_are_recognised(made: Any, reason: str | None) -> None:
    found = why_not_stepwise(made([nn.Parameter(torch.ones(3, 2))]))
    assert found is None if reason is None else found is not None and reason in found


def test_a_hook_sees_the_names_of_the_parameters_that_a_part_of_a_step_updates() -> None:
    params = {name: nn.Parameter(torch.ones(2)) for name in ("kept", "a", "b")}
    optimizer = torch.optim.AdamW(params.items(), lr=0.1)
    seen: list[dict[str, bool]] = []

    def note(made: torch.optim.Optimizer, *_: object) -> None:
        (group,) = made.param_groups
        seen.append({n: p is params[n] for n, p in zip(group["param_names"], group["params"], strict=True)})

    optimizer.register_step_pre_hook(note)
    offloaded = OffloadedOptimizer(optimizer, [params["a"], params["b"]], (), HostCopies(CPU))
    for param in params.values():
        param.grad = torch.ones(2)
    offloaded.step()
    assert seen == [{"kept": True}, {"a": True, "b": True}]
    assert optimizer.param_groups[0]["param_names"] == list(params)
