"""Tensors between sections are padded as their sender pads them: masks of all conventions hide padding in
micro-batches that are wider than the sender's, or all micro-batches get the global batch's widths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secc.codegen.plan_builder import build_plan
from secc.driver import compile as compiler
from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.driver.replan_for_ranks import replan_for_ranks
from secc.errors import UserError
from secc.frontend.dataset.padding_policy import WidthsReason
from secc.ir.text_io.module_text import parse_module
from secc.report.plan_tables import plan_tables
from secc.report.plan_warnings import plan_warnings
from secc.runtime.model.user_file import load_model_file
from secc.runtime.parameters.checkpoint import load_full_state_dict
from secc.runtime.plan.plan_file import load_plan
from tests.e2e.harness import (
    compile_and_write,
    find_differences,
    read_metrics,
    run_plan_ranks,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)

# An encoder that pads on either side, and returns what its sounds are and a mask of those after a stride.
SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn


class Samples(torch.utils.data.Dataset):
    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.first + i)
        n = STRIDE * int(torch.randint(2, 9, (), generator=g))
        return dict(sound=torch.randn(n, 8, generator=g), there=torch.ones(n))


def dataset():
    return Samples(0)


def eval_dataset():
    return Samples(100)


def collate(samples):
    width = max(len(s["sound"]) for s in samples)
    def pad(x):
        zeros = x.new_zeros(width - len(x), *x.shape[1:])
        return torch.cat([zeros, x] if LEFT else [x, zeros])
    return {key: torch.stack([pad(s[key]) for s in samples]) for key in ("sound", "there")}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, STRIDE, STRIDE)
        self.out = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16))
        self.scale = nn.Parameter(torch.tensor(-1e4))

    def forward(self, sound, there):
        x = self.out(F.gelu(self.conv(sound.mT)).mT)
        ids = there[:, STRIDE - 1 :: STRIDE]
        return x, MASK


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1))

    def forward(self, x, mask):
        scores = self.score(x).squeeze(-1)
        positions = torch.arange(scores.shape[1])
        return ((READ).softmax(-1)[..., None] * x).sum(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.pool = Encoder(), Pool()

    def forward(self, sound, there):
        rows = self.pool(*self.encoder(sound, there))
        return {"loss": rows.square().sum() / len(rows)}


def model():
    return Model()


def optimizer(params):
    return torch.optim.SGD(params, lr=0.05)
"""


@dataclass(frozen=True)
class Convention:
    """A mask as a module makes it of `ids` (0 in padding), how it is read, and what pads it: () for zeros,
    None where no number does."""

    mask: str
    read: str
    fills: tuple[float, ...] | None


PAIRS = "ids[:, None, None].expand(-1, 1, ids.shape[1], -1)"  # of queries and keys
CONVENTIONS = {
    "True hides": Convention("ids == 0", "scores.masked_fill(mask, -torch.inf)", (1.0,)),
    "True keeps": Convention("ids != 0", "scores.masked_fill(~mask, -torch.inf)", ()),
    "-inf": Convention(
        "torch.zeros_like(ids).masked_fill(ids == 0, -torch.inf)", "scores + mask", (-math.inf,)
    ),
    "-1e4": Convention("(1 - ids) * -1e4", "scores + mask", (-1e4,)),
    "least": Convention(
        "(1 - ids) * torch.finfo(torch.float32).min", "scores + mask", (torch.finfo(torch.float32).min,)
    ),
    "weights": Convention("ids.clone()", "scores.masked_fill(mask == 0, -torch.inf)", ()),
    "numbers": Convention("7 - 5 * ids.long()", "scores.masked_fill(mask > 2, -torch.inf)", (7.0,)),
    "lengths": Convention(
        "ids.sum(1).long()", "scores.masked_fill(positions >= mask[:, None], -torch.inf)", ()
    ),
    "pairs": Convention(
        f"torch.zeros_like({PAIRS}).masked_fill({PAIRS} == 0, -torch.inf)",
        "scores + mask[:, 0, 0]",
        (0.0, -math.inf),
    ),
    "positions": Convention(
        "(1 - ids) * torch.arange(1.0, 1 + ids.shape[1])", "scores.masked_fill(mask > 0, -torch.inf)", None
    ),
    "learned": Convention("(1 - ids) * self.scale", "scores + mask", None),
}


PINNED = ("encoder=encoder", "pool=pool")


def write_model(path: Path, of: Convention, stride: int = 1, left: bool = False) -> Path:
    constants = f"STRIDE, LEFT = {stride}, {left}\n"
    path.write_text(constants + SOURCE.replace("MASK", of.mask).replace("READ", of.read))
    return path


def compile_apart(path: Path, widths: str = "auto", **options: object) -> CompiledPlan:
    chosen = CompileOptions(
        cluster="local:2", strategy="apart", global_batch=8, widths=widths, sections=PINNED
    )
    return check_exactness(compile_model(path, replace(chosen, **options)), required=True)  # type: ignore[arg-type]


def mask_fills(compiled: CompiledPlan) -> tuple[float, ...]:
    (fills,) = {e.fills for e in compiled.plan.edges if not e.grad or "1" in e.name} or {()}
    return fills


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_mask_is_padded_as_its_module_pads_it(name: str, tmp_path: Path) -> None:
    found = CONVENTIONS[name]
    path = write_model(tmp_path / "model.py", found)
    compiled = compile_apart(path)
    plan = compiled.plan
    assert len(plan.sections) == 2 and "evaluation" not in plan.checks
    if found.fills is None:
        assert plan.widths == "global"
        assert str(plan.checks["widths"]).startswith(WidthsReason.INEXACT.value)
        with pytest.raises(UserError) as refused:
            compile_apart(path, "own")
        assert "leave --widths own out" in refused.value.remedy
        return
    assert plan.widths == "own" and plan.checks["widths"] == WidthsReason.SHOWN.value
    assert mask_fills(compiled) == found.fills
    # The IR says the same, and the plan's file keeps it.
    assert build_plan(parse_module(compiled.dumps[-1][1]), plan.model, {}).edges == plan.edges
    compiled.write_plan(tmp_path / "plan", lambda _: "")
    assert load_plan(tmp_path / "plan").edges == plan.edges
    (edges,) = (table for table in plan_tables(plan) if table.title == "Edges")
    assert any("padded with" in cell for row in edges.rows for cell in row) == bool(found.fills)
    texts = [p.read_text() for p in (tmp_path / "plan" / "sections").glob("*.py")]
    assert any("Receives padded: " in text for text in texts) == bool(found.fills)


# A condition that few samples drop: its place is then seen whole, padding included.
DROPPED = """
import torch
from torch import nn


def dataset():
    draw = torch.Generator().manual_seed(0)
    lengths = [2 + i * 5 % 7 for i in range(40)]
    return [
        dict(x=torch.randn(4, generator=draw), ids=torch.randint(1, 30, (n,), generator=draw)) | FLAG
        for i, n in enumerate(lengths)
    ]


def collate(samples):
    batch = {k: torch.stack([s[k] for s in samples]) for k in samples[0] if k != "ids"}
    ids = nn.utils.rnn.pad_sequence([s["ids"] for s in samples], batch_first=True)
    return batch | dict(ids=ids)


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.map = nn.Embedding(30, 64), nn.Linear(64, 64)

    def forward(self, ids):
        return self.map(self.words(ids))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.ask, self.out = nn.Linear(4, 64), nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 4))

    def forward(self, x, text, seen):
        scores = (self.ask(x)[:, None] * text).sum(-1).masked_fill(~seen, -torch.inf)
        return self.out((scores.softmax(-1)[..., None] * text).sum(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.reader = Text().requires_grad_(False), Reader()
        self.null = nn.Parameter(torch.full((64,), 0.3))

    def forward(self, x, ids, drop=None):
        with torch.no_grad():
            text = self.text(ids)
        drop = DROP
        text = torch.where(drop[:, None, None], self.null, text)
        loss = (self.reader(x, text, (ids != 0) | drop[:, None]) - x).square().sum(-1)
        return {"loss": loss.mean()}


def model():
    return Model()


def optimizer(params):
    return torch.optim.SGD(params, lr=0.05)
"""


@pytest.mark.parametrize(
    ("flag", "drop"),
    [
        ("dict(drop=torch.tensor(i % 7 == 3))", "drop"),
        ("dict(drop=torch.tensor(i == 33))", "drop"),
        ("{}", "torch.rand(len(ids)) < 0.1"),
        ("{}", "torch.rand(len(ids)) < 0.003"),
        ("{}", "torch.bernoulli(torch.full((len(ids),), 0.003)).bool()"),
        ("{}", "torch.randint(0, 1000, (len(ids), 1))[:, 0] == 0"),
        ("{}", "torch.randn(len(ids)) > 3"),
        ("{}", "torch.rand(len(ids), 12)[:, 5] < 0.0005"),
    ],
    ids=["some", "one", "drawn", "rarely drawn", "rare coins", "integers", "normal", "one of many"],
)
def test_padding_that_few_samples_read_is_found(flag: str, drop: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(DROPPED.replace("FLAG", flag).replace("DROP", drop))
    sections = ("text=text", "reader=reader")
    plan = check_exactness(
        compile_model(
            path, CompileOptions(cluster="local:2", strategy="apart", global_batch=8, sections=sections)
        ),
        required=True,
    ).plan
    assert len(plan.sections) == 2
    assert plan.widths == "global" and str(plan.checks["widths"]).startswith(WidthsReason.INEXACT.value)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([n for n in CONVENTIONS if n != "lengths"]),
    how=st.sampled_from([(1, False), (1, True), (2, False), (3, False)]),
    least=st.floats(-1e6, -50),
)
def test_any_convention_is_exact(name: str, how: tuple[int, bool], least: float, tmp_path: Path) -> None:
    found = CONVENTIONS[name]
    found = replace(found, mask=found.mask.replace("-1e4", repr(least)))
    compiled = compile_apart(write_model(tmp_path / "model.py", found, *how))
    assert all(p["exact"] for p in compiled.plan.checks["patterns"])
    if found.fills is not None and compiled.plan.widths == "own":
        expected = tuple(float(torch.tensor(least)) if n == -1e4 else n for n in found.fills)
        assert mask_fills(compiled) == expected


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["True hides", "-inf"])
def test_ranks_train_and_evaluate_with_filled_masks(name: str, tmp_path: Path) -> None:
    file = f"filled_{'true' if name == 'True hides' else 'inf'}"  # modules of tests have names of their own
    path = write_model(tmp_path / f"{file}.py", CONVENTIONS[name], stride=2)
    model = write_recording_model(file, tmp_path, tmp_path)
    choices: dict[str, Any] = {
        "cluster": "local:3",
        "global_batch": 8,
        "strategy": "apart",
        "sections": PINNED,
    }
    choices |= {"set": ("encoder.micro_batch=1", "pool.micro_batch=4")}
    compiled = compile_and_write(model, tmp_path / "recorded", **choices)
    assert compiled.plan.widths == "own" and any(e.fills for e in compiled.plan.edges)
    found = train_distributed(tmp_path / "recorded", compiled.plan.world_size, 3, tmp_path / "run")
    assert not list(find_differences(found, train_in_one_process(model, 8, 3, tmp_path / "plain")))

    compile_and_write(path, tmp_path / "plan", **choices)
    arguments = ["--log-dir", str(tmp_path / "log"), "--save", str(tmp_path / "saved"), "--steps", "2"]
    run_plan_ranks(
        tmp_path / "plan", compiled.plan.world_size, [*arguments, "--workers", "0", "--eval-every", "2"]
    )
    user = load_model_file(path)
    plain = user.build_model().eval()
    plain.load_state_dict(load_full_state_dict(tmp_path / "saved"))
    samples = user.call_function("eval_dataset")
    with torch.no_grad():
        expected = float(plain(**user.collate([samples[i] for i in range(len(samples))]))["loss"])
    (line,) = (m for m in read_metrics(tmp_path / "log") if "eval" in m)
    assert line["loss"] == pytest.approx(expected, rel=1e-6)


def test_a_plan_for_fewer_ranks_keeps_what_pads_its_edges(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.py", CONVENTIONS["-1e4"])
    options: dict[str, Any] = {
        "cluster": "local:3",
        "global_batch": 8,
        "strategy": "apart",
        "sections": PINNED,
    }
    compile_and_write(path, tmp_path / "plan", **options)
    fills = {e.name: e.fills for e in load_plan(tmp_path / "plan").edges}
    smaller = load_plan(replan_for_ranks(tmp_path / "plan", 2))
    assert {e.name: e.fills for e in smaller.edges} == fills and (-1e4,) in fills.values()


SMALL = """

def small_model():
    return model()
"""


@pytest.mark.parametrize(
    ("name", "small", "warned"), [("True hides", SMALL, 0), ("True hides", "", 1), ("positions", SMALL, 1)]
)
def test_a_large_models_masks_are_padded_as_its_small_model_pads_them(
    name: str, small: str, warned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no small model shows is named in a warning."""
    monkeypatch.setattr(compiler, "MAX_LOCAL_MODEL_BYTES", 0)
    path = write_model(tmp_path / "model.py", CONVENTIONS[name])
    path.write_text(path.read_text() + small)
    options = CompileOptions(
        cluster="local:2", strategy="apart", global_batch=8, widths="own", sections=PINNED
    )
    plan = check_exactness(compile_model(path, options)).plan
    assert sum("perhaps a mask" in w.text for w in plan_warnings(plan)) == warned
    assert [e.fills for e in plan.edges if e.fills] == [(1.0,)] * (1 - warned)
