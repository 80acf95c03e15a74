"""The data plane: every rank knows the same about a global batch and gets its own samples, whichever rank
loads them."""

# pyright: reportMissingParameterType=false, reportPrivateUsage=false, reportMissingTypeArgument=false

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from secc.runtime.data.data_plane import BadSampleError, DataPlane, GlobalBatch
from secc.runtime.data.declared_sizes import DeclaredSizes
from secc.runtime.errors import UserError
from secc.runtime.model.item_seeds import shared_rng_restore
from secc.runtime.model.user_file import load_model_file
from secc.runtime.plan.schema import PLAN_VERSION, Input, ModelRef, Plan, Symbol
from secc.runtime.plan.step_program import Instruction, MicroBatch, SampleMeta, Schedule
from tests.runtime.gloo_ranks import run_ranks

MODEL = """
import random
import torch

LENGTH = 7

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, i):
        labels = torch.tensor([-100] + [i] * (1 + i % 3))
        item = {"ids": torch.full((2 + i % 3,), i), "labels": labels, "noise": torch.rand(1)}
        if i % 2:
            item["pixels"] = torch.full((1 + i % 3, 2, 2, 2), random.random())
        BREAK
        return item

def model():
    class Model(torch.nn.Module):
        def forward(self, ids, labels, noise, pixels=None):
            return noise.sum()
    return Model()

def dataset():
    return Data()
"""
SIZES = """
def sizes(i):
    return {"ids": 2 + i % 3} | ({"pixels": 1 + i % 3} if i % 2 else {})
"""
SYMBOLS = (Symbol("B", "rows", "ids", 0), Symbol("S", "width", "ids", 1), Symbol("n", "rows", "pixels", 0))
INPUTS = (
    Input("ids", "int64", ("B", "S"), pads=((1, "right", 0),)),
    Input("labels", "int64", ("B", "S"), pads=((1, "right", -100),)),
    Input("noise", "float32", ("B", "1")),
    Input("pixels", "float32", ("n", "2", "2", "2"), optional=True),
)
LEAVES = {
    "count": lambda batch: (batch["labels"] != -100).sum(),
    "light": lambda batch: batch["pixels"].double().sum() / 3,
}


def plan_of(global_batch=4, widths="own", inputs=INPUTS, labels_key="labels"):
    return Plan(
        PLAN_VERSION,
        "",
        ModelRef("", ""),
        1,
        global_batch,
        widths,
        SYMBOLS,
        inputs,
        (),
        (),
        (),
        (),
        {},
        {},
        {},
        labels_key=labels_key,
    )


@pytest.fixture
def model_file(tmp_path: Path):
    def write(broken: str = "", sizes: str = "") -> Path:
        path = tmp_path / "model.py"
        path.write_text(MODEL.replace("BREAK", broken) + sizes)
        return path

    return write


@pytest.fixture
def plane(model_file):
    """Makes data planes of one rank, and ends their workers."""
    made: list[DataPlane] = []

    def make(plan=None, broken="", sizes="", **options):
        made.append(
            DataPlane(
                load_model_file(model_file(broken, sizes)), plan or plan_of(), 0, 1, leaves=LEAVES, **options
            )
        )
        return made[-1]

    yield make
    for p in made:
        p.close()


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("workers", [0, 1])
def test_metadata_of_a_global_batch(plane, workers):
    batch = plane(workers=workers).next_batch()
    assert [s.id for s in batch.samples] == [0, 1, 2, 3]
    assert [sorted(s.pattern) for s in batch.samples] == [[], ["pixels"], [], ["pixels"]]
    assert [dict(s.sizes) for s in batch.samples] == [
        {"B": 1, "S": 2, "n": 0},
        {"B": 1, "S": 3, "n": 2},
        {"B": 1, "S": 4, "n": 0},
        {"B": 1, "S": 2, "n": 1},
    ]
    assert batch.sizes == {"B": 4, "S": 4, "n": 3} and batch.pattern == {"pixels"}
    assert batch.tokens == 7 and batch.batch_sums["count"] == 7.0 and batch.batch_sums["light"] > 0


def test_global_batches_wrap_by_epoch_with_new_random_numbers(plane):
    p = plane()
    first, second = p.next_batch(), None
    early = p.load_micro_batch([0])
    second = p.next_batch()
    assert [s.id for s in first.samples + second.samples] == [0, 1, 2, 3, 4, 5, 6, 0]
    again = p.load_micro_batch([3])
    assert torch.equal(early["ids"], again["ids"]) and not torch.equal(early["noise"], again["noise"])


def test_shuffle_is_a_permutation_of_each_epoch(plane):
    p = plane(plan_of(global_batch=7), shuffle=True)
    epochs = [[s.id for s in p.next_batch().samples] for _ in range(3)]
    assert all(sorted(ids) == list(range(7)) for ids in epochs)
    assert len({tuple(ids) for ids in epochs}) == 3
    assert [
        s.id for s in plane(plan_of(global_batch=7), shuffle=True, start=2).next_batch().samples
    ] == epochs[2]


def test_a_resumed_run_gets_the_same_batches_as_an_unbroken_one(plane):
    unbroken, resumed = plane(seed=3), plane(seed=3, start=2)
    for _ in range(2):
        unbroken.next_batch()
    assert unbroken.next_batch() == resumed.next_batch()
    assert equal(unbroken.load_micro_batch([1, 3]), resumed.load_micro_batch([1, 3]))


def test_the_last_batch_of_the_last_epoch_holds_the_rest(plane):
    p = plane(plan_of(global_batch=5), epochs=2)
    assert p.epochs.step_count == 3
    batches = [p.next_batch() for _ in range(3)]
    assert [[s.id for s in b.samples] for b in batches] == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2], [3, 4, 5, 6]]
    assert batches[2].sizes["B"] == 4 and batches[2].batch_sums["count"] == sum(
        1 + i % 3 for i in (3, 4, 5, 6)
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_worker_and_inline_loading_give_the_same_batches(plane, workers):
    inline, worker = plane(), plane(workers=workers)
    for _ in range(3):
        assert inline.next_batch() == worker.next_batch()
        worker.announce_micro_batches([((0, 2), ""), ((1,), ""), ((0, 2), "")])
        for positions in ((0, 2), (1,), (0, 2), (3,)):
            assert equal(inline.load_micro_batch(positions), worker.load_micro_batch(positions))


def test_announced_batches_may_be_loaded_in_another_order_or_not_at_all(plane):
    inline, worker = plane(), plane(workers=1)
    for _ in range(3):
        assert inline.next_batch() == worker.next_batch()
        worker.announce_micro_batches([((a, b), "") for a in range(4) for b in range(4) if a != b])
        for positions in ((3, 2), (0, 1)):
            assert equal(inline.load_micro_batch(positions), worker.load_micro_batch(positions))


def test_loading_leaves_the_random_streams_alone(plane):
    p = plane()
    torch.manual_seed(1)
    random.seed(1)
    expected = (torch.rand(1), random.random())
    torch.manual_seed(1)
    random.seed(1)
    p.next_batch()
    p.load_micro_batch([0, 1])
    assert (torch.rand(1), random.random()) == expected


def test_sharing_the_rng_restore_does_not_change_items(model_file):
    user = load_model_file(model_file())
    alone = [user.load_sample(i) for i in range(3)]
    torch.manual_seed(1)
    state = random.getstate(), torch.get_rng_state()
    with shared_rng_restore():
        together = [user.load_sample(i) for i in range(3)]
        assert not torch.equal(torch.get_rng_state(), state[1])
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
    assert all(equal(a, b) for a, b in zip(alone, together, strict=True))


def test_batches_are_padded_to_global_widths(plane):
    own, padded = plane(), plane(plan_of(widths="global"))
    own.next_batch()
    padded.next_batch()
    assert own.load_micro_batch([0])["labels"].tolist() == [[-100, 0]]
    assert padded.load_micro_batch([0])["labels"].tolist() == [[-100, 0, -100, -100]]


def test_without_labels_tokens_are_entries_of_the_first_input(plane):
    assert plane(plan_of(labels_key="")).next_batch().tokens == 2 + 3 + 4 + 2


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_that_fail_to_load_can_be_skipped(plane, workers, capsys):
    """Sums, sizes and positions are exactly those of a dataset without these samples."""
    p = plane(broken="if i in (1, 2): raise OSError('no such image')", workers=workers, skip_bad=True)
    batch = p.next_batch()
    assert [s.id for s in batch.samples] == [0, 3] and batch.skipped_indices == (1, 2)
    assert batch.sizes == {"B": 2, "S": 2, "n": 1} and batch.batch_sums["count"] == 2
    p.announce_micro_batches([((0, 1), ""), ((1,), "")])
    assert p.load_micro_batch([0, 1])["ids"].tolist() == [[0, 0], [3, 3]] and p.load_micro_batch([1])[
        "ids"
    ].tolist() == [[3, 3]]
    assert [s.id for s in p.next_batch().samples] == [4, 5, 6, 0]
    said = capsys.readouterr().err
    assert "step 1: a sample is left out: " in said and "dataset()[2] raises OSError: no such image" in said


def test_a_batch_without_any_loaded_sample_ends_the_run(plane):
    with pytest.raises(UserError, match=r"none of the 4 samples of step 1 can be trained.*no disk"):
        plane(broken="raise OSError('no disk')", skip_bad=True).next_batch()


@pytest.mark.parametrize("broken", ["del item['noise']", "item['noise'] = torch.zeros(2)"])
def test_samples_that_do_not_fit_the_plan_can_be_skipped(plane, broken, capsys):
    p = plane(broken=f"if i == 1: {broken}", skip_bad=True)
    batch = p.next_batch()
    assert [s.id for s in batch.samples] == [0, 2, 3] and batch.skipped_indices == (1,)
    assert "'noise'" in capsys.readouterr().err


def test_a_batch_without_any_sample_that_fits_says_why(plane):
    with pytest.raises(UserError, match=r"can be trained: .* lacks the input 'noise'"):
        plane(broken="del item['noise']", skip_bad=True).next_batch()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_error_names_the_sample_that_failed_to_load(plane, workers):
    p = plane(broken="if i == 2: raise OSError('no such image')", workers=workers)
    with pytest.raises(UserError, match=r"dataset\(\)\[2\].*no such image") as caught:
        p.next_batch()
    assert "model.py:" in caught.value.where


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("item['audio'] = torch.zeros(3)", r"dataset\(\)\[0\] has the input 'audio'"),
        ("del item['noise']", r"dataset\(\)\[0\] lacks the input 'noise'"),
        (
            "item['noise'] = item['noise'].double()",
            r"'noise' of dataset\(\)\[0\] is float64\[1, 1\], but the plan has float32\[B, 1\]",
        ),
        ("item['noise'] = torch.zeros(2)", r"is float32\[1, 2\], but the plan has float32\[B, 1\]"),
        ("item['ids'] = 'text'", r"'ids' of dataset\(\)\[0\] is no tensor"),
    ],
)
def test_samples_that_do_not_fit_the_plan_are_rejected(plane, broken, message):
    with pytest.raises(UserError, match=message):
        plane(broken=broken).next_batch()


def test_a_worker_that_dies_is_reported(plane):
    p = plane(broken="if i == 1: __import__('os').kill(__import__('os').getpid(), 9)", workers=1)
    with pytest.raises(UserError, match="was killed by SIGKILL"):
        p.next_batch()


def _backwards(samples) -> Schedule:
    """Every sample is trained by rank 2, and the odd ones by rank 0 as well."""
    everything = MicroBatch(0, "a", 0, tuple(range(len(samples))))
    odd = MicroBatch(0, "b", 0, tuple(range(1, len(samples), 2)))
    programs = ((Instruction("F", "b", micro=0),), (), (Instruction("F", "a", micro=0),))
    return Schedule({"a": (everything,), "b": (odd,)}, programs)


def _alone(samples) -> Schedule:
    """One rank trains all samples."""
    return Schedule(
        {"a": (MicroBatch(0, "a", 0, tuple(range(len(samples)))),)}, ((Instruction("F", "a", micro=0),),)
    )


def _rank(rank: int, world: int, path: Path, plan: Plan, workers: int, results) -> None:
    torch.set_num_threads(1)
    with DataPlane(
        load_model_file(path), plan, rank, world, leaves=LEAVES, workers=workers, order=_backwards
    ) as p:
        dist.init_process_group(
            "gloo", init_method=f"file://{path.parent}/store{workers}", rank=rank, world_size=world
        )
        for _ in range(3):
            batch = p.next_batch()
            results.put((rank, batch, {k: v.tolist() for k, v in p.load_micro_batch([0, 3]).items()}))
            told = p.exchange_values(
                torch.tensor([rank / 2, 1.0], dtype=torch.float64), steps=2
            )  # the third step's rows do not travel along
            assert told.tolist() == [[0.0, 1.0], [0.5, 1.0], [1.0, 1.0]]
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gloo
@pytest.mark.parametrize(("workers", "sizes"), [(0, ""), (1, ""), (0, SIZES), (1, SIZES)])
def test_three_ranks_agree_with_a_single_one(plane, model_file, workers, sizes):
    """Three ranks load uneven shares; batch-wide sums are equal to the last bit."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    path, plan, single = (
        model_file(sizes=sizes),
        plan_of(global_batch=5),
        plane(plan_of(global_batch=5), sizes=sizes),
    )
    ranks = [context.Process(target=_rank, args=(r, 3, path, plan, workers, results)) for r in range(3)]
    for process in ranks:
        process.start()
    found = [results.get() for _ in range(9)]
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    for _ in range(3):
        expected: GlobalBatch = single.next_batch()
        values = {k: v.tolist() for k, v in single.load_micro_batch([0, 3]).items()}
        assert sorted(rank for rank, batch, tensors in found if batch == expected and tensors == values) == [
            0,
            1,
            2,
        ]


@pytest.mark.gloo
def test_metadata_rows_travel_with_exchanged_values(model_file):
    """They need no message of their own. All ranks hear of a sample that fails to load when its step begins,
    and one that tried to load it says why."""
    path = model_file("if i == 5: raise OSError('no such image')")

    def target(rank: int) -> tuple[bool, bool, str]:
        dist.init_process_group("gloo")
        with DataPlane(load_model_file(path), plan_of(global_batch=2), rank, 2, leaves=LEAVES) as p:
            came = True
            for _ in range(2):
                p.next_batch()
                p.exchange_values(torch.zeros(1, dtype=torch.float64), steps=9)
                came = came and p._next_table is not None
            with pytest.raises(BadSampleError) as caught:
                p.next_batch()
            return came, caught.value.reported_elsewhere, caught.value.message

    assert run_ranks(2, target) == [
        (True, True, "samples [5] do not load"),
        (True, False, "dataset()[5] raises OSError: no such image"),
    ]


def test_with_declared_sizes_a_rank_loads_the_samples_it_trains(model_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    user = load_model_file(model_file("open('loaded', 'a').write(f'{i} ')", SIZES))
    plane = DataPlane(user, plan_of(), 2, 3, leaves=LEAVES, order=_backwards)
    assert plane._loader.wait_for_result(plane._metadata_request(0)).table[:, 0].tolist() == [0, 2]
    assert Path("loaded").read_text().split() == ["0", "2"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("{'ids': 9}", r"sizes\(0\) says that 'ids' is 9 large, but it is 2"),
        (
            "{'ids': 2, 'pixels': 1}",
            r"sizes\(0\) says that the sample has \['pixels'\], but it has no optional inputs",
        ),
        ("{'ids': 2, 'labels': 3}", r"sizes\(0\) gives 'labels' 3 where another input has 2"),
        (
            "{'ids': [2, 2, 2]}",
            r"sizes\(0\) gives the shape \[2, 2, 2\] for 'ids', which has the dims \[B, S\]",
        ),
        ("{'idx': 2}", r"sizes\(0\) has the key 'idx'; expected inputs of the model"),
        ("{}", r"sizes\(0\) does not say how large 'ids' is"),
        ("None", r"sizes\(0\) is None, not a dict"),
    ],
)
def test_wrong_declared_sizes_are_rejected(plane, said, message):
    with pytest.raises(UserError, match=message) as caught:
        plane(sizes=f"\ndef sizes(i):\n    return {said}\n", order=_alone).next_batch()
    assert "model.py:" in caught.value.where


def test_declared_sizes_may_be_shapes_with_or_without_the_samples_dim(model_file):
    said = "\ndef sizes(i):\n    return {'ids': [2], 'labels': (1, 2), 'noise': 1, 'pixels': [4, 2, 2, 2]}\n"
    declared = DeclaredSizes(load_model_file(model_file(sizes=said)), SYMBOLS, INPUTS)
    assert declared.sample_metadata(3) == SampleMeta(3, frozenset({"pixels"}), {"B": 1, "S": 2, "n": 4})


def _abandon(path: Path, pids) -> None:
    p = DataPlane(load_model_file(path), plan_of(), 0, 1, leaves=LEAVES, workers=1)
    p.next_batch()
    pids.put(multiprocessing.active_children()[0].pid)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_ends_with_its_rank(model_file):
    context = multiprocessing.get_context("fork")
    pids = context.SimpleQueue()
    rank = context.Process(target=_abandon, args=(model_file(), pids))
    rank.start()
    worker = pids.get()
    rank.join(timeout=30)
    for _ in range(300):
        if not _running(worker):
            return
        time.sleep(0.1)
    pytest.fail("the worker still runs")


def _running(pid: int) -> bool:
    """Whether a process exists and is not just waiting to be reaped by init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
