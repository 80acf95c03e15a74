"""Compares training on this machine with the simulator, and secc's order of samples with the dataset's.

    python -m tools.bench_training predicted                  both examples: real steps over simulated ones,
                                                              with costs measured here
    python -m tools.bench_training order --shares 0.33 0.5    the same plan in both orders, run in turn, for
                                                              tools/models/mixed_captions.py

Ranks have one thread. `predicted` profiles the model's blocks and the machine's links first, compiles with
both, and compares each step with the simulation of the same samples: median and quartiles over the steps of a
run after the first ones, and all these steps over all simulated ones, as measured and at the processor's
speed while blocks were timed. That speed is the gauge's (`secc.profile.speed_gauge`), taken between steps,
averaged over the run; ranks are weighted by what they compute. `order` runs the two orders in turn, and gives
the ratio of the medians of the runs' median step times, the ratio of their means at equal speed, and the
simulated ratio.

With `--keep DIR` costs, plan and runs stay there, by model and share. A further call adds runs; `--runs 0`
only makes the plan, or shows existing runs. Prints Markdown; `--json FILE` writes the table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from statistics import fmean, median, quantiles

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from secc.cost.model.measured_costs import read_measured_costs
from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions
from secc.driver.exactness_check import check_exactness
from secc.profile.machine_probe import probe_machine, to_cluster_yaml
from secc.profile.measured_training import read_step_times, train_plan
from secc.profile.model_profile import profile_model
from secc.report.html_page import report_page
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.plan.schema import Plan
from secc.simulate.events import SimulatedStep
from secc.simulate.global_batches import load_global_batches
from secc.simulate.simulator import simulate
from secc.simulate.steady_state import consecutive_steps
from tools.benchmark_table import BenchmarkTable, add_json_option

REPOSITORY = Path(__file__).parent.parent
EXAMPLE_MODELS = (REPOSITORY / "examples" / "vlm_digits.py", REPOSITORY / "examples" / "distill_text.py")
MIXED_MODEL = Path(__file__).parent / "models" / "mixed_captions.py"
COMPARED_ORDERS = ("wavefront", "dataset")
PREDICTED_COLUMNS = (
    *("model", "sections", "run", "simulated, ms", "real over simulated"),
    *("mean", "gauge", "mean at equal speed"),
)
ORDER_COLUMNS = (
    *("model", "P(image)", "wavefront, s", "dataset order, s", "ratio"),
    *(
        "wavefront at equal speed, s",
        "dataset order at equal speed, s",
        "ratio at equal speed",
        "ratio simulated",
    ),
)
_WARM_UP_STEPS = 4  # steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("predicted", "order"))
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5, help="of each order")
    parser.add_argument(
        "--shares", nargs="*", default=["0.33", "0.5"], help="of samples with images, for order"
    )
    parser.add_argument("--set", nargs="*", default=[], help="pinned choices, as in secc compile")
    parser.add_argument("--strategy", default="apart")
    parser.add_argument(
        "--keep",
        type=Path,
        help="a folder for costs, plans and runs, which further calls go on with",
        metavar="DIR",
    )
    add_json_option(parser)
    options = parser.parse_args()
    if options.what == "predicted":
        table = BenchmarkTable(
            PREDICTED_COLUMNS,
            "Real steps over simulated ones with costs measured here; median (quartiles) of the steps. "
            "`gauge`: the time of a fixed piece of work during the run over its time in the profile; the "
            "last column divides by it.",
            options.json,
        )
        for model in options.models or EXAMPLE_MODELS:
            with _open_folder(options.keep, model.stem) as folder:
                compare_with_simulation(model, folder, options, table)
        return
    table = BenchmarkTable(
        ORDER_COLUMNS,
        "One plan in secc's order (wavefront) and in the dataset's: seconds of a step, median of the runs "
        "(least to most), as measured and at equal processor speed.",
        options.json,
    )
    for share in options.shares:
        os.environ["IMAGE_SHARE"] = share
        for model in options.models or [MIXED_MODEL]:
            with _open_folder(options.keep, f"{model.stem}_{share}") as folder:
                compare_orders(model, share, folder, options, table)


@contextmanager
def _open_folder(keep: Path | None, name: str) -> Iterator[Path]:
    """Context manager: a folder `name` in `keep` that stays, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    (keep / name).mkdir(parents=True, exist_ok=True)
    yield keep / name


def compile_with_measured_costs(model: Path, folder: Path, options: argparse.Namespace) -> Path:
    """Compiles a plan with costs measured here, for a cluster that is this machine; existing plans and costs
    are reused."""
    costs, cluster = folder / "costs.json", folder / "here.yaml"
    if (folder / "plan").exists():
        return folder / "plan"
    if not costs.exists():
        costs.write_text(profile_model(model, False, 18, 5, _ignore_progress, options.ranks).costs.to_json())
        cluster.write_text(to_cluster_yaml(replace(probe_machine(_ignore_progress), devices=options.ranks)))
    compile_options = CompileOptions(
        cluster=str(cluster),
        global_batch=options.global_batch,
        strategy=options.strategy,
        set=tuple(options.set),
        costs=str(costs),
    )
    compiled = check_exactness(compile_model(model, compile_options))
    compiled.write_plan(folder / "plan", report_page)
    return folder / "plan"


def _ignore_progress(_: str) -> None: ...


def simulate_run(
    directory: Path, plan: Plan, steps: int, order: str = "wavefront"
) -> Iterator[SimulatedStep]:
    """Yields the simulated steps of a run, in which frozen sections may prefetch."""
    batches = list(islice(load_global_batches(directory, plan, steps=steps), steps))
    for samples, programs in consecutive_steps(plan, batches, order):
        yield simulate(plan, samples, programs)


def computing_ns_by_rank(steps: Sequence[SimulatedStep]) -> list[float]:
    """Returns the total computing time of each rank."""
    totals = [0.0] * steps[0].plan.world_size
    for c in chain(*(step.compute for step in steps)):
        totals[c.rank] += c.end - c.start
    return totals


def _existing_logs(folder: Path, name: str) -> list[Path]:
    """Returns the log folders of existing runs, in order."""
    return sorted(folder.glob(f"{name}[0-9]*"), key=lambda path: int(path.name.removeprefix(name)))


def _new_logs(folder: Path, name: str, count: int) -> list[Path]:
    """Returns the log folders of `count` further runs."""
    first = len(_existing_logs(folder, name))
    return [folder / f"{name}{first + i}" for i in range(count)]


def compare_with_simulation(
    model: Path, folder: Path, options: argparse.Namespace, table: BenchmarkTable
) -> None:
    """Adds a row for each run of a model: its real steps over the simulated ones."""
    directory = compile_with_measured_costs(model, folder, options)
    plan, gauge_ns = load_plan(directory), read_measured_costs(folder / "costs.json").gauge_ns
    steps = list(simulate_run(directory, plan, options.steps))
    expected, computing = [step.end / 1e9 for step in steps], computing_ns_by_rank(steps[_WARM_UP_STEPS:])
    for log in _new_logs(folder, "run", options.runs):
        train_plan(directory, plan.world_size, options.steps, log)
    runs = [read_step_times(log, plan.world_size) for log in _existing_logs(folder, "run")]
    if not runs:
        print(f"{model.name} on {describe_sections(plan)}: no runs yet", file=sys.stderr)
        return
    ratios = [[f / e for f, e in zip(run.seconds, expected, strict=True)][_WARM_UP_STEPS:] for run in runs]
    means = [sum(run.seconds[_WARM_UP_STEPS:]) / sum(expected[_WARM_UP_STEPS:]) for run in runs]
    slowdowns = [run.mean_gauge_ns(_WARM_UP_STEPS, computing) / gauge_ns for run in runs]
    at_equal_speed = [mean / s for mean, s in zip(means, slowdowns, strict=True)]
    simulated = f"{1e3 * median(expected[_WARM_UP_STEPS:]):.1f}"
    rows = [
        (str(i + 1), *row) for i, row in enumerate(zip(ratios, means, slowdowns, at_equal_speed, strict=True))
    ]
    rows.append(("all", [*chain(*ratios)], median(means), median(slowdowns), median(at_equal_speed)))
    for run, steps_over, *figures in rows:
        cells = (_format_quartiles(steps_over), *(f"{figure:.3f}" for figure in figures))
        table.add_row(model.stem, describe_sections(plan), run, simulated, *cells)


def _format_quartiles(values: Sequence[float]) -> str:
    """Formats the median and the quartiles around it."""
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.3f} ({low:.2f} to {high:.2f})"


def compare_orders(
    model: Path, share: str, folder: Path, options: argparse.Namespace, table: BenchmarkTable
) -> None:
    """Adds a row: step times in the dataset's order over those in secc's order, of real runs and
    simulated."""
    directory = compile_with_measured_costs(model, folder, options)
    plan, gauge_ns = load_plan(directory), read_measured_costs(folder / "costs.json").gauge_ns
    for logs in zip(*(_new_logs(folder, order, options.runs) for order in COMPARED_ORDERS), strict=True):
        for order, log in zip(COMPARED_ORDERS, logs, strict=True):
            train_plan(directory, plan.world_size, options.steps, log, ["--order", order])
    runs = {
        order: [read_step_times(log, plan.world_size) for log in _existing_logs(folder, order)]
        for order in COMPARED_ORDERS
    }
    if not all(runs.values()):
        print(f"{model.name} on {describe_sections(plan)}: no runs yet", file=sys.stderr)
        return
    steps = {
        order: list(simulate_run(directory, plan, options.steps, order))[_WARM_UP_STEPS:]
        for order in COMPARED_ORDERS
    }
    slower = {
        order: [
            run.mean_gauge_ns(_WARM_UP_STEPS, computing_ns_by_rank(steps[order])) / gauge_ns for run in found
        ]
        for order, found in runs.items()
    }
    medians = {
        order: [median(run.seconds[_WARM_UP_STEPS:]) for run in found] for order, found in runs.items()
    }
    evened = {
        order: [
            fmean(run.seconds[_WARM_UP_STEPS:]) / s for run, s in zip(runs[order], slower[order], strict=True)
        ]
        for order in COMPARED_ORDERS
    }
    expected = {order: [median(step.end / 1e9 for step in some)] for order, some in steps.items()}
    measured = [_format_seconds(medians[order]) for order in COMPARED_ORDERS]
    at_equal_speed = [_format_seconds(evened[order]) for order in COMPARED_ORDERS]
    ratios = [f"{_median_ratio(seconds):.3f}" for seconds in (medians, evened, expected)]
    table.add_row(model.stem, share, *measured, ratios[0], *at_equal_speed, *ratios[1:])


def _median_ratio(seconds: Mapping[str, Sequence[float]]) -> float:
    """Returns the dataset order's median over that of the wavefront."""
    wavefront, dataset = (median(seconds[order]) for order in COMPARED_ORDERS)
    return dataset / wavefront


def _format_seconds(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.3f} ({min(seconds):.2f} to {max(seconds):.2f})"


def describe_sections(plan: Plan) -> str:
    """Lists sections with their data-parallel size and micro-batch."""
    return ", ".join(f"{s.name} {s.mesh.dp}x{s.micro_batch}" for s in plan.sections)


if __name__ == "__main__":
    main()
