"""Training on this machine beside what the simulator says of it, and in the wavefront's order beside the dataset's.

python -m tools.bench_training predicted                      both examples: real steps over simulated ones, with costs measured here
python -m tools.bench_training order --shares 0.33 0.5        the same plan in both orders, run in turn: tools/models/mixed_captions.py

Ranks have one thread. `predicted` profiles the model's blocks and the machine's links first, compiles with both, and compares each
step with the simulation of the same samples: median and quartiles over the steps of a run behind the first ones, as they are, and at the
processor's speed at which blocks were timed. That speed is the gauge's (`secc.profile.speed`), taken between steps, in the median over
the run. `order` runs the two orders in turn, and gives the ratio of the medians of the runs' step times, beside the simulated one.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from statistics import median, quantiles

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from secc.check import checked
from secc.compiler import Options, compile_model
from secc.cost.table import read
from secc.profile.links import probe, to_yaml
from secc.profile.model import profile_model
from secc.profile.train import train
from secc.report.page import page
from secc.runtime.plan import Plan, load
from secc.simulate.batches import global_batches
from secc.simulate.machine import simulate
from secc.simulate.steady import consecutive
from tools.ranks import metrics, run

ROOT = Path(__file__).parent.parent
EXAMPLES = (ROOT / "examples" / "vlm_digits.py", ROOT / "examples" / "distill_text.py")
MIXED = Path(__file__).parent / "models" / "mixed_captions.py"
ORDERS = ("wavefront", "dataset")
_WARM = 4  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predicted", "order"))
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5, help="of each order")
    parser.add_argument("--shares", nargs="*", default=["0.33", "0.5"], help="of samples with images, for order")
    parser.add_argument("--set", nargs="*", default=[], help="pinned choices, as in secc compile")
    parser.add_argument("--strategy", default="apart")
    options = parser.parse_args()
    if options.what == "predicted":
        for model in options.models or EXAMPLES:
            with tempfile.TemporaryDirectory() as folder:
                print(predicted(model, Path(folder), options), flush=True)
    else:
        for share in options.shares:
            os.environ["IMAGE_SHARE"] = share
            for model in options.models or [MIXED]:
                with tempfile.TemporaryDirectory() as folder:
                    print(f"P(image) {share}: {ordered(model, Path(folder), options)}", flush=True)


def compiled(model: Path, folder: Path, options: argparse.Namespace) -> Path:
    """A plan with costs measured here, for a cluster that is this machine."""
    costs, cluster = folder / "costs.json", folder / "here.yaml"
    costs.write_text(profile_model(model, False, 18, 5, _quiet, options.ranks).table.to_json())
    cluster.write_text(to_yaml(replace(probe(_quiet), devices=options.ranks)))
    wanted = Options(
        cluster=str(cluster), global_batch=options.global_batch, strategy=options.strategy, set=tuple(options.set), costs=str(costs)
    )
    made = checked(compile_model(model, wanted))
    made.write(folder / "plan", page)
    return folder / "plan"


def _quiet(_: str) -> None: ...


def simulated(directory: Path, plan: Plan, steps: int, order: str = "wavefront") -> Iterator[float]:
    """Seconds of each step of a run, in which frozen sections may run ahead."""
    batches = list(islice(global_batches(directory, plan, steps=steps), steps))
    for samples, programs in consecutive(plan, batches, order):
        yield simulate(plan, samples, programs).end / 1e9


def measured(directory: Path, plan: Plan, steps: int, log: Path, *arguments: str) -> list[float]:
    """Seconds of each step."""
    run(directory, plan.world_size, ["--steps", str(steps), "--log-dir", str(log), *arguments])
    return [m["step_time_s"] for m in metrics(log)]


def predicted(model: Path, folder: Path, options: argparse.Namespace) -> str:
    """What a model's real steps took, over what the simulator says."""
    directory = compiled(model, folder, options)
    plan, gauge_ns = load(directory), read(folder / "costs.json").gauge_ns
    expected = list(simulated(directory, plan, options.steps))
    runs = [train(directory, plan.world_size, options.steps, folder / f"run{i}") for i in range(options.runs)]
    ratios = [[f / e for f, e in zip(run.seconds, expected, strict=True)][_WARM:] for run in runs]
    slower = [run.gauge_ns(_WARM) / gauge_ns for run in runs]
    evened = [[r / s for r in some] for some, s in zip(ratios, slower, strict=True)]
    rows = [
        f"| {i + 1} | {_quartiles(r)} | {s:.2f} | {_quartiles(e)} |" for i, (r, s, e) in enumerate(zip(ratios, slower, evened, strict=True))
    ]
    every = f"| all | {_quartiles([*chain(*ratios)])} | {median(slower):.2f} | {_quartiles([*chain(*evened)])} |"
    head = f"{model.name} on {described(plan)}: simulated {1e3 * median(expected[_WARM:]):.1f} ms a step, the gauge {gauge_ns / 1e6:.2f} ms"
    table = ["| run | real over simulated | gauge | at equal speed |", "| --- | --- | --- | --- |", *rows, every]
    return "\n".join([head, "", *table, ""])


def _quartiles(values: Sequence[float]) -> str:
    """The median, and the quartiles around it."""
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.3f} ({low:.2f} to {high:.2f})"


def ordered(model: Path, folder: Path, options: argparse.Namespace) -> str:
    """The dataset's order over the wavefront's: step times of real runs, and simulated ones."""
    directory = compiled(model, folder, options)
    plan = load(directory)
    runs: dict[str, list[float]] = {order: [] for order in ORDERS}
    for i in range(options.runs):
        for order in ORDERS:
            times = measured(directory, plan, options.steps, folder / f"{order}{i}", "--order", order)
            runs[order].append(median(times[_WARM:]))
    real = [median(runs[order]) for order in ORDERS]
    model_s = [median(list(simulated(directory, plan, options.steps, order))[_WARM:]) for order in ORDERS]
    each = "; ".join(f"{order} {', '.join(f'{t:.3f}' for t in times)}" for order, times in runs.items())
    ratios = f"{real[1] / real[0]:.3f} (simulated {model_s[1] / model_s[0]:.3f})"
    return f"{described(plan)}: dataset order over wavefront {ratios}; medians of runs, s: {each}"


def described(plan: Plan) -> str:
    """Sections with the numbers of their ranks."""
    return ", ".join(f"{s.name} {s.mesh.dp}x{s.micro_batch}" for s in plan.sections)


if __name__ == "__main__":
    main()
