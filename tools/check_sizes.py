"""Fails if a Python file is longer than 500 lines or a function longer than 60: long ones hide what they do.

python tools/check_sizes.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("secc", "passes", "runtime", "tools", "examples", "tests")
FILE_LINES, FUNCTION_LINES = 500, 60


def sources(root: Path) -> Iterator[Path]:
    """Every Python file of the repository once: links to folders are not followed."""
    for folder in FOLDERS:
        yield from sorted(
            p for p in (root / folder).rglob("*.py") if not any(q.is_symlink() for q in p.parents)
        )


def too_long(path: Path) -> Iterator[str]:
    """One line for each thing in `path` that is too long."""
    text = path.read_text()
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, more than {FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, more than {FUNCTION_LINES}"


def main() -> int:
    complaints = [line for path in sources(ROOT) for line in too_long(path)]
    print("\n".join(complaints) or "no file or function is too long")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
