"""Glue in the IR that is re-recorded for each micro-batch: an op `recorded.LABEL` makes one tensor for a
block, of what it is made from.

The graph's attribute `recorded` holds, as JSON, what ranks must know to record
(`secc.runtime.plan.schema.Recorded`). A case with such glue has the attribute `rerecord`.
"""

from __future__ import annotations

import json
from typing import Any

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Attribute, Operation

RECORDED_ATTRIBUTE = "recorded"  # of a graph
RERECORD_ATTRIBUTE = "rerecord"  # of a case, and of a body that lower cuts out of one
FALLBACK_ATTRIBUTE = "spare"  # of a fallback case, for branches that no capture took; it may be dropped
RECORDED_PREFIX = "recorded."  # of the target of a glue op


def recorded_label(op: Operation) -> str | None:
    """The label of the tensor that a glue op with recorded ops makes, None for every other op."""
    target = op.properties.get("target")
    if not isinstance(target, StringAttr) or not target.data.startswith(RECORDED_PREFIX):
        return None
    return target.data.removeprefix(RECORDED_PREFIX)


def read_recorded_cases(attribute: Attribute | None) -> list[dict[str, Any]]:
    """The entries of a graph's attribute `recorded`, [] where it has none."""
    return json.loads(attribute.data) if isinstance(attribute, StringAttr) else []
