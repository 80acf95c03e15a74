"""What PyTorch's autograd is doing in this thread."""

from __future__ import annotations

import torch


def is_in_backward() -> bool:
    """Whether a backward runs, so that a forward that runs now is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
