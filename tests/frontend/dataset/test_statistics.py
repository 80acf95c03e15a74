"""Shares of patterns and mean sizes of samples: drawn, declared by sizes(i), or given by a file."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from secc import process_map
from secc.cli import main
from secc.driver.compile import compile_model, load_and_capture
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.frontend.dataset import statistics
from secc.frontend.dataset.input_symbols import describe_inputs
from secc.frontend.dataset.sampling import survey_dataset
from secc.runtime.model.user_file import UserModel, load_model_file

MODEL = """
import torch
from torch import nn

LOADED = []

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.text, self.head = nn.Linear(5, 8), nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, input_ids, labels, rows=None):
        x = self.text(input_ids)
        if rows is not None:
            x = x.masked_scatter((input_ids == 1)[..., None], self.seen(rows))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        LOADED.append(i)
        BROKEN
        rows = (1 + i % 3) * (RARE)
        ids = torch.cat([torch.ones(rows, dtype=torch.long), torch.arange(2, 6 + i % 7)])
        sample = {"input_ids": ids, "labels": ids}
        return sample | ({"rows": torch.randn(rows, 5)} if rows else {})

def model():
    return Model()

def dataset():
    return Data()
"""
SIZES = """
def sizes(i):
    rows = (1 + i % 3) * (RARE)
    return {"input_ids": 4 + i % 7 + rows} | ({"rows": rows} if rows else {})
"""


def model_file(folder: Path, rare: str = "i % 2", broken: str = "pass", sizes: bool = False) -> Path:
    (folder / "model.py").write_text((MODEL + SIZES * sizes).replace("RARE", rare).replace("BROKEN", broken))
    return folder / "model.py"


def stats_of(path: Path, *options: str) -> dict[str, Any]:
    with pytest.raises(SystemExit, match="0"):
        main(["stats", str(path), "-o", str(path.parent / "stats.json"), "--json", *options])
    return json.loads((path.parent / "stats.json").read_text())


def shares(compiled: Any) -> dict[str, str]:
    text = compiled.dumps[0][1]
    return {
        line.split("when [")[1].split("]")[0]: line.split('share "')[1].split('"')[0]
        for line in text.splitlines()
        if "sec.pattern" in line
    }


def test_a_survey_counts_what_it_draws(tmp_path: Path) -> None:
    found = stats_of(model_file(tmp_path), "--stats-samples", "32")
    assert found["samples"] == 32 and [p["when"] for p in found["patterns"]] in (
        [[], ["rows"]],
        [["rows"], []],
    )
    assert found["symbols"]["S"] == "width of input_ids, dim 1"
    assert {p["sizes"]["n_rows"] > 0 for p in found["patterns"] if p["when"]} == {True}


def test_declared_sizes_cover_the_whole_dataset_and_find_rare_patterns(tmp_path: Path) -> None:
    path = model_file(tmp_path, rare="i % 250 == 77", sizes=True)
    assert len(load_model_file(path).dataset()) == 1000
    found = {tuple(p["when"]): p for p in stats_of(path)["patterns"]}
    assert found["rows",]["share"] == 0.004 and found["rows",]["sizes"]["n_rows"] == pytest.approx(
        sum(1 + i % 3 for i in (77, 327, 577, 827)) / 4
    )
    user = load_model_file(path)
    drawn = survey_dataset(user)
    assert {77, 327, 577, 827} <= {d.index for d in drawn.drawn_samples} and len(drawn.drawn_samples) == 64
    assert len(user.module.LOADED) == 64 + 3 and len(set(user.module.LOADED)) == 64  # three again


def test_the_largest_samples_are_searched_in_the_whole_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample 501 has 60 rows; means come from every tenth sample. Where sizes(i) is slow, nothing is
    searched."""
    monkeypatch.setattr(statistics, "MAX_DECLARED_SAMPLES", 100)
    user = load_model_file(model_file(tmp_path, rare="1 if i != 501 else 60", sizes=True))
    survey = survey_dataset(user)
    inputs = statistics.apply_declared_sizes(user, survey, describe_inputs(user, survey))
    assert len(inputs.sample_sizes) == 100
    assert max(sizes["n_rows"] for sizes in inputs.sample_sizes) == 3
    assert [sizes["n_rows"] for _, sizes in inputs.largest_samples] == [60]
    monkeypatch.setattr(statistics, "SLOW_CALL_S", 0.0)
    inputs = statistics.apply_declared_sizes(user, survey, describe_inputs(user, survey))
    assert inputs.largest_samples == ()


def note_calls_of_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each call of sizes(i) adds its index; statistics are made of 100 samples."""
    calls, call = list[int](), UserModel.declared_sizes

    def note_and_call(self: UserModel, index: int) -> dict[str, Any] | None:
        calls.append(index)
        return call(self, index)

    monkeypatch.setattr(UserModel, "declared_sizes", note_and_call)
    monkeypatch.setattr(statistics, "MAX_DECLARED_SAMPLES", 100)
    return calls


def test_a_busy_machine_does_not_keep_the_largest_samples_from_being_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes run for a second in every twentieth call of sizes(i), which takes a microsecond."""
    user = load_model_file(model_file(tmp_path, rare="1 if i != 501 else 60", sizes=True))
    survey = survey_dataset(user)
    inputs = describe_inputs(user, survey)
    calls = note_calls_of_sizes(monkeypatch)
    monkeypatch.setattr(statistics.time, "perf_counter", lambda: len(calls) * 1e-6 + len(calls) // 20)
    found = statistics.apply_declared_sizes(user, survey, inputs)
    assert [sizes["n_rows"] for _, sizes in found.largest_samples] == [60]


def test_the_largest_samples_are_searched_by_another_core_while_forward_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two cores this process makes fewer calls of sizes(i), by those of the search: one for each of the
    1,000 samples, after some that are timed."""
    calls = note_calls_of_sizes(monkeypatch)
    path, count_by_cores = model_file(tmp_path, rare="1 if i != 501 else 60", sizes=True), dict[int, int]()
    for cores in (1, 2):
        monkeypatch.setattr(process_map, "available_cores", lambda cores=cores: cores)
        calls.clear()
        *_, inputs, _, _ = load_and_capture(path, CompileOptions(), lambda _: nullcontext())
        count_by_cores[cores] = len(calls)
        assert [sizes["n_rows"] for _, sizes in inputs.largest_samples] == [60]
    assert count_by_cores[1] - count_by_cores[2] == 1000 + statistics.TIMED_CALLS


def test_sizes_that_are_wrong_are_refused_when_the_plan_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model_file(tmp_path, sizes=True)
    path.write_text(path.read_text().replace("4 + i % 7 + rows", "5 + i % 7 + rows"))
    with pytest.raises(SystemExit, match="2"):
        main(["compile", str(path), "-o", str(tmp_path / "plan")])
    assert "sizes(0) says that 'input_ids' is 5 large, but it is 4" in capsys.readouterr().err


def test_a_statistics_file_gives_the_numbers_for_allocation(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    stats = stats_of(path)
    for pattern in stats["patterns"]:
        pattern["share"] = 9 if pattern["when"] else 1
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    compiled = compile_model(path, CompileOptions(cluster="local:1", stats=tmp_path / "stats.json"))
    assert shares(compiled) == {'"rows"': "0.9", "": "0.1"}
    assert compiled.plan.checks["notes"] == ["frequency and size of samples are taken from stats.json"]


def test_a_pattern_may_have_no_share_at_all(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    stats = stats_of(path)
    stats["patterns"] = [p for p in stats["patterns"] if not p["when"]]
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    compiled = compile_model(path, CompileOptions(cluster="local:2", stats=tmp_path / "stats.json"))
    assert shares(compiled) == {"": "1"}


WRONG = [
    ("{", "not statistics of a dataset"),
    ('{"patterns": [{"when": []}]}', "lacks the key 'share'"),
    (
        '{"patterns": [{"when": ["pixels"], "share": 1, "sizes": {}}]}',
        "name 'pixels', which the model does not have",
    ),
    (
        '{"patterns": [{"when": [], "share": 1, "sizes": {"T": 1}}]}',
        "name 'T', which the model does not have",
    ),
    ('{"patterns": [{"when": [], "share": 1, "sizes": {"S": 1}}]}', "lack the size 'n_rows'"),
    ('{"patterns": [{"when": [], "share": 0, "sizes": {"S": 1, "n_rows": 0}}]}', "must not add up to 0"),
    (
        '{"patterns": [{"when": [], "share": -1, "sizes": {"S": 1, "n_rows": 0}}]}',
        "expected a number of at least 0, got -1",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_file_that_is_wrong_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = model_file(tmp_path)
    (tmp_path / "stats.json").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        compile_model(path, CompileOptions(cluster="local:1", stats=tmp_path / "stats.json"))
    assert caught.value.where.endswith("stats.json") and caught.value.remedy


def test_samples_that_do_not_load_can_be_left_out_of_a_plan(tmp_path: Path) -> None:
    path = model_file(tmp_path, broken="if i == 3: raise OSError('no such image')")
    with pytest.raises(UserError, match=r"dataset\(\)\[3\] raises OSError: no such image"):
        compile_model(path, CompileOptions(cluster="local:1"))
    notes = compile_model(path, CompileOptions(cluster="local:1", skip_bad_samples=True)).plan.checks["notes"]
    assert len(notes) == 1 and "a sample was left out: dataset()[3] raises OSError" in notes[0]


def test_a_dataset_without_a_sample_that_loads_is_refused(tmp_path: Path) -> None:
    user = load_model_file(model_file(tmp_path, broken="raise OSError('no disk')"))
    with pytest.raises(UserError, match="none of the 8 samples that were drawn loads"):
        survey_dataset(user, 8, skip_bad=True)


def test_the_global_random_state_is_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    survey_dataset(load_model_file(model_file(tmp_path)), 8)
    assert torch.equal(torch.get_rng_state(), before)
