"""What user code can ask for of ranks, inside and outside of the contexts that hide them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from secc.runtime.host.hidden_ranks import hidden_process_group, hidden_ranks, make_groups_hideable


@pytest.fixture
def process_group() -> Iterator[None]:
    make_groups_hideable()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=9))
    yield
    dist.destroy_process_group()


@pytest.mark.gloo
@pytest.mark.usefixtures("process_group")
def test_a_hidden_process_group_is_like_none() -> None:
    group = dist.new_group([0])
    assert isinstance(group, dist.ProcessGroup)
    assert dist.is_initialized() and dist.get_world_size() == 1
    with hidden_process_group():
        assert not dist.is_initialized()
        for ask in (dist.get_rank, dist.get_world_size):
            with pytest.raises(ValueError, match="has not been initialized"):
                ask()
        assert dist.get_rank(group) == 0
        summed = torch.ones(2)
        dist.all_reduce(summed, group=group)  # as parts of a module are summed while it runs
        with hidden_ranks():
            assert not dist.is_initialized()
        assert not dist.is_initialized()
    assert dist.is_initialized()


@pytest.mark.gloo
@pytest.mark.usefixtures("process_group")
def test_gradients_are_computed_without_a_group_and_checkpoints_written_with_it() -> None:
    seen = dict[str, bool]()
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.update(backward=dist.is_initialized()))
    with hidden_process_group():
        x.sum().backward()
        thread = threading.Thread(target=lambda: seen.update(thread=dist.is_initialized()))
        thread.start()
        thread.join()
    assert seen == {"backward": False, "thread": True}


def test_variables_of_launchers_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("RANK", raising=False)
    with hidden_ranks():
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    assert os.environ["WORLD_SIZE"] == "8" and "RANK" not in os.environ
