"""All files of a plan directory, as texts: a pure function of the plan, the lowered IR and the dumps, so
goldens can pin it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch
from xdsl.dialects.builtin import ModuleOp

from secc.codegen.fused_module import fused_module
from secc.codegen.python_names import class_name, identifier
from secc.codegen.render import render
from secc.codegen.section_modules import TERMS, constants_of, section_module, terms_module
from secc.ir.dialect.ops import graph_of
from secc.runtime.plan.schema import Plan, Section, to_json

Files = dict[str, str | bytes]


def plan_files(
    plan: Plan,
    module: ModuleOp,
    dumps: Sequence[tuple[str, str]],
    constants: Mapping[str, torch.Tensor],
    source: str,
    report: str,
) -> Files:
    """Relative path -> content. `dumps` are (name, text) of the IR from capture to lowering; `source` is the
    text of the model file."""
    files: Files = {"plan.json": to_json(plan), "model.py.txt": source, "report.html": report}
    files |= {f"ir/{i:02d}-{name}.mlir": text for i, (name, text) in enumerate(dumps)}
    files |= section_files(plan, module, constants)
    files |= {f"ranks/rank_{rank:05d}.py": rank_file(plan, rank) for rank in range(plan.world_size)}
    files |= {
        "run.py": render("run.py.j2"),
        "launch.sh": launcher(plan, "launch.sh.j2"),
        "slurm.sbatch": launcher(plan, "slurm.sbatch.j2"),
    }
    return files


def section_files(plan: Plan, module: ModuleOp, constants: Mapping[str, torch.Tensor]) -> Files:
    """The modules under sections/, with the constants that they read."""
    graph = graph_of(module)
    files: Files = {
        "sections/__init__.py": '"""The sections of this plan: the user\'s blocks in order, glue spelt out."""\n'
    }
    files |= {plan.section(s.sym.data).module: section_module(graph, s) for s in graph.sections}
    files["sections/terms.py"] = terms_module(graph)
    if graph.rewrites:
        files["sections/fused.py"] = fused_module(graph)
    read = sorted(
        {key for s in [*(s.sym.data for s in graph.sections), TERMS] for key in constants_of(graph, s)}
    )
    if read:
        buffer = io.BytesIO()
        torch.save({key: constants[key] for key in read}, buffer)
        files["sections/constants.pt"] = buffer.getvalue()
    return files


def rank_file(plan: Plan, rank: int) -> str:
    """The entry of one rank: which sections it holds and the loop that trains them."""
    held = [s for s in plan.sections if rank in s.mesh.ranks]
    return render(
        "rank.py.j2",
        rank=rank,
        world_size=plan.world_size,
        sections=[
            {
                "name": s.name,
                "module": identifier(s.name),
                "cls": class_name(s.name),
                "role": _role(s, rank),
                "mode": s.mode,
            }
            for s in held
        ],
    )


def _role(section: Section, rank: int) -> str:
    replica = f"replica {section.mesh.ranks.index(rank) // section.mesh.tp} of {section.mesh.dp}"
    return f"{replica}, stage {section.stage} of {section.pipeline}" if section.pipeline else replica


def launcher(plan: Plan, template: str) -> str:
    """A launch script for the plan's cluster: nodes, and ranks on each."""
    nodes = int(plan.cluster.get("nodes", 1))
    return render(template, nodes=nodes, per_node=-(-plan.world_size // nodes), world_size=plan.world_size)
