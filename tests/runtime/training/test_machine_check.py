"""A plan for devices that this machine does not have is refused before any process starts."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.cluster import parse_cluster
from secc.runtime.errors import UserError
from secc.runtime.plan.schema import Plan, plan_to_json
from secc.runtime.training.machine_check import check_gpu_memory, check_machine, memory_of_rank
from secc.runtime.training.supervisor import run_plan
from tests.runtime.captioner_plans import APART, make_plan, write_plan

H100: dict[str, Any] = json.loads(parse_cluster("2xH100").to_json())


def with_memory(plan: Plan, gib: float) -> Plan:
    sections = tuple(dataclasses.replace(s, memory_gib=gib) for s in plan.sections)
    return dataclasses.replace(plan, sections=sections)


def test_run_for_absent_gpus_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = dataclasses.replace(write_plan(tmp_path / "plan", APART), cluster=H100)
    (tmp_path / "plan" / "plan.json").write_text(plan_to_json(plan))
    start = time.monotonic()
    with pytest.raises(UserError, match="needs 2 H100 GPUs on this machine, which has none") as error:
        run_plan(tmp_path / "plan", ["--steps", "1"])
    assert time.monotonic() - start < 2
    assert "--cluster local" in error.value.remedy and "--emulate" in error.value.remedy


def test_gpus_are_counted_for_the_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    plan = dataclasses.replace(make_plan(APART), cluster=H100)
    check_machine(plan, [1])
    with pytest.raises(UserError, match="needs 2 H100 GPUs on this machine, which has 1"):
        check_machine(plan, [0, 1])
    mixed = {**H100, "groups": [H100, {"device": {"kind": "A800", "backend": "cuda"}}]}
    with pytest.raises(UserError, match="needs 2 H100 or A800 GPUs"):
        check_machine(dataclasses.replace(plan, cluster=mixed), [0, 1])


def test_memory_of_cpu_ranks_is_summed() -> None:
    plan = make_plan(APART)
    check_machine(with_memory(plan, 0.01), [0, 1])
    assert memory_of_rank(with_memory(plan, 1.0), 0) == 1.0  # each section says it for its rank
    with pytest.raises(UserError, match=r"needs 2e\+06 GiB of memory for 2 ranks on this machine, which has"):
        check_machine(with_memory(plan, 1e6), [0, 1])


def test_smaller_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Properties:
        name: str = "A10"
        total_memory: int = 24 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    plan, gpu = with_memory(make_plan(APART), 40.0), torch.device("cuda", 0)
    check_gpu_memory(plan, [0], torch.device("cpu"))
    check_gpu_memory(with_memory(plan, 20.0), [0], gpu)
    with pytest.raises(UserError, match="needs 40 GiB of memory on rank 0, but the A10 there has 24 GiB"):
        check_gpu_memory(plan, [0], gpu)
