"""`secc launch-files`: a SkyPilot task and a TrainJob with the nodes, devices and command of a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from secc.cli import main
from secc.codegen.job_files import JOB_WRITERS
from secc.errors import UserError
from secc.runtime.plan.plan_file import parse_plan
from secc.runtime.plan.schema import plan_to_json

GOLDEN_PLAN = Path(__file__).parent.parent / "codegen" / "golden" / "plan.json.golden"


def write_plan(directory: Path, nodes: int = 1, **device: str) -> Path:
    """Write the pinned plan for three ranks, on a number of nodes with other devices than its own."""
    plan = parse_plan(json.loads(GOLDEN_PLAN.read_text()))
    model = replace(plan.model, path="/models/llava.py")
    directory.mkdir()
    devices = {"per_node": 3 // nodes, "device": {**plan.cluster["device"], **device}}
    changed = replace(plan, model=model, cluster={**plan.cluster, "nodes": nodes, **devices})
    (directory / "plan.json").write_text(plan_to_json(changed))
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A plan for three CPU ranks, in a folder with a name that YAML and shells must quote."""
    return write_plan(tmp_path / "my: plan's #1")


@pytest.fixture
def gpu_directory(tmp_path: Path) -> Path:
    """A plan for three nodes of one A100."""
    return write_plan(tmp_path / "gpus", nodes=3, kind="A100", backend="cuda")


def write_job(plan: Path, scheduler: str, *arguments: str) -> dict[str, Any]:
    """Write a job file next to a plan; returns its content."""
    file = plan.parent / f"{scheduler}.yaml"
    with pytest.raises(SystemExit) as end:
        main(["launch-files", str(plan), "--for", scheduler, "-o", str(file), "--", *arguments])
    assert end.value.code in (0, None)
    return yaml.safe_load(file.read_text())


def test_skypilot_task_on_gpus(gpu_directory: Path) -> None:
    task = write_job(gpu_directory, "skypilot", "--steps", "5", "--save", "a b")
    assert task["name"] == "secc-gpus"
    assert task["num_nodes"] == 3
    assert task["resources"] == {"accelerators": {"A100-80GB": 1}}
    mounts = ["/models", str(gpu_directory.resolve())]
    assert task["file_mounts"] == {path: path for path in mounts}
    *exports, launch = task["run"].splitlines()
    assert "NODE_RANK=$SKYPILOT_NODE_RANK" in exports[0]
    assert "SKYPILOT_NODE_IPS" in exports[1]
    assert launch == f"bash {gpu_directory.resolve()}/launch.sh --steps 5 --save 'a b'"


def test_skypilot_task_on_cpus_quotes_paths(directory: Path) -> None:
    task = write_job(directory, "skypilot")
    assert task["name"] == "secc-my-plan-s-1"
    assert task["resources"] == {"cpus": "3+"}
    assert str(directory.resolve()) in task["file_mounts"]
    assert """plan'"'"'s #1/launch.sh'""" in task["run"]


def test_train_job(gpu_directory: Path, directory: Path) -> None:
    job = write_job(gpu_directory, "trainjob", "--resume", "auto", "--save", "runs")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"] == {"name": "secc-gpus"}
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 1)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "1"}
    assert trainer["command"] == ["bash", f"{gpu_directory.resolve()}/launch.sh"]
    assert trainer["args"] == ["--resume", "auto", "--save", "runs"]
    on_cpus = write_job(directory, "trainjob")["spec"]["trainer"]
    assert on_cpus["resourcesPerNode"]["requests"] == {"cpu": "3"}


@pytest.mark.slow
def test_kubeflow_knows_every_field_of_a_train_job(gpu_directory: Path, directory: Path) -> None:
    """By the models that Kubeflow generates from its API: what they do not know they leave out."""
    models = pytest.importorskip("kubeflow_trainer_api.models")

    def without_defaults(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: without_defaults(v) for k, v in value.items() if v is not None}

    for plan in (gpu_directory, directory):
        job = write_job(plan, "trainjob", "--steps", "3")
        assert without_defaults(models.TrainerV1alpha1TrainJob.from_dict(job).to_dict()) == job


@pytest.mark.slow
def test_skypilot_accepts_the_task(gpu_directory: Path, directory: Path) -> None:
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    schema = schemas.get_task_schema()
    for plan in (gpu_directory, directory):
        task = write_job(plan, "skypilot", "--steps", "3")
        jsonschema.validate(task, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**task, "nodes": 2}, schema)


def test_nodes_of_several_kinds_are_refused() -> None:
    plan = parse_plan(json.loads(GOLDEN_PLAN.read_text()))
    groups = [{"nodes": 1, "device": {"kind": kind, "backend": "cuda"}} for kind in ("H100", "A800")]
    mixed = replace(plan, cluster={**plan.cluster, "nodes": 2, "groups": groups})
    for render in JOB_WRITERS.values():
        with pytest.raises(UserError, match="H100 and A800"):
            render(mixed, Path("plan"), [])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["PLAN", "--for", "ray"], ["--for", "ray", "skypilot or trainjob"]),
        (["nowhere", "--for", "skypilot"], ["nowhere"]),
        (["PLAN", "--for", "skypilot", "--", "--resume", "auto"], ["--resume auto needs --save"]),
        (["PLAN", "--for", "skypilot", "--", "--stepps", "1"], ["--stepps"]),
        (["PLAN", "--for", "trainjob", "-o", "PLAN/no/folder.yaml"], ["cannot write", "another -o"]),
        (["PLAN"], ["--for"]),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], parts: list[str], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["launch-files", *(a.replace("PLAN", str(directory)) for a in arguments)])
    message = capsys.readouterr().err
    assert end.value.code == 2, message
    assert "Traceback" not in message
    for part in parts:
        assert part in message
