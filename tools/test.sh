#!/usr/bin/env bash
# Runs the tests in an environment of their own (.venv-tools), which it makes if need be. Needs Python 3.11 or newer with pip.
#
#   bash tools/test.sh             the tests, without the slow ones
#   bash tools/test.sh --slow      all of them
#   bash tools/test.sh ARGUMENTS   what pytest takes: a path, -k NAME, -x
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh
environment test

if [ "${1:-}" = --slow ]; then
    shift
    set -- -m "slow or not slow" "$@"
fi
# One file at a time on each core, since files share fixtures; in the order of names, since xdist would run files of
# one test last, however long that test takes.
exec python -m pytest -q --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"
