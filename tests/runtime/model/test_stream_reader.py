"""Reading streams: the same samples as a list, epoch after epoch, and finding a place in them again."""

# pyright: reportMissingParameterType=false

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from secc.runtime.errors import UserError
from secc.runtime.host.hidden_ranks import hidden_ranks
from secc.runtime.model import counted_stream
from secc.runtime.model.sample_sources import check_source, mixture_sources, split_parts
from secc.runtime.model.stream_reader import StreamFailure, StreamPosition, StreamReader
from secc.runtime.model.stream_state import decode_state, digest_value, encode_state
from secc.runtime.model.user_file import load_model_file

HEAD = """
import random
import torch
from torch.utils.data import IterableDataset

def model():
    raise NotImplementedError
"""
COUNTED = """
class Stream(IterableDataset):
    def __iter__(self):
        for i in range(5):
            yield {"x": i, "noise": random.random()}

def dataset():
    return Stream()
"""
GENERATOR = """
def dataset():
    return ({"x": i, "noise": random.random()} for i in range(5))
"""
NUMBERED = """
class Numbered:
    def __len__(self): return 5
    def __getitem__(self, i): return {"x": i, "noise": random.random()}

def dataset():
    return Numbered()
"""
STATEFUL = """
class Stream:
    def __init__(self): self.at = 0
    def __iter__(self):
        READ.append("iter")
        while self.at < 5:
            self.at += 1
            READ.append(self.at - 1)
            yield {"x": self.at - 1}
        self.at = 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]

READ = []
def dataset():
    return Stream()
"""
# A buffer that is filled again after load_state_dict(), as those of Hugging Face's shuffle().
BUFFERED = """
class Stream:
    epoch = at = 0
    def set_epoch(self, epoch): self.epoch = epoch
    def __iter__(self):
        drawn, held = random.Random(self.epoch), []
        while self.at < 12:
            held.append(self.at)
            self.at += 1
            if len(held) == 4:
                yield {"x": held.pop(drawn.randrange(4)) + 100 * self.epoch}
        self.at = 0
        for i in held:
            yield {"x": i + 100 * self.epoch}
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]

def dataset():
    return Stream()
"""

Write = Callable[[str], Any]


@pytest.fixture
def user_of(tmp_path: Path) -> Write:
    def write(text: str) -> Any:
        path = tmp_path / "model.py"
        path.write_text(HEAD + text)
        return load_model_file(path)

    return write


def take(reader: StreamReader, numbers: range) -> list[Any]:
    return [reader.read(n).item["x"] for n in numbers]


@pytest.mark.parametrize("text", [COUNTED, GENERATOR])
def test_a_stream_gives_what_a_numbered_dataset_gives(user_of: Write, text: str) -> None:
    numbered = user_of(NUMBERED)
    expected = [numbered.load_sample(n % 5, 3, n // 5) for n in range(12)]
    reader = StreamReader(user_of(text).sources()[0], seed=3)
    read = [reader.read(n) for n in range(12)]
    assert [s.item for s in read] == expected
    assert [(s.epoch, s.index) for s in read] == [(n // 5, n % 5) for n in range(12)]
    assert reader.ended_epochs == [5, 5]
    reader.forget_before(10)
    assert reader.read(11).item == expected[11]


def test_surveys_do_not_move_the_place_of_a_run(user_of: Write) -> None:
    for text in (COUNTED, GENERATOR, STATEFUL):
        user = user_of(text)
        assert user.survey_ids(3) == [0, 1, 2] and user.survey_ids(64) == [0, 1, 2, 3, 4]
        assert [user.load_sample(i)["x"] for i in (4, 0)] == [4, 0]
        assert take(StreamReader(user.sources()[0]), range(6)) == [0, 1, 2, 3, 4, 0]
        assert user.sample_name(3) == "sample 3 of dataset()" and user.sample_count is None


@pytest.mark.parametrize("text", [COUNTED, GENERATOR, STATEFUL, BUFFERED])
@pytest.mark.parametrize("taken", [1, 3, 5, 7, 13])
def test_a_resumed_stream_goes_on_with_the_next_sample(user_of: Write, text: str, taken: int) -> None:
    first = StreamReader(user_of(text).sources()[0], seed=1)
    take(first, range(taken))
    position = StreamPosition.from_json(first.find_position(taken).as_json())
    assert position is not None and first.find_position(taken) == position
    following = take(first, range(taken, taken + 8))
    user = user_of(text)
    second = StreamReader(user.sources()[0], seed=1)
    how = second.resume(position)
    assert take(second, range(taken, taken + 8)) == following
    assert second.read(taken)[:2] == first.read(taken)[:2]
    if text == STATEFUL:
        first_read = next(r for r in user.module.READ if r != "iter")
        assert how == "by its state_dict()" and first_read == taken % 5
    else:
        assert "read again" in how


def test_another_stream_is_not_taken_for_the_same(user_of: Write) -> None:
    reader = StreamReader(user_of(COUNTED).sources()[0])
    take(reader, range(3))
    position = reader.find_position(3)
    other = user_of(COUNTED.replace('"x": i', '"x": i + (i == 1)'))
    with pytest.raises(StreamFailure, match="another stream than the checkpoint's run read: the first 6"):
        StreamReader(other.sources()[0]).resume(position)
    going_on = StreamReader(other.sources()[0])
    going_on.resume(position, accepts_change=True)
    assert take(going_on, range(3, 5)) == [3, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def dataset():\n    return iter(())\n", r"dataset\(\) gives no samples"),
        ("ONCE = iter([{'x': 0}])\ndef dataset():\n    return ONCE\n", "when it is read again, for epoch 2"),
    ],
)
def test_a_stream_without_samples_is_refused(user_of: Write, text: str, message: str) -> None:
    reader = StreamReader(user_of(text).sources()[0])
    with pytest.raises(StreamFailure, match=message):
        take(reader, range(2))


def test_a_stream_that_raises(user_of: Write) -> None:
    """A generator ends where it raises; an iterator may go on."""
    ending = COUNTED.replace("            yield", "            assert i != 2, 'torn'\n            yield")
    reader = StreamReader(user_of(ending).sources()[0])
    sample = reader.read(2)
    assert isinstance(sample.error, StreamFailure) and "sample 2 of epoch 1, raises" in sample.error.message
    assert "model.py:" in sample.error.where and "catch the exception" in sample.error.remedy
    with pytest.raises(StreamFailure, match="torn"):
        reader.raise_failure()
    going = """
class Reader:
    at = -1
    def __iter__(self): return self
    def __next__(self):
        self.at += 1
        if self.at in (2, 3): raise OSError("torn")
        return {"x": self.at} if self.at != 5 else 7
def dataset():
    return Reader()
"""
    reader = StreamReader(user_of(going).sources()[0])
    samples = [reader.read(n) for n in range(7)]
    assert [s.item.get("x") for s in samples] == [0, 1, None, None, 4, None, 6]
    assert [s.index for s in samples] == list(range(7))
    assert "gives an object of type int as sample 5, not a dict" in str(samples[5].error)
    reader.raise_failure()


def test_a_length_is_held_to_what_it_says(user_of: Write) -> None:
    source = user_of(COUNTED).sources()[0]
    for length, what in ((4, "goes on after 4"), (6, "ends after 5")):
        with pytest.raises(StreamFailure, match=what):
            take(StreamReader(source, epoch_length=length), range(7))
    assert take(StreamReader(source, epoch_length=5), range(7))[-1] == 1


@pytest.mark.parametrize(
    ("returned", "message", "remedy"),
    [
        ("{'train': [1], 'test': [2]}", "of type dict, not a map-style", r"one split, such as ds\['train'\]"),
        ("torch.utils.data.DataLoader([1, 2])", "a DataLoader of batches", "batch_size=None"),
        ("5", "neither a map-style dataset nor a stream", "__iter__"),
        ("'text.txt'[:0]", "is empty", ""),
    ],
)
def test_what_is_no_source_is_refused(user_of: Write, returned: str, message: str, remedy: str) -> None:
    user = user_of(f"def dataset():\n    return {returned}\n")
    with pytest.raises(UserError, match=message) as caught:
        user.sources()
    assert re.search(remedy, caught.value.remedy)


def test_sizes_are_for_numbered_samples(user_of: Write) -> None:
    with pytest.raises(UserError, match=r"sizes\(i\) is about sample i of a map-style"):
        user_of(COUNTED + "def sizes(i):\n    return {}\n").sources()


def test_ranks_are_hidden_while_data_code_runs(user_of: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "SLURM_PROCID": "5"}.items():
        monkeypatch.setenv(name, value)
    user = user_of("""
import os
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PMI_RANK")
def seen():
    return {name: os.environ.get(name) for name in NAMES}
class Stream(IterableDataset):
    def __init__(self): self.made = seen()
    def __iter__(self):
        yield {"x": (self.made, seen())}
def dataset():
    return Stream()
""")
    made, read = StreamReader(user.sources()[0]).read(0).item["x"]
    assert made == read == {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "SLURM_PROCID": "0", "PMI_RANK": None
    }  # fmt: skip
    assert os.environ["RANK"] == "2" and "LOCAL_RANK" not in os.environ
    with hidden_ranks(), hidden_ranks():
        assert os.environ["RANK"] == "0"
    assert os.environ["SLURM_PROCID"] == "5"


def test_states_are_plain_data() -> None:
    for state in ({"at": 3, "of": [1, None, "a"]}, {"at": (1, 2)}, {1: torch.arange(3)}, b"bytes"):
        encoded = encode_state(state)
        assert encoded is not None and json.loads(json.dumps(encoded)) == encoded
        assert str(decode_state(encoded)) == str(state)
    assert encode_state({"object": Fraction(1, 2)}) is None


def test_digests_tell_samples_apart() -> None:
    values: list[Any] = [
        {"x": 1}, {"y": 1}, {"x": 2}, {"x": 1.0}, {"x": [1, 2]}, {"x": "1"}, {"x": b"1"}, {"x": None},
        {"x": torch.zeros(3)}, {"x": torch.zeros(4)}, {"x": torch.zeros(3, dtype=torch.int32)},
        {"x": torch.tensor(0.0)}, {"x": np.zeros(3)}, {"x": np.ones(3)}, {"x": [torch.zeros(1), "a"]},
        {"x": torch.zeros(1 << 16)}, {"x": torch.cat([torch.zeros((1 << 16) - 1), torch.ones(1)])},
        {"x": torch.zeros(2, dtype=torch.bfloat16)}, {"x": {"y": 1}},
    ]  # fmt: skip
    assert len({digest_value(v) for v in values}) == len(values)
    assert digest_value({"x": torch.arange(6).view(2, 3).t()}) != digest_value(
        {"x": torch.arange(6).view(3, 2)}
    )


EVALUATED = """
READ = []
class Stream:
    def __init__(self, count): self.count = count
    def __iter__(self):
        for i in range(self.count):
            READ.append(i)
            yield {"x": i, "noise": random.random()}

def eval_dataset():
    return {"a": Stream(5), "b": [{"x": 5}, {"x": 6}], "c": ({"x": 7 + i} for i in range(3))}
"""


def test_an_evaluation_set_may_be_a_finite_stream(user_of: Write) -> None:
    user = user_of(EVALUATED).for_evaluation(window=3)
    assert user.evaluation_lengths == {"a": 5, "b": 2, "c": 3} and user.evaluates_streams
    numbers = [*range(10), *range(10), 8, 2, 3, 1]
    loaded = [user.load_sample(i) for i in numbers]
    assert [s["x"] for s in loaded] == numbers
    noise = {s["x"]: s["noise"] for s in loaded if s["x"] < 5}
    assert len(set(noise.values())) == 5 and all(
        noise[s["x"]] == s.get("noise") for s in loaded if s["x"] < 5
    )
    assert user.sample_name(9) == "eval_dataset()['c'][2]"
    del user.module.READ[:]
    assert [user.load_sample(i)["x"] for i in (2, 3, 4, 2, 4, 3, 0, 1)] == [2, 3, 4, 2, 4, 3, 0, 1]
    assert [0, 1, 2, 3, 4, 0, 1][-len(user.module.READ) :] == user.module.READ


def test_an_evaluation_set_needs_an_end(user_of: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_stream, "MAX_COUNTED", 50)
    user = user_of(EVALUATED.replace("range(self.count)", "__import__('itertools').count()"))
    with pytest.raises(
        UserError, match=r"eval_dataset\(\)\['a'\] has more than 50 samples, or no end"
    ) as caught:
        user.for_evaluation()
    assert "ds.take(1000)" in caught.value.remedy


def guard(what: str, call: Callable[[], Any]) -> Any:
    return call()


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ((1, 1), [1, 1]),
        ((0.7, 0.3), [7, 3]),
        ((1 / 3, 2 / 3), [1, 2]),
        ((10, 30, 60), [1, 3, 6]),
        ((0.12345, 0.87655), [2469, 17531]),
        ((1, 10**9), [0, 1]),
    ],
)
def test_weights_become_whole_parts(weights: tuple[float, ...], parts: list[int]) -> None:
    found = split_parts([Fraction(w) for w in weights])
    if max(parts) > 10_000:
        assert sum(found) <= 10_000 and found[0] / sum(found) == pytest.approx(weights[0], abs=1e-4)
    else:
        assert found == parts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "an empty dict"),
        ([1], "of type list"),
        ({"a": [1]}, r"datasets\(\)\['a'\] is an object of type list"),
        ({"a": (0, [1])}, "the weight of 'a' is 0"),
        ({"a": (float("nan"), [1])}, "the weight of 'a' is nan"),
        ({"a": (1, [1]), "b": (1e-9, [1])}, "less than 1/10000"),
        ({"a": (1, [])}, r"datasets\(\)\['a'\]\[1\] is empty"),
        ({3: (1, [1])}, "the key 3"),
    ],
)
def test_a_mixture_that_is_none_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mixture_sources(given, "model.py:1", guard, lambda: given)


def test_objects_with_numbered_samples_are_not_read_as_streams() -> None:
    """As MosaicML's StreamingDataset, an IterableDataset with __len__ and its own __getitem__."""

    class Both(torch.utils.data.IterableDataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> int:
            return i

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    sources = mixture_sources({"a": (1, Both()), "b": (2, iter([1]))}, "", guard, dict)
    assert [s.is_stream for s in sources] == [False, True] and [s.first_id for s in sources] == [0, 3]
    assert check_source(Both(), "dataset()", "", guard)
