"""Global batches from streams and mixtures: those of the same samples as a list, on every rank and after
every resumption."""

# pyright: reportMissingParameterType=false

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.runtime.data.data_plane import BadSampleError, DataPlane
from secc.runtime.data.mixed_order import MixedOrder, make_sample_order
from secc.runtime.errors import UserError
from secc.runtime.model.stream_reader import StreamFailure
from secc.runtime.model.user_file import load_model_file
from tests.runtime.data.test_data_plane import LEAVES, MODEL, equal, plan_of
from tests.runtime.gloo_ranks import run_ranks

NUMBERED = MODEL.replace("BREAK", "pass")
STREAMED = NUMBERED.replace(
    "    return Data()",
    """    return Stream()

class Stream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.data, self.at, self.resumed = Data(), 0, False

    def __iter__(self):
        start, self.at = self.at, 0
        for i in range(start, LENGTH):
            self.at = i + 1
            yield self.data[i]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
""",
)
MIXED = STREAMED.replace(
    "def dataset():\n    return Stream()",
    """def datasets():
    return {"numbers": (0.5, Data()), "stream": (0.25, Stream()), "more": (0.25, Data())}
""",
)

Make = Callable[..., DataPlane]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Make]:
    made: list[DataPlane] = []

    def make(text: str, global_batch: int = 4, **options: Any) -> DataPlane:
        path = tmp_path / f"model{len(made)}.py"
        path.write_text(text)
        made.append(DataPlane(load_model_file(path), plan_of(global_batch), 0, 1, leaves=LEAVES, **options))
        return made[-1]

    yield make
    for p in made:
        p.close()


def read_steps(p: DataPlane, count: int) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """The samples of `count` steps: metadata and the collated batch."""
    read: list[tuple[Any, dict[str, torch.Tensor]]] = []
    for _ in range(count):
        batch = p.next_batch()
        read.append((batch.samples, p.load_micro_batch(range(len(batch.samples))[::-1])))
    return read


def assert_same(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for (samples_a, batch_a), (samples_b, batch_b) in zip(a, b, strict=True):
        assert samples_a == samples_b and equal(batch_a, batch_b)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_gives_the_batches_of_a_list(plane: Make, workers: int, capfd) -> None:
    expected = read_steps(plane(NUMBERED, seed=2), 5)
    assert_same(read_steps(plane(STREAMED, seed=2, workers=workers), 5), expected)
    assert "step 2: dataset() has ended after 7 samples and begins again" in capfd.readouterr().err


@pytest.mark.parametrize("text", [STREAMED, MIXED])
@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_reads_on_where_it_was(plane: Make, text: str, stop: int, workers: int, capfd) -> None:
    unbroken = plane(text, seed=3, workers=workers, saves=True, shuffle=text is MIXED)
    read_steps(unbroken, stop)
    data = json.loads(json.dumps(unbroken.position_after(stop)))
    assert data["samples"] == 4 * stop
    options = {"seed": 3, "workers": workers, "start": stop, "shuffle": text is MIXED}
    resumed = plane(text, resumed=data, saves=True, **options)
    assert resumed.position_after(stop) == data
    expected = read_steps(unbroken, 4)
    assert_same(read_steps(resumed, 4), expected)
    assert resumed.position_after(stop + 4) == unbroken.position_after(stop + 4)
    if text is STREAMED:
        assert "dataset() goes on after" in capfd.readouterr().err
    # Without what the checkpoint recorded, the stream is read from its beginning.
    assert_same(read_steps(plane(text, seed=3, start=stop, shuffle=text is MIXED), 4), expected)


def test_epochs_need_a_length(plane: Make) -> None:
    with pytest.raises(UserError, match="--epochs: the number of samples of dataset"):
        plane(STREAMED, epochs=2)
    with pytest.raises(UserError, match="--epochs: a mixture has no epochs"):
        plane(MIXED, epochs=2)
    with pytest.raises(UserError, match="--shuffle: the samples of dataset"):
        plane(STREAMED, shuffle=True)
    method = "    def __len__(self):\n        return LENGTH\n\n"
    counted = STREAMED.replace("    def state_dict", f"{method}    def state_dict")
    p = plane(counted, epochs=2, saves=True)
    assert p.epochs.step_count == 4 and [len(s) for s, _ in read_steps(p, 4)] == [4, 4, 4, 2]
    wrong = counted.replace("return LENGTH", "return 6")
    with pytest.raises(StreamFailure, match=r"dataset\(\) goes on after 6 samples, but its len\(\) is 6"):
        read_steps(plane(wrong, epochs=2), 2)


def test_a_mixture_has_its_shares_in_every_block(plane: Make, tmp_path: Path) -> None:
    p = plane(MIXED, seed=5, shuffle=True)
    order = p.epochs
    assert isinstance(order, MixedOrder)
    drawn = [order.source_sample(step, k) for step in range(40) for k in range(4)]
    assert all(Counter(s for s, _ in drawn[i : i + 4]) == {0: 2, 1: 1, 2: 1} for i in range(0, 160, 4))
    assert len({tuple(s for s, _ in drawn[i : i + 4]) for i in range(0, 160, 4)}) > 5
    for source in range(3):
        assert [n for s, n in drawn if s == source] == list(range(sum(s == source for s, _ in drawn)))
    for step in (0, 1, 7, 13):
        taken = [sum(s == source for s, _ in drawn[: 4 * step]) for source in range(3)]
        assert order.taken_before(step) == taken
    other = plane(MIXED, seed=6, shuffle=True).epochs
    assert (isinstance(other, MixedOrder) and [other.source_sample(0, k) for k in range(4)] != drawn[:4]) or (
        [other.source_sample(1, k) for k in range(4)] != drawn[4:8]
    )
    ids = [s.id for samples, _ in read_steps(p, 7) for s in samples]
    numbers = [i for i in ids if i < 7]
    assert sorted(numbers) == sorted(list(range(7)) * 2) and numbers[:7] != sorted(numbers[:7])
    assert [i - 7 for i in ids if 7 <= i < 1 << 40] == list(range(7))
    path = tmp_path / "named.py"
    path.write_text(MIXED)
    user = load_model_file(path)
    assert user.sample_name(2) == "datasets()['numbers'][1][2]"
    assert user.sample_name(9) == "sample 2 of datasets()['stream'][1]"
    assert Counter(i < 7 for i in user.survey_ids(8)) == {True: 4, False: 4}


def test_a_changed_mixture_goes_on_with_each_source(plane: Make) -> None:
    first = plane(MIXED, seed=1, saves=True)
    read_steps(first, 3)
    data = json.loads(json.dumps(first.position_after(3)))
    taken = {name: entry["taken"] for name, entry in data["sources"].items()}
    changed = MIXED.replace("(0.25, Stream())", "(3.0, Stream())").replace('"more": (0.25', '"new": (0.5')
    p = plane(changed, seed=1, start=3, resumed=data, saves=True, accepts_change=True)
    assert isinstance(p.epochs, MixedOrder) and p.epochs.taken_before(3) == [
        taken["numbers"],
        taken["stream"],
        0,
    ]
    read_steps(p, 2)
    later = p.position_after(5)
    assert later is not None and later["origin"] == {"number": 12, "taken": taken}
    assert later["sources"]["stream"]["taken"] - taken["stream"] == 6
    again = plane(changed, seed=1, start=5, resumed=json.loads(json.dumps(later)), saves=True)
    assert_same(read_steps(again, 2), read_steps(p, 2))


BROKEN = STREAMED.replace(
    "            yield self.data[i]", "            assert i != 5, 'torn'\n            yield self.data[i]"
)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_in_a_stream_ends_the_run(plane: Make, workers: int) -> None:
    p = plane(BROKEN, workers=workers)
    read_steps(p, 1)
    with pytest.raises(BadSampleError, match=r"dataset\(\), sample 5 of epoch 1, raises .*torn") as caught:
        p.next_batch()
    assert "a generator ends where it raises" in caught.value.remedy
    assert "--skip-bad" not in caught.value.remedy


def test_a_generator_that_raised_cannot_be_skipped(plane: Make, capsys) -> None:
    p = plane(BROKEN, skip_bad=True)
    assert [len(s) for s, _ in read_steps(p, 2)] == [4, 1]
    assert "sample 5 of epoch 1, raises" in capsys.readouterr().err
    with pytest.raises(StreamFailure, match="torn"):
        p.next_batch()


def test_samples_that_do_not_fit_the_plan_can_be_skipped(plane: Make, capsys) -> None:
    text = STREAMED.replace(
        "            yield self.data[i]", "            yield self.data[i] if i != 1 else {'other': 1}"
    )
    with pytest.raises(BadSampleError, match="sample 1 of dataset"):
        plane(text).next_batch()
    p = plane(text, skip_bad=True)
    samples, batch = read_steps(p, 1)[0]
    assert [s.id for s in samples] == [0, 2, 3] and batch["ids"][:, 0].tolist() == [3, 2, 0]
    assert "sample 1 of dataset()" in capsys.readouterr().err


@pytest.mark.gloo
def test_ranks_that_read_different_streams_are_noticed(tmp_path: Path) -> None:
    path, split = tmp_path / "model.py", tmp_path / "split.py"
    path.write_text(STREAMED)
    # The rank is read when the file is imported, where it is not hidden.
    split.write_text(
        STREAMED.replace("LENGTH = 7", "LENGTH = 7\nRANK = int(__import__('os').environ['RANK'])").replace(
            "range(start, LENGTH)", "range(start + (RANK == 1), LENGTH)"
        )
    )

    def target(rank: int) -> Any:
        import torch.distributed as dist

        planes = [
            DataPlane(load_model_file(f), plan_of(), rank, 3, leaves=LEAVES, workers=1) for f in (path, split)
        ]
        assert os.environ["RANK"] == str(rank)
        dist.init_process_group("gloo")
        read = read_steps(planes[0], 3)
        try:
            planes[1].next_batch()
        except UserError as error:
            found = str(error)
        else:
            found = "nothing was noticed"
        for p in planes:
            p.close()
        return [[s.id for s in samples] for samples, _ in read], found

    for ids, error in run_ranks(3, target):
        assert ids == [[0, 1, 2, 3], [4, 5, 6, 0], [1, 2, 3, 4]]
        assert "ranks 0 and 1 have read different samples for step 1 (samples 0 to 3 of the run)" in error
        assert "do not split the stream by rank" in error


def test_a_single_source_of_a_mixture_is_one_of_all(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        NUMBERED.replace(
            "def dataset():\n    return Data()", "def datasets():\n    return {'a': (3, Data())}"
        )
    )
    order = make_sample_order(load_model_file(path), 4)
    assert isinstance(order, MixedOrder) and order.locate_sample(2, 1) == (1, 2)
    path.write_text(path.read_text() + "\ndef dataset():\n    return Data()\n")
    with pytest.raises(UserError, match="has both dataset"):
        make_sample_order(load_model_file(path), 4)
