"""A plan as a job of a cluster's scheduler: a SkyPilot task, or a TrainJob of Kubeflow Trainer (v1alpha1).
Both start the plan's launch.sh once on each node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from secc.codegen.plan_files import count_nodes
from secc.errors import UserError
from secc.runtime.plan.schema import Plan
from secc.runtime.training.machine_check import gpu_kind_of

# SkyPilot's names of devices, where they differ from those in plans.
_SKYPILOT_ACCELERATORS = {"A100": "A100-80GB", "A100_40GB": "A100"}
_NAME_LENGTH = 63  # of a label in DNS


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent_text)


def render_skypilot_task(plan: Plan, directory: Path, arguments: Sequence[str]) -> str:
    """YAML of a SkyPilot task. It copies the plan's directory and the folder of its model file to the same
    paths on each node. arguments: options of `secc run`. Raises UserError if nodes differ."""
    kind, (nodes, per_node) = _only_gpu_kind(plan), count_nodes(plan)
    whole = directory.resolve()
    folders = {whole, (whole / plan.model.path).resolve().parent}
    outermost = sorted(str(path) for path in folders if not folders & set(path.parents))
    accelerators = {_SKYPILOT_ACCELERATORS.get(kind, kind): per_node}
    lines = [
        "export NNODES=$SKYPILOT_NUM_NODES NODE_RANK=$SKYPILOT_NODE_RANK",
        'export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        shlex.join(["bash", str(whole / "launch.sh"), *arguments]),
    ]
    task = {
        "name": _job_name(whole),
        "num_nodes": nodes,
        "resources": {"accelerators": accelerators} if kind else {"cpus": f"{per_node}+"},
        "file_mounts": {path: path for path in outermost},
        "run": "\n".join(lines) + "\n",
    }
    return _dump_yaml(task)


def render_train_job(plan: Plan, directory: Path, arguments: Sequence[str]) -> str:
    """YAML of a TrainJob for the runtime torch-distributed. Nodes must have the plan and its model file at
    the paths that these have here. arguments: options of `secc run`. Raises UserError if nodes differ."""
    kind, (nodes, per_node) = _only_gpu_kind(plan), count_nodes(plan)
    resource = {("nvidia.com/gpu" if kind else "cpu"): str(per_node)}
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _job_name(directory.resolve())},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": {
                "numNodes": nodes,
                "numProcPerNode": per_node,
                "resourcesPerNode": {"requests": resource, "limits": dict(resource)},
                "command": ["bash", str(directory.resolve() / "launch.sh")],
                "args": list(arguments),
            },
        },
    }
    return _dump_yaml(job)


JOB_WRITERS: Mapping[str, Callable[[Plan, Path, Sequence[str]], str]] = {
    "skypilot": render_skypilot_task,
    "trainjob": render_train_job,
}


def _only_gpu_kind(plan: Plan) -> str:
    """The kind of GPU of all nodes; "" if ranks compute on CPUs. Raises UserError if nodes differ."""
    kinds = list(dict.fromkeys(g["device"]["kind"] for g in plan.cluster.get("groups") or [plan.cluster]))
    if len(kinds) > 1:
        raise UserError(
            f"one job has the same devices on every node, but this plan has {' and '.join(kinds)}",
            str(plan.cluster.get("name", "")),
            "start launch.sh on each node, the nodes in this order",
        )
    return gpu_kind_of(plan)


def _job_name(directory: Path) -> str:
    """A name for a job from the plan's folder: lower-case letters, digits and hyphens, from a letter on."""
    words = re.sub(r"[^a-z0-9]+", "-", directory.name.lower())
    return f"secc-{words}"[:_NAME_LENGTH].strip("-")


def _dump_yaml(content: Mapping[str, Any]) -> str:
    return yaml.dump(content, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=110)
