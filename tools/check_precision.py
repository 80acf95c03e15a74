"""Measures errors of fused operators and models against float64, compared with those of unfused PyTorch.

    python tools/check_precision.py                     every operator at toy sizes, then the models of
                                                        tests/models and examples
    python tools/check_precision.py MODEL.py ...        only these models
    python tools/check_precision.py --dtype float16

Weights and inputs of a model are rounded to the dtype first, so that only arithmetic differs. The sections of
the plan run in this process, as `secc check` runs them, on one batch of dataset samples. The error of the
gradients is that of one long vector of all of them. On a CPU the operators are their PyTorch references, or,
with `TRITON_INTERPRET=1`, the Triton kernels in the interpreter. Exit code 1 if the error of a model is more
than ERROR_SLACK times that without fusion.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.runtime.kernels import backend
from secc.runtime.training.eager_reference import LossAndGradients, run_eager
from secc.runtime.training.one_rank_plan import OneRankPlan
from tools.bench_kernels import ERROR_SLACK, check_precision
from tools.benchmark_table import BenchmarkTable, add_json_option
from tools.kernel_cases import TINY_SIZES, loss_cases, memory_bound_cases

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL_NAMES = ("qwen_distil", "llava_tiny", "whisper_tiny", "internvl_tiny", "voxtral_tiny", "two_modalities")
EXAMPLE_NAMES = ("vlm_digits",)
ROUNDED_MODEL_SOURCE = """
import importlib.util, sys, torch
sys.path.insert(0, {folder!r})
_spec = importlib.util.spec_from_file_location({name!r}, {path!r})
_original = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_original)
globals().update({{k: v for k, v in vars(_original).items() if not k.startswith("__")}})
def model():
    return _original.model().to(torch.{dtype})
class _Rounded(torch.utils.data.Dataset):
    def __init__(self):
        self.whole = _original.dataset()
    def __len__(self):
        return len(self.whole)
    def __getitem__(self, i):
        cast = lambda v: v.to(torch.{dtype}) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        return {{k: cast(v) for k, v in self.whole[i].items()}}
def dataset():
    return _Rounded()
"""


@dataclass(frozen=True)
class ModelErrors:
    """Relative errors of a model's loss and of all its gradients together."""

    loss: float
    gradient: float

    @staticmethod
    def measure_errors(result: LossAndGradients, exact: LossAndGradients) -> ModelErrors:
        distance = norm = 0.0
        for name, expected in exact.gradients.items():
            got = result.gradients[name]
            if expected is not None and got is not None:
                distance += float((got.double() - expected.double()).square().sum())
                norm += float(expected.double().square().sum())
        return ModelErrors(abs(result.loss - exact.loss) / abs(exact.loss), (distance / norm) ** 0.5)


@dataclass(frozen=True)
class PrecisionRow:
    """One model: the fusion rules that matched, and the errors with and without fusion."""

    model: str
    rules: tuple[str, ...]
    fused: ModelErrors
    unfused: ModelErrors

    @property
    def is_fine(self) -> bool:
        """Whether fusion increases the errors by at most ERROR_SLACK."""
        return (
            self.fused.gradient <= ERROR_SLACK * self.unfused.gradient
            and self.fused.loss <= ERROR_SLACK * self.unfused.loss + 1e-3
        )


def measure_model(path: Path, dtype: torch.dtype, folder: Path) -> PrecisionRow:
    """Measure the errors of a model file in `dtype`. Raises UserError if it cannot be compiled."""
    file = folder / f"{path.stem}_rounded.py"
    name = str(dtype).removeprefix("torch.")
    file.write_text(
        ROUNDED_MODEL_SOURCE.format(folder=str(path.parent), name=path.stem, path=str(path), dtype=name)
    )
    compiled = compile_model(file, CompileOptions(cluster="local:2", fuse=True))
    torch.manual_seed(0)
    model = compiled.user.build_model()
    samples = compiled.survey.compose_batches(compiled.survey.micro_batch_patterns()[0])[-1]
    batch = compiled.user.collate(samples)
    exact = run_eager(copy.deepcopy(model).double(), _to_float64(batch))
    rules = tuple(dict.fromkeys(f.rule for f in compiled.plan.fusions if not f.why))
    return PrecisionRow(
        path.stem,
        rules,
        ModelErrors.measure_errors(_run_planned(compiled, model, samples, folder), exact),
        ModelErrors.measure_errors(run_eager(model, batch), exact),
    )


def _run_planned(
    compiled: CompiledPlan, model: nn.Module, samples: Sequence[Mapping[str, Any]], folder: Path
) -> LossAndGradients:
    directory = folder / f"{compiled.user.path.stem}_plan"
    compiled.write_sections(directory)
    return OneRankPlan(compiled.plan, directory, compiled.user, model).run_step(samples, len(samples))


def _to_float64(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in batch.items()
    }


def print_report(paths: Sequence[Path], dtype: torch.dtype, json_file: Path | None) -> bool:
    """Prints a table of the models and writes it to `json_file`, if any. Returns whether all are fine."""
    name = str(dtype).removeprefix("torch.")
    print()
    table = BenchmarkTable(
        (f"model in {name}", "rules", "loss, fused (unfused)", "gradients, fused (unfused)"),
        "Relative errors against float64; in brackets without fusion.",
        json_file,
    )
    all_fine = True
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            try:
                row = measure_model(path, dtype, Path(folder))
            except UserError as error:
                table.add_row(f"`{path.stem}`", error.message, "", "")
                continue
            a, b = row.fused, row.unfused
            verdict = "" if row.is_fine else " WORSE"
            loss, gradients = (f"{x:.1e} ({y:.1e})" for x, y in ((a.loss, b.loss), (a.gradient, b.gradient)))
            table.add_row(f"`{row.model}`", ", ".join(row.rules), loss, gradients + verdict)
            all_fine &= row.is_fine
    return all_fine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", type=Path, help="model files (default: those of tests/models and examples)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add_json_option(parser)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    paths = arguments.models or [
        *(REPOSITORY / "tests" / "models" / f"{name}.py" for name in MODEL_NAMES),
        *(REPOSITORY / "examples" / f"{name}.py" for name in EXAMPLE_NAMES),
    ]
    all_fine = True
    if not arguments.models:
        device = torch.device(
            "cuda" if torch.cuda.is_available() and not backend.KERNELS_INTERPRETED else "cpu"
        )
        all_fine = check_precision([*loss_cases(), *memory_bound_cases()], TINY_SIZES, dtype, device)
    all_fine &= print_report([p.resolve() for p in paths], dtype, arguments.json)
    sys.exit(0 if all_fine else 1)


if __name__ == "__main__":
    main()
