"""Glue that depends on values: the outline of a recording, the programs cut out of it, the comparison with
a plan, and the cache."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secc.driver.compile import CompiledPlan
from secc.frontend.capture.control_flow_paths import graph_signature
from secc.runtime.errors import UserError
from secc.runtime.plan.batch_sizes import read_symbol_sizes
from secc.runtime.recorder import Recorder
from secc.runtime.recorder.fold_joins import fold_joins
from secc.runtime.recorder.glue_program import write_programs
from secc.runtime.recorder.match_outline import find_outline_mismatch
from secc.runtime.recorder.outline import Outline
from secc.runtime.rerecording.rerecorder import RecordedGlue
from secc.runtime.sections.base import RECORDING_KEY
from tests.runtime.rerecording import reader_model

Batch = dict[str, torch.Tensor]
SOURCES = {"body:0": ["input x"], "decoder:0": ["input y", "result body ", "state scale"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CompiledPlan:
    return reader_model.compiled(tmp_path_factory.mktemp("reader"))


def batch(made: CompiledPlan, *indices: int) -> Batch:
    return made.user.collate([made.user.load_sample(i) for i in indices])


def outline(model: nn.Module, batch: Mapping[str, Any]) -> Outline:
    return Outline.of_recording(fold_joins(Recorder(model, ["body", "decoder"]).record(batch)))


# -- outlines --------------------------------------------------------------------------------------------


def test_an_outline_has_the_blocks_and_the_sources_of_their_arguments(made: CompiledPlan) -> None:
    found = outline(made.user.build_model(), batch(made, 1, 2))
    assert list(found.call_labels.values()) == ["body", "decoder"]
    assert found.sources_by_label() == SOURCES
    assert found.known_shapes()["result body "] == (5, 6)


def test_outlines_are_equal_although_recordings_differ(made: CompiledPlan) -> None:
    model = made.user.build_model()
    few, many = (outline(model, batch(made, *some)) for some in ((1, 2), (1, 2, 3)))
    sources = few.sources_by_label()
    assert graph_signature(few.recording.graph) != graph_signature(many.recording.graph)
    assert graph_signature(few.make_skeleton(sources).graph) == graph_signature(
        many.make_skeleton(sources).graph
    )


def test_a_block_called_twice_has_two_labels() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.decoder = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(self.body(self.body(x) + 1)).sum()

    found = outline(Twice(), {"x": torch.randn(2, 4)})
    assert list(found.call_labels.values()) == ["body", "body#1", "decoder"]
    assert found.sources_by_label()["body#1:0"] == ["result body "] and found.sources_by_label()[
        "decoder:0"
    ] == ["result body#1 "]


# -- programs --------------------------------------------------------------------------------------------


class Host:
    """A section on the CPU that draws as torch does."""

    device = torch.device("cpu")

    def draw(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def function(self, name: str) -> Callable[..., Any]:
        raise AssertionError(name)


def test_a_program_computes_the_glue_and_its_gradients(made: CompiledPlan) -> None:
    model, given = made.user.build_model(), batch(made, 1, 4, 2)
    found, _ = write_programs(outline(model, given), given)
    program = pickle.loads(pickle.dumps(found["decoder:0"]))
    h = model.body(given["x"])
    sources = {"input y": given["y"], "result body ": h, "state scale": model.scale}
    seen: list[torch.Tensor] = []
    model.decoder.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    loss = model(**given)
    z = program.run(sources.__getitem__, Host())
    assert torch.equal(z, seen[0])
    again, parameters = model.decoder(z).square().sum(), list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(again, parameters), torch.autograd.grad(loss, parameters))


def test_integers_from_inputs_are_stored_in_programs_and_floats_are_not(made: CompiledPlan) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.decoder = nn.Embedding(50, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            places = torch.cat([torch.arange(n) for n in counts.tolist()])
            return self.decoder(self.body(places) * (x * 2)).sum()

    given = {"x": torch.randn(5, 4), "counts": torch.tensor([2, 3])}
    found, read = write_programs(outline(Positions(), given), given)
    assert [v.tolist() for v in found["body:0"].values] == [[0, 1, 0, 1, 2]] and found["body:0"].steps == []
    assert found["decoder:0"].values == [] and found["decoder:0"].sources == ["input x", "result body "]
    assert [s.target for s in found["decoder:0"].steps] == [
        "aten.mul.Tensor",
        "aten.mul.Tensor",
    ] and read <= {"counts"}


# -- comparison with the plan ----------------------------------------------------------------------------


def problem(made: CompiledPlan, model: nn.Module, given: Batch, **sizes: int) -> UserError | None:
    """What differs from the plan, for a micro-batch that is said to have other sizes than its own."""
    (case,) = made.plan.recorded
    known = read_symbol_sizes(given, made.plan.symbols, len(given["y"])) | sizes
    return find_outline_mismatch(outline(model, given).make_skeleton(SOURCES), case.nodes, known)


def test_a_micro_batch_on_the_planned_path_matches(made: CompiledPlan) -> None:
    for some in ((0,), (1, 2), (4, 9, 14, 3, 8)):
        assert problem(made, made.user.build_model(), batch(made, *some)) is None


def test_another_path_after_the_glue_is_reported_with_its_line(made: CompiledPlan) -> None:
    model = made.user.build_model()
    model.twice = True
    found = problem(made, model, batch(made, 1, 2))
    assert found is not None and "the op tanh.default differs from every capture" in found.message
    assert found.where == "reader.py:21" and "--stats-samples" in found.remedy


def test_a_tensor_of_another_size_is_a_mismatch(made: CompiledPlan) -> None:
    found = problem(made, made.user.build_model(), batch(made, 1, 2), B=3)
    assert found is not None and "the argument decoder:0 differs from every capture" in found.message


# -- the cache -------------------------------------------------------------------------------------------


def glue(found: Mapping[str, Any]) -> RecordedGlue:
    return found[RECORDING_KEY]


def test_inputs_that_decide_nothing_share_a_recording(made: CompiledPlan, tmp_path: Path) -> None:
    recorder, given = reader_model.rerecorder(made, tmp_path), batch(made, 1, 2)
    first = glue(recorder.add_recorded_glue(given, 2))
    assert (
        first.recorded_during is not None
        and 0 < first.recorded_during.seconds < 60
        and first.case == made.plan.recorded[0].name
    )
    again = glue(recorder.add_recorded_glue(given | {"x": given["x"] * 2, "y": given["y"] + 1}, 2))
    assert again.recorded_during is None and again.programs is first.programs


def test_other_values_of_deciding_inputs_are_recorded_again(made: CompiledPlan, tmp_path: Path) -> None:
    recorder = reader_model.rerecorder(made, tmp_path)
    some, other = batch(made, 1, 3), batch(made, 3, 1)  # 2 and 4 rows, 4 and 2 rows: alike but for the counts
    first, second = (glue(recorder.add_recorded_glue(b, 2)) for b in (some, other))
    assert (
        second.recorded_during is not None
        and first.programs["decoder:0"].steps != second.programs["decoder:0"].steps
    )


def test_a_micro_batch_on_another_path_is_rejected_before_its_step(
    made: CompiledPlan, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="takes a path that the plan does not have"):
        reader_model.rerecorder(made, tmp_path, twice=True).add_recorded_glue(batch(made, 1, 2), 2)
