"""Compiles models with every sentence of secc replaced by another text, and prints plans and IR as JSON.

Run as `python reworded_compile.py KEEP|REPLACE MODEL CLUSTER [MODEL CLUSTER ...]`. With REPLACE, secc's
modules are loaded through an import hook that rewrites their string constants before they are compiled: texts
of three words or more, parts of f-strings included, docstrings and generated code left out. So a decision
that reads a sentence (a prefix, a pattern, a word in a message) goes another way.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

SENTENCE = re.compile(r"(?:\b[A-Za-z]{2,}[,:;']? ){2,}[A-Za-z]{2,}")  # three words in a row
MARK = "reworded:"
CODE = ("import ", "from ")  # lines of generated Python
CODE_MODULES = {"secc.frontend.fusion.fusion_rules"}  # their texts are patterns of Python code


def is_sentence(text: str) -> bool:
    return SENTENCE.search(text) is not None and not text.lstrip().startswith(CODE)


def reword(text: str) -> str:
    """Another text, the same for equal texts, with none of the words of the first."""
    return f" {MARK}{hashlib.sha256(text.encode()).hexdigest()[:12]} "


class RewordSentences(ast.NodeTransformer):
    """Replaces the sentences of a module, but for docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and is_sentence(node.value):
            return ast.copy_location(ast.Constant(reword(node.value)), node)
        return node


class RewordingLoader(importlib.machinery.SourceFileLoader):
    """Loads a module of secc with its sentences replaced."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = ast.parse(Path(path).read_text())
        tree = tree if fullname in CODE_MODULES else RewordSentences().visit(tree)
        return compile(ast.fix_missing_locations(tree), path, "exec")


class RewordingFinder(importlib.abc.MetaPathFinder):
    """Finds modules of secc for `RewordingLoader`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] != "secc":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if (
            spec is None
            or spec.origin is None
            or not isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        ):
            return spec
        spec.loader = RewordingLoader(fullname, spec.origin)
        return spec


def without_sentences(value: Any) -> Any:
    """A plan's data with a mark for each text that people read: three words or more, or already reworded."""
    match value:
        case dict():
            return {str(without_sentences(key)): without_sentences(entry) for key, entry in value.items()}
        case list() | tuple():
            return [without_sentences(entry) for entry in value]
        case str() if is_sentence(value) or MARK in value:
            return "a text"
        case _:
            return value


def mask_quoted(quoted: re.Match[str]) -> str:
    """A quoted text of the IR, masked if people read it; data that is kept as JSON keeps its form."""
    return '"a text"' if is_sentence(quoted[0]) or MARK in quoted[0] else quoted[0]


def main(mode: str, *jobs: str) -> None:
    if mode == "REPLACE":
        sys.meta_path.insert(0, RewordingFinder())
    from secc.driver.compile import compile_model
    from secc.driver.compile_options import CompileOptions

    results: list[dict[str, Any]] = []
    for model, cluster in zip(jobs[::2], jobs[1::2], strict=True):
        compiled = compile_model(model, CompileOptions(cluster=cluster, global_batch=16))
        plan = asdict(compiled.plan) | {"hash": ""}  # of the IR's text, notes for people included
        dumps = {name: re.sub(r'"[^"\n]*"', mask_quoted, text) for name, text in compiled.dumps}
        results.append({"plan": without_sentences(plan), "ir": dumps})
    print(json.dumps(results, sort_keys=True, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
