#!/usr/bin/env bash
# Installs what a run needs and runs the main job on a small, real task.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
engine=()
for setting in "$@"; do
    [[ $setting == rollout.engine=sglang ]] && engine=(sglang)
done
"$root/scripts/setup.sh" core "${engine[@]}"
cd "$root"
exec .venv/bin/python tools/quickstart.py "$@"
