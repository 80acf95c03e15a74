"""`secc compile MODEL.py -o PLAN/`: compiles a model into a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from secc.cli.console import out, print_json, print_table, show_progress
from secc.runtime.host.gc_control import pause_gc, slow_gc

if TYPE_CHECKING:
    from secc.runtime.plan.schema import Plan

MODEL_ARGUMENT = Annotated[
    Path, typer.Argument(help="the model file: plain PyTorch with model() and dataset()", metavar="MODEL.py")
]
ACCEPT_OPTION = Annotated[
    list[str] | None, typer.Option(help="accept an approximation of the loss: balance-loss", metavar="NAME")
]
BALANCE_OPTION = Annotated[
    str,
    typer.Option(
        help="the balance loss of a mixture of experts: global (of the whole batch, one more forward a step)"
        " or micro-batch (of each alone)",
        metavar="WAY",
    ),
]
GLOBAL_SUMS_OPTION = Annotated[
    bool,
    typer.Option(
        "--global-sums",
        help="the loss is a function of sums over the batch (the root of a mean, Dice over the batch):"
        " computed from sums of the global batch, with one more forward a step",
    ),
]
GATHER_OPTION = Annotated[
    list[str] | None,
    typer.Option(
        help="a block with rows that the loss compares with those of other samples (contrastive losses):"
        " computed on the rows of the global batch, with one more forward a step",
        metavar="NAME",
    ),
]
WHOLE_BATCH_OPTION = Annotated[
    list[str] | None,
    typer.Option(
        help="a block that couples the samples of a batch (batch norm, codebooks): its section computes all"
        " samples of a step at once",
        metavar="NAME",
    ),
]
JSON_OPTION = Annotated[bool, typer.Option("--json", help="print the result as JSON, and no progress")]

# Reported by the compiler in this order; other steps are parts of these.
COMPILE_STAGES = (
    "read the model file",
    "build the model on the meta device",
    "draw samples",
    "capture",
    "build the model here",
    "compare widths",
    "measure blocks",
    "find possible tp of blocks",
    "passes",
    "allocate",
    "lower",
    "compare with the eager model",
    "simulate a step",
)

_FUSE_FLAGS = typer.Option(
    "--fuse/--no-fuse", help="use fused operators in the model (default: on GPUs)", show_default=False
)
FUSE_OPTION = Annotated[bool | None, _FUSE_FLAGS]


@slow_gc()
def command(
    model: MODEL_ARGUMENT,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="the plan directory to write", metavar="PLAN/")
    ],
    cluster: Annotated[
        str, typer.Option(help="local, local:N (CPU processes), 4x8xH100 (nodes x devices x kind), or a file")
    ] = "local",
    global_batch: Annotated[int, typer.Option(help="samples in an optimizer step")] = 32,
    strategy: Annotated[
        str, typer.Option(help="auto, apart (own devices), colocate (all sections on all ranks), uniform")
    ] = "auto",
    objective: Annotated[
        str, typer.Option(help="time: fastest step; gpus: fewest devices for a step of at most --step-time")
    ] = "time",
    step_time: Annotated[
        float, typer.Option(help="maximum seconds of a step, for --objective gpus", metavar="SECONDS")
    ] = 0.0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="pin a choice: SECTION.KEY=VALUE", metavar="S.K=V")
    ] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(help="define a section: NAME=module.path+module.path", metavar="N=PATHS"),
    ] = None,
    max_sections: Annotated[int | None, typer.Option(help="maximum number of sections")] = None,
    stats_samples: Annotated[
        int, typer.Option(help="samples of dataset() to draw for statistics and patterns")
    ] = 64,
    stats: Annotated[
        Path | None,
        typer.Option(help="dataset statistics written by secc stats", metavar="FILE"),
    ] = None,
    skip_bad_samples: Annotated[bool, typer.Option(help="skip drawn samples that fail to load")] = False,
    widths: Annotated[
        str,
        typer.Option(
            help=(
                "padding of micro-batches: own (to their own width), global (to that of the "
                "global batch), auto"
            )
        ),
    ] = "auto",
    pack: Annotated[
        str,
        typer.Option(
            help="samples of a micro-batch side by side in one row, without padding: never, always, or auto"
            " (where the simulated step is shorter)"
        ),
    ] = "never",
    fuse: FUSE_OPTION = None,
    no_fuse_rule: Annotated[
        list[str] | None, typer.Option(help="disable a fusion rule", metavar="RULE")
    ] = None,
    explain_fusion: Annotated[
        bool, typer.Option("--explain-fusion", help="print what was fused, and why other matches were not")
    ] = False,
    accept: ACCEPT_OPTION = None,
    balance_loss: BALANCE_OPTION = "",
    global_sums: GLOBAL_SUMS_OPTION = False,
    gather: GATHER_OPTION = None,
    whole_batch: WHOLE_BATCH_OPTION = None,
    costs: Annotated[
        str, typer.Option(help="file of measured costs, written by secc profile", metavar="FILE")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="bf16: compute in bf16, with master weights, gradient sums and optimizer in float32"
        ),
    ] = "",
    run_ahead: Annotated[
        str,
        typer.Option(
            help="memory per rank for results that frozen sections prefetch for the next step: GIB or auto"
        ),
    ] = "auto",
    check: Annotated[
        bool, typer.Option(help="compare the plan with the eager model, if it fits on this machine")
    ] = True,
    json: JSON_OPTION = False,
) -> None:
    """Compile a model into a plan that torchrun executes."""
    with pause_gc(exempt=True):  # objects created by imports are never garbage
        from secc.api.plan import compile_to_directory
        from secc.driver.compile_options import CompileOptions
        from secc.report.plan_brief import plan_brief
        from secc.runtime.data.epoch_order import repeated_samples_text
    options = CompileOptions(
        cluster=cluster,
        global_batch=global_batch,
        strategy=strategy,
        objective=objective,
        step_time=step_time,
        set=tuple(set_ or ()),
        sections=tuple(section or ()),
        max_sections=max_sections,
        stats_samples=stats_samples,
        widths=widths,
        pack=pack,
        fuse=fuse,
        without=tuple(no_fuse_rule or ()),
        accept=tuple(accept or ()),
        balance_loss=balance_loss,
        global_sums=global_sums,
        gather=tuple(gather or ()),
        whole_batch=tuple(whole_batch or ()),
        stats=stats,
        skip_bad_samples=skip_bad_samples,
        costs=costs,
        dtype=dtype,
        run_ahead=run_ahead,
    )
    with show_progress(json, COMPILE_STAGES) as show:
        compiled = compile_to_directory(model, options, output, check, show)
    plan = compiled.plan
    if json:
        from secc.runtime.plan.schema import plan_to_dict

        print_json(plan_to_dict(plan))
        return
    if explain_fusion:
        _print_fusion(plan)
    samples, batch = compiled.user.sample_count, plan.global_batch
    few = (repeated_samples_text(samples, batch),) if samples and samples < batch else ()
    for line in plan_brief(plan, output, few):
        out.print(line, soft_wrap=True, markup=False)


def _print_fusion(plan: Plan) -> None:
    from secc.report.plan_tables import fused_table, unfused_table

    tables = [t for t in (fused_table(plan), unfused_table(plan)) if t.rows]
    for table in tables:
        print_table(table)
    if not tables:
        out.print("  fusion is off, or its rules matched nothing")
