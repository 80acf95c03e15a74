"""Shows that a change leaves plans as they were: compiles many models before and after it, and compares them.

python -m tools.compare_plans compile FOLDER [NAME ...]   plans of the zoo and the reference workloads
python -m tools.compare_plans compare BEFORE AFTER        what differs between two such folders

Run the first command in a checkout of each version with the same path for models (`--models`), since a plan
names its model file. Digests, hashes, versions, sentences (reasons, notes) and lines of source files are not
compared.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.bench_workloads import WORKLOADS
from tools.zoo_models import entries

NOT_COMPARED = re.compile(r"^\.(version|hash|digest)$")
SENTENCES_AND_LINES = re.compile(
    r"\.(why|reason|where|call)$|^\.checks\.(notes|whole|widths)|^\.reasons\.|^\.fusions"
)
ZOO_CLUSTER, ZOO_GLOBAL_BATCH = "local:3", 12
COMPILE_SECONDS = 600


def compile_plans(folder: Path, models: Path, names: list[str]) -> int:
    """Compiles each model into FOLDER/NAME, skipping those that are there; returns how many failed."""
    models.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, tuple[Path, list[str]]] = {}
    for entry in entries():
        path = models / f"{entry.name}.py"
        path.write_text(entry.source())
        arguments = ["--cluster", ZOO_CLUSTER, "--global-batch", str(ZOO_GLOBAL_BATCH), "--no-check"]
        jobs[entry.name] = path, arguments
    for name, (cluster, batch) in WORKLOADS.items():
        path = Path(__file__).parent / "workloads" / f"{name}.py"
        jobs[name] = path, ["--cluster", cluster, "--global-batch", str(batch)]
    failed = 0
    for name in names or jobs:
        path, arguments = jobs[name]
        if (folder / name / "plan.json").exists():
            continue
        command = [sys.executable, "-m", "secc", "compile", str(path), "-o", str(folder / name), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        failed += result.returncode != 0
        last = result.stderr.strip().splitlines()[-1:] if result.returncode else ["compiled"]
        print(f"{name:24} {' '.join(last)}", flush=True)
    return failed


def iter_differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (path in plan.json, value before, value after) for each value that differs."""
    if NOT_COMPARED.search(path):
        return
    if isinstance(before, str) and isinstance(after, str) and SENTENCES_AND_LINES.search(path):
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if key not in before or key not in after:
                yield f"{path}.{key}", before.get(key, "absent"), after.get(key, "absent")
            else:
                yield from iter_differences(before[key], after[key], f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from iter_differences(old, new, f"{path}[{i}]")
    elif before != after:
        yield path, before, after


def compare_plans(before: Path, after: Path) -> int:
    """Prints what differs for each plan of `before`; returns how many differ or are missing in `after`."""
    plans = sorted(p.parent.name for p in before.glob("*/plan.json"))
    unequal = 0
    for name in plans:
        if not (after / name / "plan.json").exists():
            unequal += 1
            print(f"{name}: no plan in {after}")
            continue
        old, new = (json.loads((folder / name / "plan.json").read_text()) for folder in (before, after))
        differences = list(iter_differences(old, new))
        unequal += bool(differences)
        for path, was, now in differences:
            print(f"{name}{path}: {str(was)[:80]} -> {str(now)[:80]}")
    print(f"{len(plans) - unequal} of {len(plans)} plans are equal")
    return unequal


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("compile")
    making.add_argument("folder", type=Path)
    making.add_argument("names", nargs="*", help="default: all")
    making.add_argument("--models", type=Path, default=Path("runs/compare_plans"), help="where models go")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compile":
        return 1 if compile_plans(options.folder, options.models, options.names) else 0
    return 1 if compare_plans(options.before, options.after) else 0


if __name__ == "__main__":
    sys.exit(main())
