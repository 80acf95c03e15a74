"""All files of a plan directory as texts: a pure function of the plan, the lowered IR and the dumps, so that
goldens can pin it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch
from xdsl.dialects.builtin import ModuleOp

from secc.codegen.fused_module import render_fused_module
from secc.codegen.python_names import NameScope, section_class_name, section_module_name
from secc.codegen.render import render_template
from secc.codegen.section_modules import (
    TERMS_SECTION,
    constants_of,
    render_section_module,
    render_terms_module,
)
from secc.ir.dialect.ops import GraphOp, graph_of
from secc.runtime.plan.schema import Plan, Section, plan_to_json
from secc.runtime.training.machine_check import gpu_kind_of

PlanFiles = dict[str, str | bytes]
_RANK_FILE_NAMES = ("Path", "RankContext", "RunOptions", "Trainer", "PLAN")  # that no section's class has


def build_plan_files(
    plan: Plan,
    module: ModuleOp,
    dumps: Sequence[tuple[str, str]],
    constants: Mapping[str, torch.Tensor],
    source: str,
    report: str,
) -> PlanFiles:
    """Content by relative path. `dumps` are (name, text) of the IR from capture to lowering; `constants` are
    tensors of any shape by key; `source` is the text of the model file."""
    files: PlanFiles = {"plan.json": plan_to_json(plan), "model.py.txt": source, "report.html": report}
    files |= {f"ir/{i:02d}-{name}.mlir": text for i, (name, text) in enumerate(dumps)}
    files |= build_section_files(plan, module, constants)
    files |= {f"ranks/rank_{rank:05d}.py": render_rank_file(plan, rank) for rank in range(plan.world_size)}
    files |= {
        "run.py": render_template("run.py.j2"),
        "launch.sh": render_launcher(plan, "launch.sh.j2"),
        "slurm.sbatch": render_launcher(plan, "slurm.sbatch.j2"),
    }
    return files


def build_section_files(plan: Plan, module: ModuleOp, constants: Mapping[str, torch.Tensor]) -> PlanFiles:
    """The modules under sections/, with the constants that they read: tensors of any shape by key."""
    graph = graph_of(module)
    package = '"""The sections of this plan: the user\'s blocks in order, and the ops between them."""\n'
    files: PlanFiles = {"sections/__init__.py": package}
    files |= {plan.find_section(s.sym.data).module: render_section_module(graph, s) for s in graph.sections}
    if graph.rewrites:
        files["sections/fused.py"] = render_fused_module(graph)
    names = [*(s.sym.data for s in graph.sections), TERMS_SECTION]
    return files | _terms_file(graph) | _constants_file(graph, names, constants)


def build_terms_files(module: ModuleOp, constants: Mapping[str, torch.Tensor]) -> PlanFiles:
    """The module of loss terms alone, with the constants that it reads."""
    graph = graph_of(module)
    return _terms_file(graph) | _constants_file(graph, [TERMS_SECTION], constants)


def _terms_file(graph: GraphOp) -> PlanFiles:
    return {"sections/terms.py": render_terms_module(graph)}


def _constants_file(
    graph: GraphOp, sections: Sequence[str], constants: Mapping[str, torch.Tensor]
) -> PlanFiles:
    read = sorted({key for s in sections for key in constants_of(graph, s)})
    if not read:
        return {}
    buffer = io.BytesIO()
    torch.save({key: constants[key] for key in read}, buffer)
    return {"sections/constants.pt": buffer.getvalue()}


def render_rank_file(plan: Plan, rank: int) -> str:
    """The script of one rank: which sections it holds, and the loop that trains them."""
    held = [s for s in plan.sections if rank in s.mesh.ranks]
    scope = NameScope(_RANK_FILE_NAMES)
    return render_template(
        "rank.py.j2",
        rank=rank,
        world_size=plan.world_size,
        sections=[
            {
                "name": s.name,
                "module": section_module_name(s.name),
                "cls": (cls := section_class_name(s.name)),
                "alias": scope.claim_name(cls),
                "role": _role_text(s, rank),
                "mode": s.mode,
            }
            for s in held
        ],
    )


def _role_text(section: Section, rank: int) -> str:
    replica = f"replica {section.mesh.ranks.index(rank) // section.mesh.replica_size} of {section.mesh.dp}"
    return f"{replica}, stage {section.stage} of {section.pipeline}" if section.pipeline else replica


def render_launcher(plan: Plan, template: str) -> str:
    """A launch script for the plan's cluster: nodes, ranks on each, and whether these need a GPU each."""
    nodes, per_node = count_nodes(plan)
    last = plan.world_size - (nodes - 1) * per_node

    def ranks_of_node(variable: str) -> str:
        """The number of ranks of the node that a shell variable names."""
        return str(per_node) if last == per_node else f"$(({variable} == {nodes - 1} ? {last} : {per_node}))"

    return render_template(
        template,
        nodes=nodes,
        per_node=per_node,
        last=last,
        ranks_of_node=ranks_of_node,
        gpus=bool(gpu_kind_of(plan)),
        world_size=plan.world_size,
    )


def count_nodes(plan: Plan) -> tuple[int, int]:
    """The nodes that the plan's ranks are on, and the ranks on each but the last, which has what is left:
    ranks were placed node after node."""
    per_node = min(int(plan.cluster.get("per_node", plan.world_size)), plan.world_size)
    return -(-plan.world_size // per_node), per_node
