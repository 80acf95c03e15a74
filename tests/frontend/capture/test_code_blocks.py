"""Tries of parts of forward as blocks end after a time limit, and where no part can help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.frontend.capture import code_blocks
from secc.frontend.capture.code_blocks import PartTries
from secc.frontend.capture.control_flow_paths import ObservedRecording, find_first_difference
from secc.runtime.model.nested_batch import flatten_batch
from secc.runtime.model.outlined_forward import OutlinedStatements, outline_statements
from secc.runtime.model.user_file import load_model_file
from secc.runtime.recorder import Recorder, Recording
from secc.runtime.recorder.outline import recorded_glue

MODELS = Path(__file__).parents[2] / "models"

DRAWS_FOR_SOME_SAMPLES = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x, y):
        total = 0.0
        for i, (scores, target) in enumerate(zip(self.body(x), y)):
            noise = torch.rand(4) if i else torch.zeros(4)
            order = (scores + noise).argsort().tolist()
            total = total + (scores[order] - target).square().sum()
        return total / len(x)


def model():
    return Model()


def dataset():
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=g), "y": torch.randn(4, generator=g)} for _ in range(24)]
"""


READS_A_LIST = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x, curves):
        scores = self.body(x)
        loss = sum((own - curve.sin()).square().sum() for own, curve in zip(scores, curves))
        best = scores.argmax(1)
        spread = scores.var(1)
        last = scores[:, -1]
        return {"loss": loss, "rest": (best, spread, last)}


def model():
    return Model()


def dataset():
    return []
"""


def test_tries_end_after_the_time_limit_and_say_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_blocks, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(code_blocks, "_MAX_CAPTURES", 0.0)
    with pytest.raises(UserError) as refused:
        compile_model(MODELS / "learned_forces.py", CompileOptions(global_batch=12))
    assert "parts of forward were tried as one block for 0 s of processor time, and " in refused.value.message
    assert refused.value.where and refused.value.remedy


def test_the_first_part_has_more_time_than_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(code_blocks.time, "process_time", lambda: now[0])
    tries = PartTries()
    tries.start(UserError("a", "model.py:3"))
    now[0] = 200.0
    tries.check()
    tries.start(UserError("of the first part", "model.py:3"))
    with pytest.raises(code_blocks.TryTimeEnded, match="60 s"):
        tries.check()


def test_draws_that_no_block_mends_are_reported_without_further_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[str]()
    outline = code_blocks.add_function_block
    monkeypatch.setattr(
        code_blocks, "add_function_block", lambda *args: tried.append(args[1]) or outline(*args)
    )
    (tmp_path / "draws.py").write_text(DRAWS_FOR_SOME_SAMPLES)
    with pytest.raises(UserError, match="draws random numbers in a loop") as refused:
        compile_model(tmp_path / "draws.py", CompileOptions(global_batch=12))
    assert refused.value.where == "draws.py:14"
    assert len(tried) == 1


def test_a_list_with_entries_that_are_worked_on_one_by_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(READS_A_LIST)
    recorder = Recorder(load_model_file(tmp_path / "reader.py").build_model(), ["body"])
    batches = [{"x": torch.zeros(n, 4), "curves": [torch.zeros(4)] * n} for n in (2, 3)]
    seen = [recorder.record(flatten_batch(b, lists={"curves": 0})) for b in batches]
    found = find_first_difference([[ObservedRecording(s, {"B": len(s.graph.nodes)})] for s in seen])
    assert found is not None and found.message.endswith("of the list curves are worked on one by one")
    assert (found.where, found.argument) == ("reader.py:13", "curves")


def test_arguments_whose_glue_is_recorded_again_are_named_in_words() -> None:
    graphs = fx.Graph(), fx.Graph()
    for graph, argument in zip(graphs, ("corners", "meta"), strict=True):
        node = graph.call_function(recorded_glue, (f"Loss:{argument}",))
        node.meta["where"] = "model.py:3"
    recordings = [[ObservedRecording(Recording(g, {}, {}), {"B": 2})] for g in graphs]
    found = find_first_difference(recordings)
    assert found is not None and "(it was corners of Loss, meta of Loss)" in found.to_error().message


def test_statements_that_read_a_list_are_tried_first(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(READS_A_LIST)
    reader = load_model_file(tmp_path / "reader.py").build_model()
    ranges = list(
        code_blocks.ranges_around(reader, "", "other.py", 3, "", "curves", [], lambda returns: True)
    )
    assert str(ranges[0][0]) == ":Model.forward#1-1@"
    assert all(chosen.first <= 1 <= chosen.last for chosen, _ in ranges)


def test_other_samples_are_not_tried_again_for_the_same_error() -> None:
    tries = PartTries()
    first, reported = UserError("a", "model.py:3"), UserError("b", "model.py:4")
    tries.start(first)
    tries.end(reported)
    tries.start(UserError("other place", "model.py:9"))
    tries.end(reported)
    with pytest.raises(UserError) as known:
        tries.start(UserError("a, with other sizes", "model.py:3"))
    assert known.value is reported


def test_few_statements_of_a_long_forward_are_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 statements before the line that fails and 12 behind it there are 169 ranges around it."""
    text = DRAWS_FOR_SOME_SAMPLES.replace("torch.rand(4) if i else torch.zeros(4)", "torch.zeros(4)")
    more = "\n".join("        x = x + torch.tanh(x)" for _ in range(12))
    text = text.replace("        total = 0.0", f"{more}\n        total = 0.0")
    behind = "\n".join("        total = total * 1.0" for _ in range(12))
    (tmp_path / "long.py").write_text(text.replace("        return total", f"{behind}\n        return total"))
    taken = list[tuple[int, int]]()

    def note_range(*args: Any) -> OutlinedStatements:
        taken.append(args[2:])
        return outline_statements(*args)

    monkeypatch.setattr(code_blocks, "outline_statements", note_range)
    with pytest.raises(UserError, match="reduces its samples"):
        compile_model(tmp_path / "long.py", CompileOptions(cluster="local:2", global_batch=8))
    assert 0 < len(taken) <= 30
