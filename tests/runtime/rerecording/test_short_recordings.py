"""Recordings leave out what is not needed: blocks with known sizes do not run, a recording ends with the
last block of interest, and micro-batches with equal deciding inputs are recorded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from secc.driver.compile import CompiledPlan
from secc.runtime.errors import UserError
from secc.runtime.recorder import Recorder, Recording
from secc.runtime.recorder.glue_program import write_programs
from secc.runtime.recorder.outline import Outline
from secc.runtime.rerecording.outline_case import RecordedCase
from secc.runtime.rerecording.recording_cache import RecordingCache, RecordingDependencies
from secc.runtime.rerecording.rerecorder import RecordedGlue
from secc.runtime.sections.base import RECORDING_KEY
from tests.runtime.rerecording import reader_model

Batch = dict[str, Any]
CALLS: list[str] = []  # of blocks whose inside ran


@dataclass
class Seen:
    """What a block returns: a tensor that glue uses, one that it may look at, and perhaps a number."""

    wanted: torch.Tensor
    other: torch.Tensor
    count: int | None = None


class Body(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.map, self.counts = nn.Linear(4, 4), counts

    def forward(self, x: torch.Tensor) -> Seen:
        CALLS.append("body")
        h = self.map(x)
        return Seen(h, h[1:], len(h) if self.counts else None)


class Looker(nn.Module):
    """Embeds words, then reads rows: `looks` at a tensor that no rule knows, and may call its head in vain
    before."""

    def __init__(self, looks: bool = False, counts: bool = False, vain: bool = False) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(9, 4), Body(counts), nn.Linear(4, 1)
        self.looks, self.vain = looks, vain

    def forward(self, ids: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        words = self.words(ids)
        seen = self.body(x * 2)
        h = seen.wanted[: rows.tolist()[0]]
        if self.looks:
            h = h * seen.other.shape[0]
        if seen.count is not None:
            h = h + seen.count
        if self.vain:
            self.head(h)
        h = self.head(h)
        return (h.sum() + words.sum()) * 3


class Adder(Looker):
    """Adds what a block returns to what it was given, so that both need as many rows."""

    def forward(self, ids: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).wanted + x).sum() + self.words(ids).sum() * rows[0]


def batch(rows: int, words: int = 3) -> Batch:
    g = torch.Generator().manual_seed(rows)
    return {
        "ids": torch.arange(words),
        "x": torch.randn(rows, 4, generator=g),
        "rows": torch.tensor([rows - 1]),
    }


def recorder(model: nn.Module) -> Recorder:
    """One that has recorded a micro-batch of other sizes."""
    CALLS.clear()
    found = Recorder(model, ["words", "body", "head"])
    found.record(batch(7))
    return found


def rules(rows: int) -> dict[str, dict[str, tuple[int, ...]]]:
    return {"body": {".wanted": (rows, 4)}, "words": {"": (3, 4)}, "head": {"": (rows - 1, 1)}}


def text(recording: Recording) -> list[Any]:
    """All of a graph that a rank could tell."""
    return [(n.op, str(n.target), str(n.args), n.meta.get("shape")) for n in recording.graph.nodes]


# -- blocks that do not run ------------------------------------------------------------------------------


def test_a_block_with_known_sizes_does_not_run_and_the_recording_is_the_same() -> None:
    found = recorder(Looker())
    short = found.record(batch(5), rules(5))
    assert CALLS == ["body"] and text(short) == text(found.record(batch(5)))
    assert CALLS == ["body", "body"] and not short.ends_early and not short.has_idle_calls


@pytest.mark.parametrize("model", [Looker(looks=True), Looker(counts=True)], ids=["looked at", "a number"])
def test_a_block_runs_if_more_than_its_known_sizes_counts(model: nn.Module) -> None:
    found = recorder(model)
    short = found.record(batch(5), rules(5))
    assert CALLS == ["body", "body"]
    assert text(short) == text(Recorder(model, ["words", "body", "head"]).record(batch(5)))


def test_shapes_of_another_path_make_no_error_of_the_forward() -> None:
    """A batch that takes a path which the plan lacks is refused for that, not for shapes that never were."""
    found = recorder(Adder())
    recording = found.record(batch(5), rules(6))
    assert text(recording) == text(found.record(batch(5)))


def test_a_result_of_another_shape_than_recorded_is_rejected() -> None:
    given = batch(5)
    made, _ = write_programs(Outline.of_recording(recorder(Looker()).record(given, rules(5))), given)
    glue = RecordedGlue("c0", made, {"head:0": ["result body .wanted"]}, None)
    section: Any = type("Section", (), {"device": torch.device("cpu")})()
    assert glue.run(section, given, "head:0", [torch.zeros(5, 4)]).shape == (4, 4)
    with pytest.raises(
        UserError, match=r"block body .* returns a tensor of shape \(6, 4\), but the plan expects \(5, 4\)"
    ):
        glue.run(section, given, "head:0", [torch.zeros(6, 4)])


# -- recordings that end ---------------------------------------------------------------------------------


def test_a_recording_ends_with_the_requested_call() -> None:
    found, given = recorder(Looker()), batch(5)
    whole, short = (Outline.of_recording(r) for r in (found.record(given), found.record(given, until=2)))
    assert short.recording.ends_early and list(short.call_labels.values()) == ["words", "body", "head"]
    assert write_programs(short, given, ["head:0"])[0] == write_programs(whole, given, ["head:0"])[0]
    assert whole.recording.shape_deciding_inputs == {
        "ids",
        "x",
        "rows",
    } and short.recording.shape_deciding_inputs == {"x", "rows"}
    assert list(Outline.of_recording(found.record(given, until=1)).call_labels.values()) == ["words", "body"]


def test_a_short_recording_has_all_known_result_shapes() -> None:
    found, given = recorder(Looker()), batch(5)
    known = Outline.of_recording(found.record(given, until=1)).known_shapes()
    assert known["result words "] == (3, 4)
    guessed = Outline.of_recording(found.record(given, {"words": {}}, until=1)).known_shapes()
    assert "result words " not in guessed and guessed["body:0"] == (5, 4)


def test_a_call_with_an_unused_result_is_reported() -> None:
    assert recorder(Looker(vain=True)).record(batch(5)).has_idle_calls


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CompiledPlan:
    return reader_model.compiled(tmp_path_factory.mktemp("reader"))


def collated(made: CompiledPlan, *indices: int) -> Batch:
    return made.user.collate([made.user.load_sample(i) for i in indices])


def test_row_counts_come_from_a_short_recording_or_a_whole_one_if_it_ended_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = reader_model.SOURCE.replace("h[start : start + n].mean(0)", "h[start : start + n // 2 + 1]")
    source = source.replace(
        "torch.stack(rows) * self.scale + y[:, None]", "torch.cat(rows) * self.scale + y.sum() * 0"
    )
    made = reader_model.compiled(tmp_path, source)
    found = reader_model.rerecorder(made, tmp_path)
    rows = [found.add_row_counts(collated(made, i))["decoder:0"].shape for i in (2, 3, 4, 2, 7)]
    assert rows == [(2, 6), (3, 6), (3, 6), (2, 6), (2, 6)]
    monkeypatch.setattr(RecordedCase, "last_call_number", lambda *_: 0)
    early = reader_model.rerecorder(made, tmp_path)
    assert [early.add_row_counts(collated(made, i))["decoder:0"].shape for i in (2, 3, 4, 2, 7)] == rows


def test_short_and_whole_recordings_give_a_section_the_same(made: CompiledPlan, tmp_path: Path) -> None:
    front, whole = (
        reader_model.rerecorder(made, tmp_path, only="front"),
        reader_model.rerecorder(made, tmp_path),
    )
    for some in ((1, 2), (4, 9), (3, 3), (7, 12)):
        given = collated(made, *some)
        found, expected = (glue(r.add_recorded_glue(given, 2)) for r in (front, whole))
        assert (
            found.programs == expected.programs
            and found.planned_sources == expected.planned_sources
            and found.case == expected.case
        )


def glue(found: Batch) -> RecordedGlue:
    return found[RECORDING_KEY]


# -- what is kept ----------------------------------------------------------------------------------------

SAME: list[tuple[str, Callable[[Batch], Batch]]] = [
    ("values that decided nothing", lambda b: b | {"x": b["x"] + 1}),
    ("an input that only blocks got", lambda b: b | {"ids": torch.arange(8)}),
]
OTHER: list[tuple[str, Callable[[Batch], Batch]]] = [
    ("values that decided", lambda b: b | {"rows": b["rows"] - 1}),
    ("a shape that decided", lambda b: b | {"x": b["x"][:-1]}),
    ("a dtype", lambda b: b | {"ids": b["ids"].int()}),
    ("a number of dims", lambda b: b | {"ids": b["ids"][None]}),
    ("a number of Python's", lambda b: b | {"limit": 4}),
    ("an array", lambda b: b | {"table": numpy.arange(5000) + (numpy.arange(5000) == 2500)}),
    ("how many tensors there are", lambda b: b | {"images": [torch.zeros(2)] * 2}),
    ("a shape in a list", lambda b: b | {"images": [torch.zeros(3)]}),
    ("a further input", lambda b: b | {"more": torch.zeros(1)}),
]


@pytest.mark.parametrize("change", [c for _, c in (*SAME, *OTHER)], ids=[name for name, _ in (*SAME, *OTHER)])
def test_cache_keys_depend_on_deciding_inputs_only(change: Callable[[Batch], Batch]) -> None:
    kept, decides = (
        RecordingCache[str](),
        RecordingDependencies(frozenset({"x", "rows"}), frozenset({"rows"})),
    )
    given = batch(5) | {"limit": 3, "table": numpy.arange(5000), "images": [torch.zeros(2)]}
    kept.put("kind", given, "found", decides, 0)
    same = change in [c for _, c in SAME]
    assert (
        kept.get("kind", change(given)) == ("found" if same else None)
        and kept.get("another kind", given) is None
    )


def test_a_newly_deciding_input_clears_the_cache() -> None:
    kept, first, later = (
        RecordingCache[str](),
        RecordingDependencies(frozenset({"x"})),
        RecordingDependencies(frozenset({"x", "rows"}), frozenset({"rows"})),
    )
    kept.put("kind", batch(5), "found", first, 0)
    kept.put("kind", batch(6), "other", later, 0)
    assert kept.get("kind", batch(5)) is None and kept.get("kind", batch(6)) == "other"


def test_a_section_that_needs_fewer_inputs_records_less_often(made: CompiledPlan, tmp_path: Path) -> None:
    both = reader_model.rerecorder(made, tmp_path)  # of a rank that has the other section too
    for i in (*range(10), *range(10)):
        both.add_recorded_glue(collated(made, i), 1, "front")
    assert both.recording_count <= 6  # a whole one, and one for each number of rows
    given = collated(made, 3)
    assert (
        glue(both.add_recorded_glue(given, 1, "front")).recorded_during is None
        and glue(both.add_recorded_glue(given, 1, "back")).recorded_during is not None
    )
