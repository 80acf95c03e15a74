"""How precise fused operators and models with them are: errors against float64, beside those of unfused
PyTorch in the same dtype.

    python tools/check_precision.py                        every operator at toy sizes, then the models of
    tests/models and examples python tools/check_precision.py MODEL.py …             these models only python
    tools/check_precision.py --dtype float16

A model's weights and inputs are rounded to the dtype first: what differs is arithmetic alone. The plan's
sections run in this process, as `secc check` runs them, on one batch of the dataset's samples; the error of
all gradients is that of one long vector. On a CPU the operators are their references, with
`TRITON_INTERPRET=1` the Triton kernels through the interpreter. Exit code 1 if a model errs more than `SLACK`
times as much as without fusion.
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

from secc.driver.compile import Compiled, Options, compile_model
from secc.driver.exactness_check import OneRank
from secc.errors import UserError
from secc.frontend.dataset.eager_reference import Result, eager
from secc.runtime.kernels import backend
from tools.bench_kernels import SLACK, check
from tools.kernel_cases import TINY, entries, losses

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("qwen_distil", "llava_tiny", "whisper_tiny", "internvl_tiny", "voxtral_tiny", "two_modalities")
EXAMPLES = ("vlm_digits",)
ROUNDED = """
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
class Errors:
    """Relative errors of a model's loss and of all its gradients."""

    loss: float
    gradient: float

    @staticmethod
    def of(found: Result, exact: Result) -> Errors:
        distance = norm = 0.0
        for name, wanted in exact.gradients.items():
            got = found.gradients[name]
            if wanted is not None and got is not None:
                distance += float((got.double() - wanted.double()).square().sum())
                norm += float(wanted.double().square().sum())
        return Errors(abs(found.loss - exact.loss) / abs(exact.loss), (distance / norm) ** 0.5)


@dataclass(frozen=True)
class Row:
    """One model: its rules that matched, and the errors with and without fusion."""

    model: str
    rules: tuple[str, ...]
    fused: Errors
    unfused: Errors

    @property
    def fine(self) -> bool:
        return (
            self.fused.gradient <= SLACK * self.unfused.gradient
            and self.fused.loss <= SLACK * self.unfused.loss + 1e-3
        )


def measured(path: Path, dtype: torch.dtype, folder: Path) -> Row:
    """The errors of one model file in `dtype`. Raises UserError for a model that cannot be compiled."""
    file = folder / f"{path.stem}_rounded.py"
    name = str(dtype).removeprefix("torch.")
    file.write_text(ROUNDED.format(folder=str(path.parent), name=path.stem, path=str(path), dtype=name))
    compiled = compile_model(file, Options(cluster="local:2", fuse=True))
    torch.manual_seed(0)
    model = compiled.user.model()
    samples = compiled.survey.batches(compiled.survey.unions()[0])[-1]
    batch = compiled.user.collate(samples)
    exact = eager(copy.deepcopy(model).double(), _wide(batch))
    rules = tuple(dict.fromkeys(f.rule for f in compiled.plan.fusions if not f.why))
    return Row(
        path.stem,
        rules,
        Errors.of(_planned(compiled, model, samples, folder), exact),
        Errors.of(eager(model, batch), exact),
    )


def _planned(
    compiled: Compiled, model: nn.Module, samples: Sequence[Mapping[str, Any]], folder: Path
) -> Result:
    directory = folder / f"{compiled.user.path.stem}_plan"
    compiled.write_sections(directory)
    return OneRank(compiled.plan, directory, compiled.user, model).step(samples, most=len(samples))


def _wide(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in batch.items()
    }


def report(paths: Sequence[Path], dtype: torch.dtype) -> bool:
    """Print a table of the models; whether all are fine."""
    name = str(dtype).removeprefix("torch.")
    print(
        f"\n| model in {name} | rules | loss, fused (unfused) | gradients, fused (unfused) |\n| --- | --- | --- | --- |"
    )
    right = True
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            try:
                row = measured(path, dtype, Path(folder))
            except UserError as error:
                print(f"| `{path.stem}` | {error.message} | | |")
                continue
            a, b = row.fused, row.unfused
            verdict = "" if row.fine else " WORSE"
            print(
                f"| `{row.model}` | {', '.join(row.rules)} | {a.loss:.1e} ({b.loss:.1e}) | {a.gradient:.1e} ({b.gradient:.1e}){verdict} |",
                flush=True,
            )
            right &= row.fine
    return right


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", type=Path, help="model files (default: those of tests/models and examples)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    paths = arguments.models or [
        *(ROOT / "tests" / "models" / f"{name}.py" for name in MODELS),
        *(ROOT / "examples" / f"{name}.py" for name in EXAMPLES),
    ]
    right = True
    if not arguments.models:
        device = torch.device("cuda" if torch.cuda.is_available() and not backend.INTERPRETED else "cpu")
        right = check([*losses(), *entries()], TINY, dtype, device)
    right &= report([p.resolve() for p in paths], dtype)
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
