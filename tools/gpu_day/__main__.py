"""Runs the checks that need a GPU: see `tools/gpu_day.sh`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tools.gpu_day.checks import CHECKS, run_all, run_here


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/gpu_day.sh", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_day"), help="folder of results and page.md")
    parser.add_argument("--minutes", type=float, default=9.5, help="end after so many minutes (default 9.5)")
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="*", choices=names, default=[], help="only these checks")
    parser.add_argument("--dry", action="store_true", help="the same code on the CPU at small sizes")
    parser.add_argument("--run", choices=names, help="run one check in this process")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        print("error: no GPU found; --dry tries the code on the CPU", file=sys.stderr)
        return 2
    if options.run:
        run_here(options.run, options.out.resolve(), options.dry)
        return 0
    return 0 if run_all(options.out.resolve(), options.dry, options.minutes, options.only) else 1


if __name__ == "__main__":
    sys.exit(main())
