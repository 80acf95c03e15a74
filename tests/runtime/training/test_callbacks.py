"""Callbacks of a run: on which ranks, with what, and what follows when one raises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from secc.runtime.parameters.checkpoint import load_full_state_dict
from tests.runtime.captioner_plans import APART, FIXTURE, TOGETHER, Layout, write_plan
from tests.runtime.run_processes import start_run

pytestmark = pytest.mark.gloo

CALLBACKS = """

def eval_dataset():
    return {"first": dataset(), "second": dataset()}


def _note(**values):
    import json, os
    with open(f"NOTES/{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps(values) + "\\n")


def on_step(result):
    _note(call="on_step", step=result.step, rank=result.rank, world=result.world_size, loss=result.loss,
          norm=result.grad_norm, rate=result.learning_rate, samples=result.samples, tokens=result.tokens,
          positive=result.seconds > 0, scalars=dict(result.scalars), drawn=torch.rand(()).item())


def on_save(folder):
    _note(call="on_save", folder=folder.name, complete=(folder / "checkpoint.json").exists())


def on_evaluate(result):
    _note(call="on_evaluate", name=result.name, loss=result.values["loss"], samples=result.samples)
"""
OBJECT = """
class Watch:
    def on_step(self, result):
        if result.step == 1:
            from model import _note
            _note(call="Watch.on_step", step=result.step)
"""


def run_captioner(
    tmp_path: Path, more: str, *arguments: str, layout: Layout = APART
) -> tuple[int, str, list[list[dict[str, Any]]]]:
    """Runs the captioner on two ranks with callbacks and `more` code in its model file; returns the exit
    code, what it said, and each rank's calls."""
    (tmp_path / "notes").mkdir()
    source = (FIXTURE / "model.py").read_text() + CALLBACKS.replace("NOTES", str(tmp_path / "notes")) + more
    write_plan(tmp_path / "plan", layout, source=source)
    process = start_run(
        tmp_path / "plan", "--save", str(tmp_path / "saved"), "--workers", "0", "--no-first-check", *arguments
    )
    _, said = process.communicate(timeout=120)
    files = (tmp_path / "notes" / f"{rank}.jsonl" for rank in (0, 1))
    calls = [[json.loads(line) for line in f.read_text().splitlines()] for f in files]
    return process.returncode, said, calls


def failing(name: str, condition: str) -> str:
    """Code that lets a callback raise after it has noted its call."""
    return f"""
_{name} = {name}
def {name}(result):
    import os
    _{name}(result)
    if {condition}:
        raise ValueError("the disk of plots is full")
"""


def test_callbacks_see_results_and_one_that_fails_on_one_rank_ends_the_run_saved(tmp_path: Path) -> None:
    more = failing("on_step", "result.step == 2 and os.environ['RANK'] == '1'")
    code, said, calls = run_captioner(
        tmp_path, more, "--steps", "9", "--eval-every", "2", "--save-every", "1"
    )
    assert code == 2, said
    assert said.count("the disk of plots is full") == 1 and "Traceback" not in said
    assert "on_step() raises ValueError" in said and "model.py:" in said and "what to do" in said
    assert "stopped because a callback failed after step 3 of 9 and saved to" in said
    # The other rank ends its next step, and the state after it is saved.
    assert sorted(p.name for p in (tmp_path / "saved").glob("step_*"))[-1] == "step_00000003"
    assert load_full_state_dict(tmp_path / "saved")
    first, second = ([c for c in own if c["call"] == "on_step"] for own in calls)
    assert [c["step"] for c in first] == [1, 2, 3] and [c["step"] for c in second] == [1, 2]
    drawn = [[c["drawn"] for c in own] for own in (first, second)]
    assert drawn[0][:2] == drawn[1] and len(set(drawn[0])) == 3
    metrics = [json.loads(x) for x in (tmp_path / "plan/logs/metrics.jsonl").read_text().splitlines()]
    steps = {m["step"]: m for m in metrics if "eval" not in m}
    for rank, own in enumerate((first, second)):
        for c in own:
            logged = steps[c["step"]]
            assert (c["rank"], c["world"], c["positive"]) == (rank, 2, True)
            assert (c["loss"], c["norm"], c["rate"]) == (
                logged["loss"],
                logged["grad_norm"],
                logged["learning_rate"],
            )
            assert (c["samples"], c["tokens"]) == (logged["samples"], logged["tokens"])
    evaluated = [[c for c in own if c["call"] == "on_evaluate"] for own in calls]
    assert [c["name"] for c in evaluated[0]] == ["first", "second"]
    assert evaluated[1] == []  # a rank with a failed callback calls no other
    logged = [m for m in metrics if "eval" in m]
    assert [(c["loss"], c["samples"]) for c in evaluated[0]] == [(m["loss"], m["samples"]) for m in logged]
    saves = [[c for c in own if c["call"] == "on_save"] for own in calls]
    assert [c["folder"] for c in saves[0]] == [f"step_{n:08d}" for n in (1, 2, 3)] and not saves[1]
    assert all(c["complete"] for c in saves[0])


def test_a_value_that_on_step_sets_on_one_rank_ends_the_run(tmp_path: Path) -> None:
    more = """
_model = model
def model():
    global BUILT
    BUILT = _model()
    return BUILT
note_step = on_step
def on_step(result):
    note_step(result)
    if result.rank == 1:
        next(m for m in BUILT.modules() if isinstance(m, torch.nn.LayerNorm)).eps = 0.5
"""
    code, said, _ = run_captioner(tmp_path, more, "--steps", "3")
    assert code == 2, said
    assert "which forward reads, on rank 1, but not to the same value on all ranks" in said
    assert ".eps" in said and "if result.rank == 0" in said and "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "condition", "last"),
    [
        ("on_save", "result.name == 'step_00000002'", "step_00000003"),
        ("on_evaluate", "result.name == 'second'", "step_00000003"),
        ("on_step", "result.step == 5", "step_00000005"),
    ],
)
def test_whatever_callback_fails_the_state_is_saved(
    name: str, condition: str, last: str, tmp_path: Path
) -> None:
    options = ["--steps", "5", "--eval-every", "2", "--save-every", "2", "--no-save-async"]
    code, said, _ = run_captioner(tmp_path, failing(name, condition), *options)
    assert code == 2, said
    assert said.count(f"{name}() raises ValueError: the disk of plots is full") == 1
    assert "Traceback" not in said
    assert sorted(p.name for p in (tmp_path / "saved").glob("step_*"))[-1] == last
    assert load_full_state_dict(tmp_path / "saved")


@pytest.mark.slow
def test_objects_are_called_after_the_model_file(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", APART)
    for file in (tmp_path / "plan" / "ranks").glob("*.py"):
        text = file.read_text()
        watch = """
class Watch:
    def on_step(self, result):
        print("watched", result.rank, result.step, file=__import__("sys").stderr, flush=True)
        if result.step == 2 and result.rank == 0:
            raise SystemExit("seen enough")

"""
        head, at, tail = text.partition("def train")
        call = "Trainer(run, model, sections"
        assert call in tail
        tail = tail.replace(call, f"{call}, callbacks=[Watch()]")
        file.write_text(head + watch + at + tail)
    process = start_run(tmp_path / "plan", "--steps", "4", "--workers", "0", "--no-first-check")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert said.count("Watch.on_step() raises SystemExit: seen enough") == 1 and "Traceback" not in said
    assert {line for line in said.splitlines() if line.startswith("watched")} == {
        "watched 0 1",
        "watched 1 1",
        "watched 0 2",
        "watched 1 2",
        "watched 1 3",
    }


WRITES = """
_model, _on_step, NETS = model, on_step, []


def model():
    NETS.append(_model())
    return NETS[-1]


def on_step(result):
    net = NETS[-1]
    _on_step(result)
    with torch.no_grad():
        if WHEN:
            WRITE
    _note(call="written", scale=net.encoder.scale.sum().item(), mix=net.encoder.mix.weight.sum().item())
"""


def write_in_on_step(write: str, when: str = "True") -> str:
    """Code of an `on_step` that writes to a weight or a buffer."""
    return WRITES.replace("WRITE", write).replace("WHEN", when)


@pytest.mark.parametrize(
    ("write", "when", "weight"),
    [
        ("net.encoder.mix.weight.mul_(0.5)", "result.rank == 0", "encoder.mix.weight on rank 0"),
        pytest.param(
            *("net.encoder.scale = torch.ones(16)", "result.step == 2 and result.rank"),
            "encoder.scale on rank 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("net.decoder.gate.data.add_(result.rank)", "True", "encoder.gate on rank 0 and 1"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_writes_that_differ_between_ranks_with_the_weight_end_the_run(
    write: str, when: str, weight: str, tmp_path: Path
) -> None:
    more = write_in_on_step(write, when)
    code, said, calls = run_captioner(tmp_path, more, "--steps", "4", layout=TOGETHER)
    assert code == 2 and "Traceback" not in said, said
    assert f"on_step writes to {weight}" in said and "(0, 1)" in said and "what to do" in said
    last = 2 if "step == 2" in when else 1
    assert [max(c["step"] for c in own if c["call"] == "on_step") for own in calls] == [last, last]


def test_equal_writes_are_taken_and_saved(tmp_path: Path) -> None:
    both = "net.encoder.mix.weight.mul_(0.5); net.encoder.scale = torch.full((16,), 0.25)"
    code, said, calls = run_captioner(tmp_path, write_in_on_step(both), "--steps", "2", layout=TOGETHER)
    assert code == 0, said
    written = [[c for c in own if c["call"] == "written"] for own in calls]
    assert written[0] == written[1] and written[0][-1]["scale"] == 4.0
    saved = load_full_state_dict(tmp_path / "saved")
    assert saved["encoder.scale"].sum() == 4.0
    assert saved["encoder.mix.weight"].sum().item() == pytest.approx(written[0][-1]["mix"], rel=1e-5)


@pytest.mark.slow
def test_the_only_rank_with_a_weight_may_write_to_it(tmp_path: Path) -> None:
    more = write_in_on_step("net.encoder.mix.weight.mul_(0.5)", "result.rank == 0").partition(
        "    _note(call"
    )[0]
    code, said, _ = run_captioner(tmp_path, more, "--steps", "2")
    assert code == 0, said


@pytest.mark.slow
def test_a_new_parameter_in_the_place_of_a_trained_one_is_refused(tmp_path: Path) -> None:
    more = write_in_on_step("net.encoder.mix.weight = torch.nn.Parameter(torch.ones(16, 16))")
    code, said, _ = run_captioner(tmp_path, more, "--steps", "3", layout=TOGETHER)
    assert code == 2 and "in the place of encoder.mix.weight: the optimizer goes on with" in said, said
