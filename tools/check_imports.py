"""Checks that importing secc is fast, and that its folders cannot be imported under their short names.

    python tools/check_imports.py

`import secc` is what editors, shell completion and `secc --help` wait for, so it must import neither torch
nor the solver. A rank imports only `secc.runtime`, where only torch, triton and safetensors may be installed.
`passes` and `runtime` are folders of the checkout; importing them as top-level packages would create second
copies of their classes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER_PACKAGES = ("jinja2", "ortools", "rich", "sympy", "typer", "xdsl")
FORBIDDEN_IMPORTS: dict[str, tuple[str, ...]] = {
    "secc": ("torch", *COMPILER_PACKAGES),
    "secc.errors": ("torch", *COMPILER_PACKAGES),
    "secc.cli": ("torch", "ortools", "sympy", "xdsl", "jinja2"),
}
NOT_IMPORTABLE = ("passes", "runtime")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter in the repository's root."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def heavy_import_complaint(module: str, forbidden: tuple[str, ...]) -> str:
    """A complaint if importing `module` imports one of `forbidden`, else ""."""
    result = run_python(f"import sys, {module}; print(*[m for m in {forbidden!r} if m in sys.modules])")
    if result.returncode:
        return f"import {module} fails: {result.stderr.strip().splitlines()[-1]}"
    return f"import {module} brings {result.stdout.strip()}" if result.stdout.strip() else ""


def importable_complaint(name: str) -> str:
    """A complaint if the folder `name` can be imported as a top-level package, else ""."""
    return (
        f"import {name} works, but must say that it is secc.{name}"
        if run_python(f"import {name}").returncode == 0
        else ""
    )


def main() -> int:
    complaints = [
        heavy_import_complaint(module, forbidden) for module, forbidden in FORBIDDEN_IMPORTS.items()
    ] + [importable_complaint(name) for name in NOT_IMPORTABLE]
    complaints = [c for c in complaints if c]
    print("\n".join(complaints) or "imports are light, and folders have one name")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
