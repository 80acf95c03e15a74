#!/usr/bin/env bash
# Compiles the digits example and trains it for a few dozen steps on this machine's CPU: the vision tower and the language model as
# sections on ranks of their own, so that the timeline shows one at work beside the other. Needs Python 3.11 or newer with pip; makes an
# environment of its own (.venv-tools).
#
#   bash tools/demo.sh [STEPS]
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
environment examples

steps=${1:-40} plan=runs/demo/plan
mkdir -p runs/demo
secc compile examples/vlm_digits.py -o "$plan" --cluster local:3 --strategy apart
secc explain "$plan"
secc run "$plan" --steps "$steps" --log-dir runs/demo/log --trace runs/demo/trace.json

echo
echo "losses    runs/demo/log/metrics.jsonl"
echo "report    $plan/report.html"
echo "timeline  runs/demo/trace.json (open it in ui.perfetto.dev)"
echo "sections  $plan/sections/*.py"
