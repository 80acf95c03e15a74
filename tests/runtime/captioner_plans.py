"""Plans of the captioner in fixtures/: its hand-written sections on any meshes, and what plain PyTorch
computes for it."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from secc.runtime.model import user_file
from secc.runtime.parameters.rank_weights import describe_parameters
from secc.runtime.plan.schema import (
    PLAN_VERSION,
    Cost,
    Edge,
    Input,
    LossTerm,
    Mesh,
    ModelRef,
    Plan,
    Section,
    Symbol,
    TiedParameter,
    plan_to_json,
)

FIXTURE = Path(__file__).parent / "fixtures" / "captioner"
CLASSES = {"encoder": "Encoder", "teacher": "Teacher", "decoder": "Decoder"}
GLOBAL_BATCH = 8

Layout = Mapping[str, Sequence[int]]
APART: Layout = {"encoder": (0,), "teacher": (0,), "decoder": (1,)}
UNEVEN: Layout = {"encoder": (0,), "teacher": (2, 0), "decoder": (1, 2)}
TOGETHER: Layout = {"encoder": (0, 1), "teacher": (0, 1), "decoder": (0, 1)}
ALONE: Layout = {"encoder": (0,), "teacher": (0,), "decoder": (0,)}


def make_plan(layout: Layout, widths: str = "own", micro_batch: int = 2, source: str | None = None) -> Plan:
    """The captioner's plan with each section's replicas on the ranks of `layout`; `source` stands in for the
    text of its model file."""
    source = (FIXTURE / "model.py").read_text() if source is None else source
    table = describe_parameters(user_file.load_model_file(FIXTURE / "model.py").build_model())

    def section(name: str, mode: str, blocks: tuple[str, ...], when: tuple[str, ...] = ()) -> Section:
        params = tuple(n for n in table if n.startswith(tuple(f"{b}." for b in blocks)))
        mesh = Mesh(tuple(layout[name]), len(layout[name]))
        return Section(
            name,
            f"sections/{name}.py",
            mode,
            when,
            blocks,
            params,
            mesh,
            micro_batch,
            cost=Cost("1000*B", "2000*B"),
        )

    images = Input("images", "float32", ("n_images", "3", "4", "4"), optional=True)
    texts = [
        Input(key, "int64", ("B", "S"), pads=((1, "right", fill),))
        for key, fill in (("input_ids", 0.0), ("labels", -100.0))
    ]
    return Plan(
        version=PLAN_VERSION,
        hash="",
        model=ModelRef("model.py", hashlib.sha256(source.encode()).hexdigest(), table),
        world_size=1 + max(r for ranks in layout.values() for r in ranks),
        global_batch=GLOBAL_BATCH,
        widths=widths,
        symbols=(
            Symbol("B", "rows", "input_ids", 0),
            Symbol("S", "width", "input_ids", 1),
            Symbol("n_images", "rows", "images", 0),
        ),
        inputs=(*texts, images),
        sections=(
            section("encoder", "train", ("encoder",), ("images",)),
            section("teacher", "forward", ("teacher",)),
            section("decoder", "train", ("embed", "decoder", "head")),
        ),
        edges=(
            Edge(
                "image_features",
                "encoder",
                "decoder",
                "float32",
                ("n_images", "4", "16"),
                0,
                "n_images",
                True,
                ("images",),
            ),
            Edge(
                "target",
                "teacher",
                "decoder",
                "float32",
                ("B", "S", "16"),
                0,
                "1",
                False,
                extents=((1, "S", "right"),),
            ),
        ),
        terms=(
            LossTerm("penalty", "encoder", "0.01 / n_images"),
            LossTerm("cross_entropy", "decoder", "1 / labels"),
            LossTerm("imitation", "decoder", "0.1 / labels"),
        ),
        ties=(
            TiedParameter(("encoder.gate", "decoder.gate"), ("encoder", "decoder")),
            TiedParameter(("embed.weight", "head.weight"), ("decoder",)),
        ),
        cluster={},
        solver={},
        prediction={},
        labels_key="labels",
    )


def capped(plan: Plan) -> Plan:
    """The plan with an encoder that holds one sample between forward and backward."""
    sections = (
        dataclasses.replace(s, micro_batch=1, in_flight=1) if s.name == "encoder" else s
        for s in plan.sections
    )
    return dataclasses.replace(plan, sections=tuple(sections))


def write_plan(
    directory: Path,
    layout: Layout,
    widths: str = "own",
    micro_batch: int = 2,
    source: str | None = None,
    cap: bool = False,
    run_ahead: float = 0.0,
) -> Plan:
    """A plan directory, as `secc compile` would write it. With `cap` the encoder holds one sample at a time;
    the teacher has `run_ahead` GiB to run ahead with."""
    plan = dataclasses.replace(make_plan(layout, widths, micro_batch, source), run_ahead_gib=run_ahead)
    plan = capped(plan) if cap else plan
    shutil.copytree(FIXTURE, directory, ignore=shutil.ignore_patterns("__pycache__"))
    if source is not None:
        (directory / "model.py").write_text(source)
    shutil.copy(directory / "model.py", directory / "model.py.txt")
    (directory / "plan.json").write_text(plan_to_json(plan))
    pattern = (FIXTURE / "ranks" / "rank_00001.py").read_text()
    for rank in range(plan.world_size):
        held = [name for name, ranks in layout.items() if rank in ranks]
        imports = "\n".join(f"from sections.{name} import {CLASSES[name]}" for name in held)
        made = ", ".join(f"{CLASSES[name]}(model)" for name in held)
        text = pattern.replace("from sections.decoder import Decoder", imports).replace(
            "[Decoder(model)]", f"[{made}]"
        )
        (directory / "ranks" / f"rank_{rank:05d}.py").write_text(text)
    return plan


@dataclass
class Reference:
    """A run of plain PyTorch: each step's loss, gradient norm and gradients (None kept), and the state dict
    at the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor | None]]
    state: dict[str, torch.Tensor]


def reference(
    steps: int, clip: float | None = None, seed: int = 0, drawn: Sequence[Sequence[int]] | None = None
) -> Reference:
    """Train the captioner with whole global batches in this process: of the numbered samples `drawn` for each
    step, by default in their order."""
    user = user_file.load_model_file(FIXTURE / "model.py")
    module: ModuleType = user.module
    torch.manual_seed(seed)
    model: nn.Module = module.model()
    optimizer = module.optimizer(list(model.named_parameters()))
    scheduler = module.scheduler(optimizer)
    dataset = module.dataset()
    losses, norms, gradients = [], [], []
    for step in range(steps):
        numbers = drawn[step] if drawn else range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        batch = module.collate([dataset[i % len(dataset)] for i in numbers])
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        norms.append(
            float(nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip))
        )
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return Reference(losses, norms, gradients, model.state_dict())
