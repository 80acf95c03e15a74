"""Statements of forward that no graph can hold are blocks: a loop over positions, a gradient that forward
takes, a loss that matches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.errors import UserError
from secc.report.html_page import report_page
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from tests.e2e.harness import find_differences
from tools.compare_training import train_distributed, train_in_one_process, write_recording_model

MODELS = Path(__file__).parent.parent / "models"


def name_lines(model: Path, first: str, last: str) -> str:
    """Returns the name of a block: from the line that begins with `first` to the one with `last`."""
    lines = [line.strip() for line in model.read_text().splitlines()]
    begin, end = (1 + next(i for i, line in enumerate(lines) if line.startswith(t)) for t in (first, last))
    return f"line_{begin}" if begin == end else f"lines_{begin}_to_{end}"


@pytest.mark.parametrize(
    "name, first, last",
    [
        ("learned_forces", "positions = positions.req", "pull ="),
        ("handed_on", "state, scores", "logits ="),
        ("sentence_lists", "told =", "return F.cross"),
        ("nested_sets", "padded =", "padded ="),
        ("tagged_tensors", "hidden = hidden.as", "hidden = hidden.as"),
        ("probed_samples", "for row, seen", "apart = apart +"),
        ("penalised_critic", "real = real.req", "(slope,) ="),
        ("adapted_learner", "def score", "losses ="),
        # A sum over matched boxes, and rows of classes.
        pytest.param("matched_targets", "queries =", "distance = distance", marks=pytest.mark.slow),
    ],
)
def test_statements_are_a_block_of_their_own(name: str, first: str, last: str) -> None:
    model, options = MODELS / f"{name}.py", CompileOptions(cluster="local:2", global_batch=12)
    plan = check_exactness(compile_model(model, options), required=True).plan
    block = name_lines(model, first, last)
    assert [s.whole_batch for s in plan.sections if block in s.blocks] == [False]
    assert f"{block}: these lines are one block, because" in " ".join(plan.checks["notes"])


def test_two_loops_over_lists_are_two_blocks_with_modules_between() -> None:
    model = MODELS / "document_crops.py"
    options = CompileOptions(cluster="local:2", global_batch=12, strategy="apart")
    plan = check_exactness(compile_model(model, options), required=True).plan
    lines = name_lines(model, "for i, (crops, labels) in enumerate(zip(lines", "count += 1")
    formulas = name_lines(model, "for i, (crops, labels) in enumerate(zip(formulas", "places +=")
    blocks = {b for s in plan.sections for b in s.blocks}
    assert blocks == {"page", "topic", lines, formulas}
    assert [note.partition(":")[0] for note in plan.checks["notes"]] == [lines, formulas]
    assert not any(s.whole_batch for s in plan.sections)


@pytest.mark.slow
def test_the_rest_of_forward_keeps_its_sections() -> None:
    model = MODELS / "attended_caption.py"
    options = CompileOptions(cluster="local:2", global_batch=12, sections=("encoder=encoder",))
    plan = check_exactness(compile_model(model, options), required=True).plan
    loop = name_lines(model, "scores, glances =", "loss =")
    assert [s.blocks for s in plan.sections] == [("encoder",), ("start", loop)]


def test_the_message_says_why_statements_cannot_be_a_block(tmp_path: Path) -> None:
    text = (MODELS / "handed_on.py").read_text()
    text = text.replace("scores.append(", "net = [self][0]\n            scores.append(")
    (tmp_path / "kept.py").write_text(text.replace("score(self, state)", "score(net, state)"))
    with pytest.raises(UserError, match="statements cannot be a block: it passes self on, or keeps it"):
        compile_model(tmp_path / "kept.py", CompileOptions(global_batch=12))


def test_a_branch_of_the_whole_batch_names_the_option() -> None:
    model = MODELS / "reads_block_value.py"
    with pytest.raises(UserError, match=r"not separable.*Python reads a value") as refused:
        compile_model(model, CompileOptions(global_batch=12))
    assert "--whole-batch lines_19_to_21" in refused.value.remedy
    options = CompileOptions(cluster="local:2", global_batch=12, whole_batch=("lines_19_to_21",))
    check_exactness(compile_model(model, options), required=True)


def test_a_mean_over_samples_in_a_loop_names_the_option(tmp_path: Path) -> None:
    """Numbers tell it from a sum."""
    text = (MODELS / "probed_samples.py").read_text()
    text = text.replace(".square().mean()", ".square().mean() / len(ids)").replace(
        " + apart / len(ids)", " + apart"
    )
    (tmp_path / "averaged.py").write_text(text)
    with pytest.raises(UserError, match=r"not separable by sample: lines_.* reduces its samples") as refused:
        compile_model(tmp_path / "averaged.py", CompileOptions(global_batch=12))
    assert refused.value.where.startswith("averaged.py:") and "divide behind it" in refused.value.remedy
    block = refused.value.remedy.partition("--whole-batch ")[2].partition(",")[0]
    options = CompileOptions(cluster="local:2", global_batch=12, whole_batch=(block,))
    check_exactness(compile_model(tmp_path / "averaged.py", options), required=True)


RATIO = """
import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.map(x))


class Ratio(nn.Module):
    def forward(self, first, second, weight):
        of_first, = torch.autograd.grad(first, weight, retain_graph=True)
        of_second, = torch.autograd.grad(second, weight, retain_graph=True)
        return first + second * (of_first.norm() / (of_second.norm() + 1e-4)).clamp(0, 10).detach()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.out, self.kind, self.ratio = nn.Linear(8, 4), nn.Linear(8, 3), Ratio()

    def forward(self, x, y, kind):
        for layer in self.layers:
            x = layer(x)
        first, second = F.mse_loss(self.out(x), y), F.cross_entropy(self.kind(x), kind)
        return TAKEN


def model():
    torch.manual_seed(0)
    return Model()


def dataset():
    draw = torch.Generator().manual_seed(0)
    return [
        dict(x=torch.randn(8, generator=draw), y=torch.randn(4, generator=draw), kind=torch.tensor(i % 3))
        for i in range(24)
    ]


def collate(samples):
    return {k: torch.stack([s[k] for s in samples]) for k in samples[0]}
"""


@pytest.mark.parametrize(
    "taken", ["Ratio.forward(self, first, second, WEIGHT)", "self.ratio(first, second, WEIGHT)"]
)
def test_a_ratio_of_gradients_names_the_option(taken: str, tmp_path: Path) -> None:
    """The weight of a second loss by the gradients of both at the last layer (Esser et al., VQGAN, 2021)."""
    taken = taken.replace("WEIGHT", "self.layers[-1].map.weight")
    (tmp_path / "ratio.py").write_text(RATIO.replace("TAKEN", taken))
    with pytest.raises(UserError, match="not separable by sample: lines_") as refused:
        compile_model(tmp_path / "ratio.py", CompileOptions(global_batch=12))
    block = refused.value.remedy.partition("--whole-batch ")[2].partition(",")[0]
    options = CompileOptions(cluster="local:1", global_batch=12, whole_batch=(block,))
    check_exactness(compile_model(tmp_path / "ratio.py", options), required=True)


@pytest.mark.slow
def test_loops_that_add_to_one_sum_are_a_block_together(tmp_path: Path) -> None:
    """A block that only adds to a sum that it takes would be none of samples alone."""
    text = (MODELS / "probed_samples.py").read_text().replace("        apart = 0.0\n", "")
    text = text.replace("apart = apart + (", "total = total + (").replace(" + apart / len(ids)", "")
    model = tmp_path / "together.py"
    model.write_text(text)
    plan = check_exactness(compile_model(model, CompileOptions(global_batch=12)), required=True).plan
    assert name_lines(model, "for some, labels", "total = total + (") in plan.sections[0].blocks


@pytest.mark.slow
@pytest.mark.parametrize("mean", [False, True])
def test_a_loop_over_time_steps_that_adds_up_the_loss(mean: bool, tmp_path: Path) -> None:
    """It is exact as a sum over samples; a mean over them names the option."""
    text = (MODELS / "attended_caption.py").read_text()
    text = text.replace("scores, glances = [], []", "total = 0.0").replace(
        "            glances.append(weights)\n", ""
    )
    counted = " / len(caption)" if mean else ""
    text = text.replace(
        "scores.append(self.head(state))",
        "following = caption[:, position + 1]\n            total = total + F.cross_entropy("
        f"self.head(state), following, ignore_index=0, reduction='sum'){counted}",
    )
    begin, end = text.index("        written ="), text.index("def model")
    text = f"{text[:begin]}        return {{'loss': total / (caption[:, 1:] != 0).sum()}}\n\n\n{text[end:]}"
    (tmp_path / "summed.py").write_text(text)
    options = CompileOptions(cluster="local:2", global_batch=12)
    if mean:
        with pytest.raises(UserError, match="not separable") as refused:
            compile_model(tmp_path / "summed.py", options)
        assert "--whole-batch lines_" in refused.value.remedy
        block = refused.value.remedy.partition("--whole-batch ")[2].partition(",")[0]
        options = replace(options, whole_batch=(block,))
    check_exactness(compile_model(tmp_path / "summed.py", options), required=True)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "name",
    [
        "attended_caption",
        "learned_forces",
        "matched_targets",
        "handed_on",
        "crf_tagger",
        "transducer",
        "sentence_lists",
        "probed_samples",
        "penalised_critic",
        "adapted_learner",
        "document_crops",
    ],
)
@pytest.mark.parametrize("pins", [(), ("sharding=zero3", "dp=2")], ids=["chosen", "zero3"])
def test_statements_train_as_in_plain_pytorch(name: str, pins: tuple[str, ...], tmp_path: Path) -> None:
    model = write_recording_model(name, tmp_path, MODELS)
    options = CompileOptions(cluster="local:3", global_batch=12)
    if pins:
        trained = [s.name for s in compile_model(model, options).plan.sections if s.mode == "train"]
        options = CompileOptions(
            cluster="local:3", global_batch=12, set=tuple(f"{trained[-1]}.{pin}" for pin in pins)
        )
    compiled = check_exactness(compile_model(model, options), required=True)
    compiled.write_plan(tmp_path / "plan", report_page)
    reference = train_in_one_process(model, 12, 4, tmp_path / "plain")
    found = train_distributed(tmp_path / "plan", compiled.plan.world_size, 4, tmp_path / "run")
    assert list(find_differences(found, reference)) == []
    own = load_model_file(MODELS / f"{name}.py").build_model()
    exported = load_full_state_dict(tmp_path / "run" / "saved")
    assert own.load_state_dict({k: torch.as_tensor(v) for k, v in exported.items()}, strict=True)


@pytest.mark.parametrize(
    "name, first, last",
    [
        ("summed_recordings", "for frames, signs", "count +="),
        ("encoded_paragraphs", "torch.cat(", "torch.cat("),
    ],
)
def test_a_loop_that_calls_a_module_for_each_sequence_trains_on_several_ranks(
    name: str, first: str, last: str, tmp_path: Path
) -> None:
    """The module mixes the rows of its argument, so the calls are not one call for all rows."""
    model = write_recording_model(name, tmp_path, MODELS)
    pins = ("model.dp=3", "model.micro_batch=2")
    options = CompileOptions(cluster="local:3", global_batch=12, set=pins)
    compiled = check_exactness(compile_model(model, options), required=True)
    assert name_lines(MODELS / f"{name}.py", first, last) in compiled.plan.sections[-1].blocks
    assert not any(s.whole_batch for s in compiled.plan.sections)
    compiled.write_plan(tmp_path / "plan", report_page)
    assert compiled.plan.world_size == 3
    reference = train_in_one_process(model, 12, 4, tmp_path / "plain")
    found = train_distributed(tmp_path / "plan", 3, 4, tmp_path / "run")
    assert list(find_differences(found, reference)) == []


@pytest.mark.parametrize("form", ["entries of one length", "a list of losses"])
def test_a_loop_over_sequences_leaves_the_division_outside_of_its_block(form: str, tmp_path: Path) -> None:
    text = (MODELS / "summed_recordings.py").read_text()
    if form == "entries of one length":
        changed = text.replace("int(torch.randint(2, 7, (), generator=g))", "4")
        first, last = "for frames, signs", "count +="
    else:
        changed = text.replace("total, count = 0, 0", "losses, count = [], 0").replace(
            'total = total + F.cross_entropy(scores, signs, reduction="sum")',
            'losses.append(F.cross_entropy(scores, signs, reduction="sum"))',
        )
        changed = changed.replace("return total / count", "return torch.stack(losses).sum() / count")
        first, last = "losses, count =", "return torch.stack"
    assert changed != text
    model = tmp_path / "loop.py"
    model.write_text(changed)
    options = CompileOptions(cluster="local:3", global_batch=12, set=("model.dp=3",))
    plan = check_exactness(compile_model(model, options), required=True).plan
    assert [(s.blocks, s.whole_batch) for s in plan.sections] == [((name_lines(model, first, last),), False)]


COUNTS = {
    "int": ["count += int((signs != 0).sum())"],
    "len": ["kept = signs[signs != 0]", "count += len(kept)"],
    "item": ["count = count + (signs != 0).sum().item()"],
}


@pytest.mark.parametrize("lines", COUNTS.values(), ids=COUNTS)
def test_a_divisor_that_a_loop_counts_by_values_is_exact(lines: list[str], tmp_path: Path) -> None:
    text = (MODELS / "summed_recordings.py").read_text()
    counted = text.replace("count += signs.numel()", "\n            ".join(lines))
    assert counted != text
    (tmp_path / "counted.py").write_text(counted)
    options = CompileOptions(cluster="local:3", global_batch=12, set=("model.dp=3",))
    plan = check_exactness(compile_model(tmp_path / "counted.py", options), required=True).plan
    assert [s.whole_batch for s in plan.sections] == [False]


def test_a_divisor_that_a_module_decides_names_a_remedy_that_works(tmp_path: Path) -> None:
    text = (MODELS / "summed_recordings.py").read_text()
    counted = text.replace("signs.numel()", "int((scores.argmax(-1) != signs).sum())")
    (tmp_path / "counted.py").write_text(counted)
    options = CompileOptions(cluster="local:3", global_batch=12, set=("model.dp=3",))
    with pytest.raises(UserError, match="not separable by sample: lines_") as refused:
        compile_model(tmp_path / "counted.py", options)
    assert "divide behind it, by sizes or a tensor of inputs" in refused.value.remedy
    divided = text.replace("total / count", 'total / (torch.cat(batch["signs"]) != 0).sum()')
    (tmp_path / "divided.py").write_text(divided.replace("            count += signs.numel()\n", ""))
    check_exactness(compile_model(tmp_path / "divided.py", options), required=True)
