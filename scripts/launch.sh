#!/usr/bin/env bash
# Runs one job under torchrun and returns how it ended.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/launch.sh [options] CONFIG [key=value ...]
       scripts/launch.sh [options] --doctor [FOLDER]

Checks the configuration, starts torchrun on this host, waits, sweeps up, and returns the code of exit.json:
  0 finished    2 bad configuration or data    3 a rank failed    75 stopped on request, saved

options:
  --nproc N          ranks on this host; as many as the run's pools need when left out
  --nnodes N         hosts (1); the same command runs on each of them, and they see one run folder
  --node-rank R      which of them this is, 0..N-1 (SLURM_NODEID when set, else 0)
  --rendezvous H:P   name of host 0 and a free port there; needed when there is more than one host
  --start-timeout S  seconds (600) until all hosts and all ranks must be there; who is not is named, exit code 3
  --job-id ID        what the job's id begins with (SLURM_JOB_ID when set); the same on all hosts
  --module M         program that the ranks run (rlhf.train)
  --python P         interpreter (RLHF_PYTHON when set, else .venv/bin/python)

  --doctor           runs tools/doctor.py on every rank instead; FOLDER (runs) is where runs are written

signals, to any of the hosts' launchers:
  USR1               asks the run to save and stop at the next step, as does `touch runs/NAME/stop`
  TERM, INT, HUP     end it now

examples:
  scripts/launch.sh configs/quickstart/ppo.yaml
  scripts/launch.sh --nproc 2 configs/quickstart/ppo.yaml name=small_steps ppo.clip_eps=0.1
  srun --ntasks-per-node=1 scripts/launch.sh --nproc 8 --nnodes 4 --rendezvous "$HEAD:29500" CONFIG
TEXT
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
nproc=0 nnodes=1 node_rank="${SLURM_NODEID:-0}" rendezvous="" start_timeout=600 module=rlhf.train doctor=""
job_id="${SLURM_JOB_ID:+$SLURM_JOB_ID.${SLURM_STEP_ID:-0}.${SLURM_RESTART_COUNT:-0}}"
python="${RLHF_PYTHON:-$root/.venv/bin/python}"

bad_usage() {
    echo "launch: $*" >&2
    exit 2
}

while (($#)); do
    case "$1" in
        -h | --help) usage && exit 0 ;;
        --nproc | --nnodes | --node-rank | --rendezvous | --start-timeout | --job-id | --module | --python)
            (($# > 1)) || bad_usage "$1: no value; needs one; see --help"
            name="${1#--}" && printf -v "${name//-/_}" '%s' "$2" && shift 2
            ;;
        --doctor) doctor=1 && shift ;;
        -*) bad_usage "$1: no such option; see --help" ;;
        *) break ;;
    esac
done
(($#)) || [[ -n $doctor ]] || bad_usage "CONFIG: not given; needs a YAML file; see --help"
[[ -x "$(command -v "$python")" ]] || bad_usage "$python: no such program; needs the environment; run scripts/setup.sh"
for option in nproc nnodes node_rank start_timeout; do
    [[ ${!option} =~ ^(0|[1-9][0-9]{0,8})$ ]] || bad_usage "--${option//_/-}: ${!option} given; needs a whole number"
done
((nnodes)) || bad_usage "--nnodes: 0 given; needs at least 1"
((start_timeout)) || bad_usage "--start-timeout: 0 given; needs at least 1 second"
((nnodes == 1)) && node_rank=0
[[ $nnodes == 1 || $rendezvous == *:* ]] || bad_usage "--rendezvous: not given; $nnodes hosts need it: HOST_0:PORT"
((node_rank < nnodes)) || bad_usage "--node-rank: $node_rank given; needs 0..$((nnodes - 1)) on $nnodes hosts"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

trap '' USR1 # what is not there yet cannot stop
if [[ -n $doctor ]]; then
    module=tools.doctor world_size=$(((nproc ? nproc : 1) * nnodes)) run_folder="${1:-runs}/doctor"
    set -- --run-folder "$run_folder"
else
    checked="$("$python" -m rlhf.preflight --nproc "$nproc" --nnodes "$nnodes" --module "$module" "$@")" || exit $?
    { read -r world_size && read -r run_folder; } <<<"$checked"
fi
exec "$python" -m rlhf.dist.launcher --run-folder "$run_folder" --world-size "$world_size" --nnodes "$nnodes" \
    --node-rank "$node_rank" --rendezvous "$rendezvous" --start-timeout "$start_timeout" --job-id "$job_id" \
    --interface "${GLOO_SOCKET_IFNAME:-}" -- "$module" "$@"
