"""Compiles the reference workloads for their clusters, one at a time.

    python -m tools.bench_workloads [ID ...]     prints a table; `--json FILE` writes it

`--keep DIR` leaves the plans in folders of their names, as `tools.bench_baselines` takes them. Each
compilation is a process, so that its peak memory can be measured. `cpu` is processor time of all its threads
and children, `wall` the time that passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.benchmark_table import BenchmarkTable, add_json_option

WORKLOADS = {  # cluster and global batch
    "vlm_7b": ("4x8xH100", 512),
    "vlm_72b": ("32x8xH100", 512),
    "vlm_72b_xl": ("128x8xH100", 2048),
    "vlm_big_encoder": ("32x8xH100", 512),
    "omni_7b": ("8x8xH100", 512),
    "llava_frozen": ("2x8xH100", 256),
    "llava_align": ("2x8xH100", 256),
    "kd_32b_8b": ("8x8xH100", 512),
    "kd_32b_1_7b": ("8x8xH100", 512),
    "kd_vlm": ("16x8xH100", 512),
    "kd_moe_235b_30b": ("32x8xH100", 512),
    "kd_moe_235b_8b": ("32x8xH100", 512),
    "kd_dsv3": ("128x8xH100", 2048),
    "vlm_moe_30b": ("8x8xH100", 512),
    "omni_moe_30b": ("8x8xH100", 512),
    "vlm_video_8b": ("4x8xH100", 128),
    "long_32b": ("32x8xH100", 512),
    "kd_long": ("16x8xH100", 128),
}
WORKLOAD_COLUMNS = (
    "workload",
    "cluster",
    "wall, s",
    "cpu, s",
    "peak, GiB",
    "status",
    "gap",
    "step, s",
    "sections: ranks dp/pp/tp, micro-batch, extras",
)
COMPILE_COMMAND = "import sys; from secc.cli import main; main()"


def compile_workload(name: str, directory: Path) -> tuple[float, float, float, dict[str, Any] | str]:
    """Compiles a workload into `directory`; returns wall seconds, CPU seconds, peak GiB, and plan.json or the
    end of the error output."""
    cluster, batch = WORKLOADS[name]
    model = Path(__file__).parent / "workloads" / f"{name}.py"
    plan = directory / name
    command = [
        sys.executable,
        "-c",
        COMPILE_COMMAND,
        "compile",
        str(model),
        "-o",
        str(plan),
        "--cluster",
        cluster,
        "--global-batch",
        str(batch),
    ]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    text = plan / "plan.json"
    result = json.loads(text.read_text()) if text.exists() else said[-300:]
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20, result


def workload_row(name: str, directory: Path) -> list[str]:
    """The cells of one workload."""
    wall, cpu, peak, plan = compile_workload(name, directory)
    cells = [name, WORKLOADS[name][0], f"{wall:.0f}", f"{cpu:.0f}", f"{peak:.1f}"]
    if isinstance(plan, str):
        return [*cells, plan.strip().replace("\n", " "), "", "", ""]
    solver, prediction = plan["solver"], plan["prediction"]
    sections = "; ".join(f"{n}: {_describe_section(s)}" for n, s in plan["sections"].items())
    return [*cells, solver["status"], f"{solver['gap']:.2%}", f"{prediction['step_time_s']:.2f}", sections]


def _describe_section(section: dict[str, Any]) -> str:
    mesh = section["mesh"]
    extras = [section[key] for key in ("recompute", "sharding") if section[key] != "none"]
    extras += [f"offload {section['offload']}"] if section.get("offload", "none") != "none" else []
    degrees = [f"{key} {mesh[key]}" for key in ("cp", "ep") if mesh.get(key, 1) > 1]
    extras = [*degrees, *extras]
    text = f"{len(mesh['ranks'])} {mesh['dp']}/{mesh['pp']}/{mesh['tp']}, {section['micro_batch']}"
    return ", ".join([text, *extras])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="ID", default=list(WORKLOADS))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the plans in this folder")
    add_json_option(parser)
    options = parser.parse_args()
    about = "Compilation of the reference workloads: time, processor time, peak memory, and the plan."
    table = BenchmarkTable(WORKLOAD_COLUMNS, about, options.json)
    with tempfile.TemporaryDirectory() as directory:
        for name in options.workloads:
            table.add_row(*workload_row(name, options.keep or Path(directory)))


if __name__ == "__main__":
    main()
