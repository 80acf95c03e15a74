"""Pass pipelines: the registry of passes, their text form, and running them with verification, dumps and
timing.

A pass is a frozen dataclass in its own file of `passes/`; its fields are its options. The registry is a table
of names, so that neither `import secc` nor `secc opt --help` loads a pass that is not used.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass, PassPipeline
from xdsl.utils.arg_spec import ArgSpec
from xdsl.utils.exceptions import ArgSpecParseError

from secc.errors import UserError
from secc.ir.text_io.module_text import make_context, print_module, verify_module

PASS_CLASSES = {
    "canonicalize": "canonicalize.Canonicalize",
    "dce": "dce.DeadCodeElimination",
    "normalize-loss": "normalize_loss.NormalizeLoss",
    "fuse-linear-loss": "fuse_linear_loss.FuseLinearLoss",
    "annotate-patterns": "annotate_patterns.AnnotatePatterns",
    "infer-modes": "infer_modes.InferModes",
    "fuse-blocks": "fuse_blocks.FuseBlocks",
    "coarsen": "coarsen.Coarsen",
    "annotate-costs": "annotate_costs.AnnotateCosts",
    "sink-boundaries": "sink_boundaries.SinkBoundaries",
    "allocate": "allocate.Allocate",
    "place": "place.Place",
    "split-stages": "split_stages.SplitStages",
    "shard-tensors": "shard_tensors.ShardTensors",
    "shard-logits": "shard_logits.ShardLogits",
    "insert-transfers": "insert_transfers.InsertTransfers",
    "lower": "lower.Lower",
    "drop-conversions": "drop_conversions.DropConversions",
}  # in the order of the default pipeline; then those that only `secc opt` runs


def load_pass(name: str) -> type[ModulePass]:
    """Returns the class of a pass by its kebab-case name. Raises UserError for a registry entry that names
    no class."""
    module, _, cls = PASS_CLASSES[name].partition(".")
    place = f"secc.passes.{module}"
    try:
        return getattr(importlib.import_module(place), cls)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != place:
            raise  # the module lacks something that it imports
        message = f"the pass {name!r} is registered as {PASS_CLASSES[name]!r}, which is not in secc/passes"
        raise UserError(message, "PASS_CLASSES", "write MODULE.CLASS of a file in passes/") from None


def parse_pipeline(text: str) -> tuple[ModulePass, ...]:
    """Returns the passes of a pipeline string such as `canonicalize,coarsen{max-sections=4}`.

    Raises UserError for an unknown pass or option.
    """
    loaders: dict[str, Callable[[], type[ModulePass]]] = {
        name: lambda name=name: load_pass(name) for name in PASS_CLASSES
    }
    try:
        return PassPipeline.parse_spec(loaders, text).passes
    except (ValueError, ArgSpecParseError) as error:
        raise UserError(
            f"cannot read the pipeline {text!r}: {error}", remedy=f"passes are {', '.join(PASS_CLASSES)}"
        ) from None


@dataclass
class PipelineRun:
    """What happened while a pipeline ran: (pass name, IR text) and (pass name, seconds) for each pass."""

    dumps: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    seconds: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])


def run_passes(
    module: ModuleOp,
    passes: Sequence[ModulePass],
    *,
    dump: bool = False,
    report_progress: Callable[[str], None] | None = None,
    done: Sequence[str] = (),
) -> PipelineRun:
    """Applies passes in order and verifies the module after each.

    report_progress: called with each pass's name before it starts. With `dump`, the text after each pass is
    kept, headed by the pipeline that reproduces it; `done` names the passes that were applied to `module`
    before.
    """
    record = PipelineRun()
    applied = list(done)
    for step in passes:
        if report_progress is not None:
            report_progress(step.name)
        start = time.perf_counter()
        _apply_and_verify(step, module)
        record.seconds.append((step.name, time.perf_counter() - start))
        applied.append(format_pass(step))
        if dump:
            record.dumps.append((step.name, format_dump_header(applied) + print_module(module)))
    return record


def _apply_and_verify(step: ModulePass, module: ModuleOp) -> None:
    """Applies one pass. A UserError of the pass concerns the user's model; a module that it leaves broken is
    a defect of secc and raises RuntimeError."""
    step.apply(make_context(), module)
    try:
        verify_module(module)
    except UserError as error:
        raise RuntimeError(f"pass {step.name} left IR that breaks a rule: {error.message}") from error


def format_pass(step: ModulePass) -> str:
    """Returns a pass with its non-default options as in a pipeline string: `coarsen{max-sections=4}`."""
    spec = step.spec()
    return str(
        ArgSpec(spec.name, {name.replace("_", "-"): values for name, values in spec.parameters.items()})
    )


def format_dump_header(done: Sequence[str]) -> str:
    """Returns the first line of a dump: the `secc opt` command that reproduces it from the capture."""
    return f"// secc opt -p '{','.join(done)}'\n" if done else ""


def parse_dump_header(text: str) -> list[str]:
    """Returns the pipeline text in the header of a dump as a list of one; [] if there is no header."""
    found = re.match(r"// secc opt -p '([^'\n]*)'\n", text)
    return [found[1]] if found else []
