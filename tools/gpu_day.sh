#!/usr/bin/env bash
# Checks and measures on a machine with a GPU everything that needs one. Installs nothing: run it where Python has
# torch, triton and secc's other dependencies (pip install 'secc[examples]').
#
#   bash tools/gpu_day.sh --out DIR                results, one JSON file for each check, and DIR/page.md
#   bash tools/gpu_day.sh --out DIR --minutes 9    ends in time; the same command again goes on where it stopped
#   bash tools/gpu_day.sh --only kernels-exact     one check (again after a change of the sources)
#   bash tools/gpu_day.sh --dry                    the same code on the CPU at small sizes
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} HF_HUB_OFFLINE=1
export COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || true)}
exec python3 -m tools.gpu_day "$@"
