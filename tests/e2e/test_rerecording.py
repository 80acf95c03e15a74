"""Micro-batches on branches not seen during capture are re-recorded, for each way of reading a value, and
compute what plain PyTorch computes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.training.eager_reference import compare_results, run_eager
from secc.runtime.training.one_rank_plan import OneRankPlan
from tests.e2e.harness import (
    compile_and_write,
    find_differences,
    read_metrics,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tests.runtime.rerecording import reader_model

MODELS = Path(__file__).parent.parent / "models"
RARE = 777  # an index that no survey of this dataset draws
UNDRAWN = 38  # another one, in an early global batch
SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.decoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.head = nn.Linear(8, 5)

    def forward(self, x, flag, y):
        h = self.encoder(x)
        {read}
        {branch}
        return F.cross_entropy(self.head(self.decoder(h)), y)


def model():
    return Reader()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        flag = torch.tensor(5 if i == 777 else i % 3)
        return dict(x=torch.randn(8, generator=g), flag=flag, y=torch.randint(5, (), generator=g))


def dataset():
    return Data()
"""
BRANCH = "h = torch.where((flag == 5)[:, None], h.tanh(), h) if {} else h"
READS = {
    "item": "rare = (flag == 5).sum().item()",
    "bool": "rare = bool((flag == 5).any())",
    "tolist": "rare = 5 in flag.tolist() or min(flag.tolist()) < 0",
    "numpy": "rare = 5 in flag.numpy()",
    "nonzero": "rare = len((flag == 5).nonzero())",
    "mask index": "rare = flag[flag == 5].numel()",
}


def compiled(folder: Path, read: str, branch: str = BRANCH.format("rare")) -> CompiledPlan:
    path = folder / "reader.py"
    path.write_text(SOURCE.replace("{read}", read).replace("{branch}", branch))
    return compile_model(
        path,
        CompileOptions(cluster="local:2", global_batch=4, sections=("front=encoder", "back=decoder+head")),
    )


def rank_of(made: CompiledPlan, folder: Path) -> OneRankPlan:
    made.write_sections(folder / "plan")
    assert made.model is not None
    return OneRankPlan(made.plan, folder / "plan", made.user, made.model)


def test_lists_of_one_sample_and_gradients_without_digits_are_exact() -> None:
    """A sample alone takes all rows of its batch; where float32 has no digits, float64 is compared."""
    plan = check_exactness(
        compile_model(MODELS / "click_lists.py", CompileOptions(global_batch=12)), required=True
    ).plan
    assert plan.recorded and not any(s.whole_batch for s in plan.sections)


def test_a_block_that_runs_for_its_shapes_is_compared_in_float64(tmp_path: Path) -> None:
    """Glue is recorded in float32, so its batch has float32, too, while all else computes in float64."""
    made = compile_model(MODELS / "nested_sets.py", CompileOptions(global_batch=12))
    rank, samples = rank_of(made, tmp_path), [made.user.dataset()[i] for i in range(12)]
    reference = rank.run_reference(samples)
    assert made.plan.recorded and reference.result is not None
    far = dataclasses.replace(reference.result, loss=2 * reference.result.loss)
    assert rank.compare_step(samples, 1, dataclasses.replace(reference, result=far)).is_exact


@pytest.mark.parametrize("kind", READS)
def test_a_branch_not_seen_during_capture_is_rerecorded(tmp_path: Path, kind: str) -> None:
    made = compiled(tmp_path, READS[kind])
    rank = rank_of(made, tmp_path)
    assert made.model is not None and [s.name for s in made.plan.sections] == ["front", "back"]
    for indices in ([1, 2, 3, 4], [1, RARE, 3, 4]):
        samples = [made.user.load_sample(i) for i in indices]
        difference = compare_results(
            rank.run_step(samples), run_eager(made.model, made.user.collate(samples))
        )
        assert difference.is_exact, (indices, difference)
    branches = torch.tensor([float(s["flag"] == 5) for s in samples])
    assert branches.sum() == 1


@pytest.mark.parametrize("number", ["-float('inf')", "torch.finfo(torch.float32).min"])
def test_plans_keep_infinite_and_largest_numbers_of_recorded_losses(tmp_path: Path, number: str) -> None:
    path = tmp_path / "reader.py"
    source = SOURCE.replace("{read}", READS["bool"]).replace("{branch}", BRANCH.format("rare"))
    masked = f"self.head(self.decoder(h)).masked_fill((flag == 7)[:, None], {number})"
    path.write_text(source.replace("self.head(self.decoder(h))", masked))
    made = compile_and_write(path, tmp_path / "plan", cluster="local:2", global_batch=4)
    nodes = [dict(n) for case in load_plan(tmp_path / "plan").recorded for n in case.nodes]
    assert {"float": str(eval(number, {"torch": torch}))} in [a for n in nodes for a in n.get("args", ())]
    rank = rank_of(made, tmp_path)
    samples = [made.user.load_sample(i) for i in (1, RARE, 3, 4)]
    assert made.model is not None
    expected = run_eager(made.model, made.user.collate(samples))
    assert compare_results(rank.run_step(samples), expected).is_exact


def test_a_sample_alone_infers_a_size_of_a_loss_that_others_compute(tmp_path: Path) -> None:
    """`scores[:, :4]` of one sample is contiguous, so its `reshape(-1)` is recorded without a copy, as -1."""
    path = tmp_path / "inferred.py"
    source = SOURCE.replace("{read}", READS["bool"]).replace("{branch}", BRANCH.format("rare"))
    path.write_text(
        source.replace("return F.cross_entropy(", "scores = (").replace(
            "(h)), y)", "(h)))\n        return scores[:, :4].reshape(-1).square().mean()"
        )
    )
    made = compile_model(path, CompileOptions(global_batch=4, set=("model.micro_batch=1",)))
    rank = rank_of(made, tmp_path)
    samples = [made.user.load_sample(i) for i in (1, RARE, 3, 4)]
    assert made.model is not None
    expected = run_eager(made.model, made.user.collate(samples))
    assert compare_results(rank.run_step(samples), expected).is_exact


@pytest.mark.gloo
def test_ranks_train_on_a_branch_not_seen_during_capture(tmp_path: Path) -> None:
    """The third global batch holds the sample; one rank records it while the step before trains."""
    source = (
        SOURCE.replace("{read}", READS["bool"])
        .replace("{branch}", BRANCH.format("rare"))
        .replace("777", str(UNDRAWN))
    )
    (tmp_path / "reader.py").write_text(source)
    model = write_recording_model("reader", tmp_path, tmp_path)
    options: dict[str, Any] = {
        "cluster": "local:2",
        "global_batch": 16,
        "strategy": "apart",
        "sections": ("front=encoder", "back=decoder+head"),
    }
    made = compile_and_write(model, tmp_path / "plan", **options)
    assert made.plan.world_size == 2 and [case.spare for case in made.plan.recorded] == [True]
    assert UNDRAWN not in [d.index for d in made.survey.drawn_samples]
    trace = ("--trace", str(tmp_path / "trace.json"))
    found = train_distributed(tmp_path / "plan", 2, 3, tmp_path / "run", "--workers", "1", *trace)
    assert list(find_differences(found, train_in_one_process(model, 16, 3, tmp_path / "plain"))) == []
    assert_traced(json.loads((tmp_path / "trace.json").read_text())["traceEvents"], UNDRAWN)


@pytest.mark.gloo
def test_ranks_train_with_several_recording_processes(tmp_path: Path) -> None:
    """A section of few inputs, whose recordings end early and are often known, and one that wants the whole
    forward."""
    (tmp_path / "rows_reader.py").write_text(reader_model.SOURCE)
    model = write_recording_model("rows_reader", tmp_path, tmp_path)
    options: dict[str, Any] = {
        "cluster": "local:2",
        "global_batch": 8,
        "strategy": "apart",
        "sections": ("front=body", "back=decoder"),
    }
    made = compile_and_write(model, tmp_path / "plan", **options)
    assert [case.spare for case in made.plan.recorded] == [False]
    found = train_distributed(tmp_path / "plan", 2, 4, tmp_path / "run", "--workers", "1", "--recorders", "2")
    assert list(find_differences(found, train_in_one_process(model, 8, 4, tmp_path / "plain"))) == []
    steps = read_metrics(tmp_path / "run")
    micros = steps[0]["recorded"] + steps[0]["kept"]
    assert micros >= 2 and all(m["recorded"] + m["kept"] == micros for m in steps)
    assert all(m["exposed_s"] >= 0 for m in steps) and steps[0]["recording_s"] > 0


@pytest.mark.slow
@pytest.mark.gloo
def test_images_that_a_mask_picks_train_as_plain_pytorch(tmp_path: Path) -> None:
    """Most captures have five images by chance; the plan must hold for any number of them."""
    model = write_recording_model("idefics3_rows", tmp_path, MODELS)
    made = compile_and_write(model, tmp_path / "plan", cluster="local:3", global_batch=12)
    assert [case.spare for case in made.plan.recorded] == [False]
    found = train_distributed(tmp_path / "plan", made.plan.world_size, 3, tmp_path / "run", "--workers", "1")
    assert list(find_differences(found, train_in_one_process(model, 12, 3, tmp_path / "plain"))) == []


def assert_traced(events: list[dict[str, Any]], sample: int) -> None:
    """The sample's recording is on a track of its own, and over when the rank has its micro-batch."""
    mine = [e for e in events if sample in e.get("args", {}).get("samples", ())]
    recordings = [e for e in mine if e["args"]["kind"] == "RECORD"]
    assert recordings and all(e["tid"] == 1 for e in recordings)
    for e in recordings:
        key = e["pid"], e["args"]["section"], e["args"]["microbatch"]
        (load,) = [
            x
            for x in mine
            if x["args"]["kind"] == "LOAD"
            and (x["pid"], x["args"]["section"], x["args"]["microbatch"]) == key
        ]
        assert load["tid"] == 0 and e["ts"] + e["dur"] <= load["ts"] + load["dur"]
    kinds = {e["args"]["kind"] for e in events if "args" in e and "kind" in e["args"]}
    assert {"F", "B", "LOAD", "RECORD"} <= kinds
