"""`sections/fused.py`: the rewritten code of the user's modules, as readable functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from secc.codegen.render import render_template
from secc.ir.dialect.ops import GraphOp, RewriteOp, strings_of
from secc.runtime.plan import schema

_TORCH_NAMES = ("device", "inf", "nan")


def plan_rewrites(graph: GraphOp) -> tuple[schema.CodeRewrite, ...]:
    """The plan's rewrites."""
    return tuple(
        schema.CodeRewrite(
            op.sym.data,
            op.cls.data,
            op.method.data,
            op.function.data if op.function else "",
            strings_of(op.modules),
            tuple(int(line.split(" ", 1)[0]) for line in strings_of(op.code)),
        )
        for op in graph.rewrites
    )


def render_fused_module(graph: GraphOp) -> str:
    """The text of `sections/fused.py`."""
    functions = [_function_context(op) for op in graph.rewrites]
    text = "\n".join(line for f in functions for line in f["body"])
    named = [n for n in _TORCH_NAMES if re.search(rf"(?<![\w.]){n}\b(?!\s*=)", text)]
    imports = ["import torch"] if re.search(r"\btorch\.", text) else []
    imports += [f"from torch import {', '.join(named)}"] if named else []
    imports += [""] if imports else []
    return render_template(
        "fused.py.j2",
        imports=[*imports, "from secc.runtime.fusion import operators as fused"],
        functions=functions,
    )


def _function_context(op: RewriteOp) -> dict[str, str | Sequence[str]]:
    lines = [line.split(" ", 1) for line in strings_of(op.code)]
    paths, place = strings_of(op.modules), op.where.data if op.where else ""
    site = (
        f"`{op.function.data}` in `{op.cls.data}.{op.method.data}`"
        if op.function
        else f"`{op.cls.data}.{op.method.data}`"
    )
    rules = ", ".join(dict.fromkeys(strings_of(op.rules)))
    about = (
        f"{site} ({place}) by {rules}: {paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}."
    )
    return {
        "head": lines[0][1],
        "about": about,
        "body": [f"{text}  # {number}" for number, text in lines[1:]],
    }
