#!/usr/bin/env bash
# Installs what the tests need and runs them.
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    cat <<'TEXT'
usage: scripts/test.sh [pytest arguments]

examples:
  scripts/test.sh                       the whole suite, in two lanes that share the work
  scripts/test.sh tests/reshard -k plan
  scripts/test.sh -m 'not dist'         without the tests that start several processes
TEXT
    exit 0
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$root/scripts/setup.sh" test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # several ranks share the cores
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same files, and each would compile them
cd "$root"
(($#)) || set -- --numprocesses 2 --dist loadscope --no-loadscope-reorder # tests/harness/lanes.py
exec .venv/bin/python -m pytest "$@"
