"""The generators that are seeded for samples and callbacks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from secc.runtime.model.item_seeds import seeded_rngs


def test_the_generator_of_an_accelerator_is_seeded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device, calls = torch.device("cuda", 1), list[Any]()

    def fork(devices: list[torch.device], device_type: str) -> nullcontext[None]:
        calls.append((devices, device_type))
        return nullcontext()

    monkeypatch.setattr(torch.random, "fork_rng", fork)
    monkeypatch.setattr(torch, "get_device_module", lambda d: SimpleNamespace(manual_seed=calls.append))
    with seeded_rngs(7, device):
        drawn = torch.rand(())
    assert calls == [([device], "cuda"), 7]
    with seeded_rngs(7, torch.device("cpu")):
        assert torch.equal(torch.rand(()), drawn)
    assert len(calls) == 2
