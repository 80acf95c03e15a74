"""The options of a run: those of a plan's `run.py`, which `secc run` passes on."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from secc.runtime.errors import UserError
from secc.runtime.model.init_weights import InitDirectories
from secc.runtime.monitoring.trackers import parse_tracker_names
from secc.runtime.schedule.scheduler import SCHEDULE_ORDERS
from secc.runtime.training.best_checkpoint import BestMetric
from secc.runtime.training.run_settings import CHANGEABLE

_MOST = 2**63 - 1  # steps, seeds and samples travel as 64-bit integers


@dataclass(frozen=True)
class RunOptions:
    """Options of a run; None means not given.

    Without `steps` and `epochs` a run has 100 steps; without `seed` it uses the checkpoint's seed or 0; an
    empty `init` means weights from the seed. `resume` "auto" continues from `save` if it holds checkpoints.
    """

    steps: int | None = None
    epochs: int | None = None
    log_dir: Path | None = None
    seed: int | None = None
    init: InitDirectories = ()
    clip: float | None = None
    save: Path | None = None
    save_every: int | None = None
    keep: int | None = None
    keep_every: int | None = None
    save_async: bool = True
    replicate: bool = False
    resume: Path | Literal["auto"] | None = None
    trace: Path | None = None
    comm: str = "channels"
    share_gpus: bool = False
    debug_comm: bool = False
    shuffle: bool = False
    skip_bad_samples: bool = False
    workers: int = 1
    recorders: int | None = None
    order: str = "wavefront"
    max_restarts: int = 0
    on_loss: Literal["wait", "replan", "stop"] = "wait"
    rejoin_after: float = 60.0
    allow_change: tuple[str, ...] = ()
    on_nan: Literal["stop", "skip", "warn"] = "stop"
    hang_timeout: float | None = 300.0
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_secret: Path | None = None
    emulate: Path | None = None
    run_ahead: float | None = None
    first_check: bool = True
    eval_every: int | None = None
    eval_batch: int | None = None
    eval_only: Literal["trained", "ema"] | None = None
    keep_best: BestMetric | None = None
    patience: int | None = None
    ema: float | None = None
    report_to: tuple[str, ...] = ()

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates the model."""
        return self.eval_every is not None or self.eval_only is not None


_HELP = "see `secc run --help`, or `secc eval --help`"


class _OptionParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, remedy=_HELP)


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of run.py. It raises UserError instead of printing its usage and
    exiting."""
    p = _OptionParser(
        prog="run.py",
        description="Train the plan's model; start it with torchrun, or by `secc run PLAN/`.",
        allow_abbrev=False,
    )
    p.add_argument("--steps", type=_at_least(1), help="the number of the last step (default 100)")
    p.add_argument(
        "--epochs",
        type=_at_least(1),
        metavar="E",
        help="end after E epochs; the last step has the samples that are left",
    )
    p.add_argument(
        "--log-dir", type=_path, metavar="D", help="where metrics.jsonl is appended to (default: PLAN/logs)"
    )
    p.add_argument(
        "--seed",
        type=_at_least(0),
        metavar="S",
        help="seed of weights, data and random ops (default 0, or the checkpoint's)",
    )
    text = (
        "weights: as model() makes them, or safetensors files of the model in DIR, or of the component at"
        " PATH (may be repeated)"
    )
    p.add_argument("--init", action="append", default=[], metavar="seed|DIR|PATH=DIR", help=text)
    p.add_argument("--clip", type=_positive, metavar="X", help="clip the gradients' global norm to X")
    p.add_argument(
        "--save", type=_path, metavar="DIR", help="write checkpoints there, including one of the last step"
    )
    p.add_argument("--save-every", type=_at_least(1), metavar="K", help="write one after every K steps")
    p.add_argument(
        "--keep", type=_at_least(1), metavar="N", help="keep only the newest N checkpoints (default: all)"
    )
    text = "with --keep: also keep for good the checkpoints of every M-th step"
    p.add_argument("--keep-every", type=_at_least(1), metavar="M", help=text)
    text = (
        "write checkpoints of --save-every in a process of their own while the ranks train on; needs host"
        " memory for a copy (default; --no-save-async: within the step)"
    )
    p.add_argument("--save-async", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = (
        "keep a copy of the newest checkpoint in the launcher's memory, and on several nodes in the next"
        " node's, so that ranks that start again after a failure read nothing from --save (with `secc run`)"
    )
    p.add_argument("--replicate", action="store_true", help=text)
    text = (
        "continue from a checkpoint, or from the latest whole one in DIR; auto: from the latest in --save, or"
        " from the beginning if it holds none"
    )
    p.add_argument("--resume", type=_parse_resume, metavar="DIR|auto", help=text)
    p.add_argument("--trace", type=_path, metavar="FILE", help="write a Chrome trace of all ranks")
    text = (
        "how messages between sections are sent: each in its own channel, or in rounds that all ranks enter"
        " in one order (default channels)"
    )
    p.add_argument("--comm", choices=("channels", "rounds"), default="channels", help=text)
    p.add_argument(
        "--debug-comm",
        action="store_true",
        help="send and check a header with every message between sections",
    )
    text = (
        "let several ranks compute on one GPU where this machine has fewer GPUs than ranks; messages then"
        " travel through the host's memory (slow: to try a plan, not to train)"
    )
    p.add_argument("--share-gpus", action="store_true", help=text)
    p.add_argument("--shuffle", action="store_true", help="shuffle the dataset in every epoch")
    p.add_argument(
        "--skip-bad-samples",
        action="store_true",
        help="skip samples that do not load, and name them",
    )
    p.add_argument(
        "--workers",
        type=_at_least(0),
        default=1,
        metavar="N",
        help="loader processes per rank (default 1; 0: the rank itself loads)",
    )
    text = (
        "processes per rank that re-record data-dependent glue (default: from the cores per rank; 0: the"
        " loader process does it)"
    )
    p.add_argument("--recorders", type=_at_least(0), metavar="N", help=text)
    text = (
        "after a rank was lost, with --max-restarts: start all ranks again (wait), go on with the others"
        " under a plan for fewer ranks (replan, with `secc run`), or end (stop; default wait)"
    )
    p.add_argument("--on-loss", choices=("wait", "replan", "stop"), default="wait", help=text)
    text = "with --on-loss replan: try a lost rank again after S seconds (default 60)"
    p.add_argument("--rejoin-after", type=_not_negative, default=60.0, metavar="S", help=text)
    text = "resume although NAME is not as in the run that wrote the checkpoint (may be repeated)"
    p.add_argument("--allow-change", action="append", default=[], choices=CHANGEABLE, help=text)
    text = (
        "if loss or gradients are not finite: end before the optimizer writes them (stop), leave the update"
        " out (skip), or go on (warn); each names the first module (default stop)"
    )
    p.add_argument("--on-nan", choices=("stop", "skip", "warn"), default="stop", help=text)
    text = (
        "end the run, with the cause and all stacks, when a rank takes S seconds more than a median step for"
        " one instruction, or 6 times as long to load or save (default 300; 0: no limit)"
    )
    p.add_argument("--hang-timeout", type=_parse_timeout, default=300.0, metavar="S", help=text)
    text = (
        "after a failure start all ranks again, N times at most, from the newest checkpoint in --save"
        " (default 0; under torchrun, give torchrun's --max-restarts)"
    )
    p.add_argument("--max-restarts", type=_at_least(0), default=0, metavar="N", help=text)
    text = "run on N nodes: the same command on each, with its --node-rank (default 1)"
    p.add_argument("--nnodes", type=_at_least(1), metavar="N", help=text)
    p.add_argument("--node-rank", type=_at_least(0), metavar="K", help="the number of this node, from 0")
    text = "with --nnodes: the address of node 0 and a free port; it listens there and nowhere else"
    p.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help=text)
    text = "with --nnodes: a file with a secret that whoever connects to node 0 has to know"
    p.add_argument("--rdzv-secret", type=_path, metavar="FILE", help=text)
    p.add_argument(
        "--order",
        choices=SCHEDULE_ORDERS,
        default="wavefront",
        help="the order of a global batch's samples (default wavefront)",
    )
    text = (
        "memory per rank for results that frozen sections compute in advance for the next step (default: the"
        " plan's; 0: none)"
    )
    p.add_argument("--run-ahead", type=_not_negative, metavar="GIB", help=text)
    text = (
        "do not compare the plan with plain PyTorch on a few samples before the first step, which is done for"
        " models so small that every rank builds them"
    )
    p.add_argument("--no-first-check", dest="first_check", action="store_false", help=text)
    p.add_argument(
        "--eval-every",
        type=_at_least(1),
        metavar="N",
        help="evaluate on eval_dataset() after every N steps and after the last one",
    )
    p.add_argument(
        "--eval-batch",
        type=_at_least(1),
        metavar="N",
        help="samples that are evaluated together (default: the global batch); results do not depend on it",
    )
    text = (
        "keep the checkpoint with the lowest (:max: highest) value of a metric in DIR/best of --save DIR, as"
        " in eval/loss or eval/accuracy:max"
    )
    p.add_argument("--keep-best", type=_parse_metric, metavar="METRIC", help=text)
    text = "end training after N evaluations in a row without a better value of the --keep-best metric"
    p.add_argument("--patience", type=_at_least(1), metavar="N", help=text)
    text = (
        "keep an exponential moving average of the trained weights with this decay, as 0.999; it is saved"
        " with checkpoints, and evaluations use it"
    )
    p.add_argument("--ema", type=_decay, metavar="D", help=text)
    text = (
        "report metrics to experiment trackers: tensorboard, wandb, mlflow, trackio (offline without a key)"
    )
    p.add_argument("--report-to", type=parse_tracker_names, default=(), metavar="A,B", help=text)
    p.add_argument("--eval-only", choices=("trained", "ema"), help=argparse.SUPPRESS)  # secc eval
    p.add_argument(
        "--emulate",
        type=Path,
        metavar="FILE",
        help="sleep instead of training, for the times in FILE, which `secc run` writes",
    )
    return p


def parse_options(arguments: Sequence[str]) -> RunOptions:
    """Parses the arguments of run.py. Raises UserError for invalid options."""
    values = vars(make_parser().parse_args(list(arguments)))
    init, values["allow_change"] = values.pop("init"), tuple(values["allow_change"])
    if values["nnodes"] is None:
        for option in ("--node-rank", "--rdzv-endpoint", "--rdzv-secret"):
            if values[option.removeprefix("--").replace("-", "_")] is not None:
                remedy = "give the number of nodes, or leave the option out on one machine"
                raise UserError(f"{option} needs --nnodes N", remedy=remedy)
        values["nnodes"] = 1
    options = RunOptions(**values, init=() if init == ["seed"] else tuple(map(_parse_init, init)))
    if options.steps is not None and options.epochs is not None:
        raise UserError(
            "--steps and --epochs were both given, and each says where the run ends",
            remedy="give one of them",
        )
    if options.emulate is not None and options.nnodes > 1:
        raise UserError("--emulate runs on one machine", remedy="leave out --nnodes")
    needy = {
        "--save-every": options.save_every is not None,
        "--keep": options.keep is not None,
        "--resume auto": options.resume == "auto",
        "--on-loss replan": options.on_loss == "replan",
        "--keep-best": options.keep_best is not None,
        "--replicate": options.replicate,
    }
    for option in (name for name, given in needy.items() if given and options.save is None):
        raise UserError(f"{option} needs --save DIR", remedy="give the directory for checkpoints")
    if options.keep_best is not None and not options.evaluates:
        raise UserError("--keep-best needs --eval-every N", remedy="say how often to evaluate")
    if options.keep_every is not None and options.keep is None:
        raise UserError("--keep-every needs --keep N", remedy="without it all checkpoints are kept")
    if options.patience is not None and options.keep_best is None:
        raise UserError("--patience needs --keep-best METRIC", remedy="say which metric counts")
    return options


def _parse_metric(text: str) -> BestMetric:
    try:
        return BestMetric.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _decay(text: str) -> float:
    if not 0 <= _number(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and less than 1")
    return float(text)


def _parse_resume(text: str) -> Path | Literal["auto"]:
    return "auto" if text == "auto" else _path(text)


def parse_path(text: str, option: str) -> Path:
    """Parses the path that an option of a command gives. Raises UserError if it is empty."""
    try:
        return _path(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"argument {option}: {error}", remedy=_HELP) from None


def _path(text: str) -> Path:
    if not text:  # as of a variable of a script that is not set; Path() would be the working directory
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def _parse_init(text: str) -> tuple[str, Path]:
    """Parses DIR, or PATH=DIR if PATH could be a module path and "PATH=DIR" is not a directory."""
    path, equals, directory = text.partition("=")
    named = (
        bool(equals)
        and all(part.isidentifier() or part.isdecimal() for part in path.split("."))
        and not Path(text).exists()
    )
    return (path, Path(directory)) if named else ("", Path(text))


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!a}") from None
        if number < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}")
        if number > _MOST:
            raise argparse.ArgumentTypeError(f"must be at most {_MOST}")
        return number

    return parse


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!a}") from None


def _not_negative(text: str) -> float:
    if not _number(text) >= 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return float(text)


def _parse_timeout(text: str) -> float | None:
    if math.isinf(_not_negative(text)):
        raise argparse.ArgumentTypeError("must be a number of seconds; 0 stands for no limit")
    return _not_negative(text) or None


def _positive(text: str) -> float:
    if not _number(text) > 0:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return float(text)
