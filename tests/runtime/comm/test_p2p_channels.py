"""Sends that may be left unreceived: the limit cannot deadlock, and is as small as asked for if possible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from secc.runtime.comm import p2p_channels
from secc.runtime.comm.p2p_channels import Message, Transport
from secc.runtime.plan.step_program import Schedule, parse_instruction
from secc.runtime.schedule.scheduler import schedule_batch
from secc.runtime.validation.send_window import DEFAULT_SEND_LIMIT, find_send_limit
from tests.runtime.captioner_plans import UNEVEN, reference, write_plan
from tests.runtime.gloo_ranks import run_ranks
from tests.runtime.schedule.plan_strategies import random_batches, random_plans
from tests.runtime.train_captioner import metrics, train


def parse_programs(*texts: str) -> Schedule:
    return Schedule(
        {}, tuple(tuple(parse_instruction(line.strip()) for line in text.split(",")) for text in texts)
    )


def test_one_unreceived_send_suffices_if_messages_are_received_in_order() -> None:
    chain = parse_programs("SEND a fwd 0>0 to 1, SEND a fwd 1>1 to 1, SEND a fwd 2>2 to 1",
                     "RECV a fwd 0>0 from 0, RECV a fwd 1>1 from 0, RECV a fwd 2>2 from 0")  # fmt: skip
    assert find_send_limit(chain, 1) == 1


def test_a_receiver_that_needs_a_later_message_first_raises_the_limit() -> None:
    """Rank 1 takes message 0 only after rank 2, which waits for message 2 of rank 0, has sent to it."""
    circle = parse_programs("SEND a fwd 0>0 to 1, SEND a fwd 1>1 to 1, SEND b fwd 2>2 to 2",
                      "RECV c fwd 0>0 from 2, RECV a fwd 0>0 from 0, RECV a fwd 1>1 from 0",
                      "RECV b fwd 2>2 from 0, SEND c fwd 0>0 to 1")  # fmt: skip
    assert (
        find_send_limit(circle, 1) == 4
        and find_send_limit(circle, 2) == 4
        and find_send_limit(circle, 3) == 3
    )


def test_few_sends_need_no_limit() -> None:
    assert (
        find_send_limit(parse_programs("SEND a fwd 0>0 to 1", "RECV a fwd 0>0 from 0")) == DEFAULT_SEND_LIMIT
    )


@given(random_plans(), random_batches)
def test_every_schedule_has_a_limit_up_to_its_sends(plan, batch) -> None:
    found = schedule_batch(plan, batch)
    most = max(sum(i.kind == "SEND" for i in p) for p in found.programs)
    assert 1 <= find_send_limit(found, 1, plan.sections) < 2 * max(most, 1)


@pytest.mark.gloo
def test_training_with_one_unreceived_send_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "secc.runtime.comm.p2p_channels.find_send_limit",
        lambda found, sections: find_send_limit(found, 1, sections),
    )
    plain = reference(3)
    write_plan(tmp_path / "plan", UNEVEN, micro_batch=1)
    train(tmp_path / "plan", UNEVEN, 3)
    assert [row["loss"] for row in metrics(tmp_path / "plan")] == pytest.approx(plain.losses, rel=1e-6)


class _Layout:
    """Layout of an edge with messages of four entries."""

    dtype, pair_tag = torch.float32, staticmethod(lambda pair: pair[0])

    def slice_bounds(self, pair: tuple[int, int], index: int, count: int) -> tuple[int, int]:
        return 0, 4


@pytest.mark.gloo
def test_buffers_are_freed_while_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        p2p_channels, "plan_channels", lambda plan: {("e", "fwd", True): [0, 1], ("e", "bwd", False): [0, 1]}
    )
    received = [parse_instruction(f"RECV e bwd {m}>{m} from 1") for m in (0, 1)]
    sent = [parse_instruction(f"RECV e fwd {m}>{m} from 0") for m in range(4)]

    def target(rank: int) -> list[int]:
        dist.init_process_group("gloo")
        transport = Transport(_Plan(), rank, torch.device("cpu"))  # pyright: ignore[reportArgumentType]
        transport.begin_program({"e": _Layout()}, received if rank == 0 else sent, limit=2)  # pyright: ignore[reportArgumentType]
        held: list[int] = []
        for m in range(4):
            forward = Message("e", "fwd", (m, m), 1 - rank)
            if rank == 0:
                transport.send(forward, torch.full((4,), float(m)))
                held.append(len(transport._step.unreceived))
            else:
                assert transport.take_values(forward).tolist() == [m] * 4
                if m < 2:
                    transport.send(Message("e", "bwd", (m, m), 0), torch.ones(5))
        if rank == 0:
            for m in (0, 1):
                transport.take_values(Message("e", "bwd", (m, m), 1))
                held.append(len(transport._step.unreceived))
        transport.finish_step()
        return [*held, len(transport._step.unreceived)]

    assert run_ranks(2, target)[0] == [1, 2, 2, 2, 2, 2, 0]


class _Plan:
    sections = ()
    edges = (type("Edge", (), {"name": "e"}),)
