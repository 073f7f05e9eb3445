#!/usr/bin/env bash
# Runs one job under torchrun and returns how it ended.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/launch.sh [options] CONFIG [key=value ...]

Checks the configuration, starts torchrun on this host, waits, sweeps up, and returns the code of exit.json:
  0 finished    2 bad configuration or data    3 a rank failed    75 stopped on request

options:
  --nproc N          ranks on this host; as many as the run's pools need when left out
  --nnodes N         hosts (1); the same command runs on each of them
  --node-rank R      which of them this is, 0..N-1 (SLURM_NODEID when set, else 0)
  --rendezvous H:P   address of host 0 and a free port there; needed when there is more than one host
  --module M         program that the ranks run (rlhf.train)
  --python P         interpreter (RLHF_PYTHON when set, else .venv/bin/python)

signals:
  USR1               asks the run to save and stop at the next step, as does `touch runs/NAME/stop`
  TERM, INT          end it now

examples:
  scripts/launch.sh configs/quickstart/ppo.yaml
  scripts/launch.sh --nproc 2 configs/quickstart/ppo.yaml name=small_steps ppo.clip_eps=0.1
  srun --ntasks-per-node=1 scripts/launch.sh --nproc 8 --nnodes 4 --rendezvous "$HEAD:29500" CONFIG
TEXT
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
nproc=0 nnodes=1 node_rank="${SLURM_NODEID:-0}" rendezvous="" module=rlhf.train
python="${RLHF_PYTHON:-$root/.venv/bin/python}"

bad_usage() {
    echo "launch: $*" >&2
    exit 2
}

while (($#)); do
    case "$1" in
        -h | --help) usage && exit 0 ;;
        --nproc | --nnodes | --node-rank | --rendezvous | --module | --python)
            (($# > 1)) || bad_usage "$1: no value; needs one; see --help"
            name="${1#--}" && printf -v "${name//-/_}" '%s' "$2" && shift 2
            ;;
        -*) bad_usage "$1: no such option; see --help" ;;
        *) break ;;
    esac
done
(($#)) || bad_usage "CONFIG: not given; needs a YAML file; see --help"
[[ -x "$(command -v "$python")" ]] || bad_usage "$python: no such program; needs the environment; run scripts/setup.sh"
((nnodes == 1)) || [[ -n $rendezvous ]] || bad_usage "--rendezvous: not given; $nnodes hosts need it: HOST_0:PORT"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

checked="$("$python" -m rlhf.preflight --nproc "$nproc" --nnodes "$nnodes" --module "$module" "$@")" || exit $?
{ read -r world_size && read -r run_folder; } <<<"$checked"

exec 9>"$run_folder/logs/.launch_$node_rank.lock"
flock -n 9 || bad_usage "$run_folder: another job is at work in it; needs one at a time; set name=OTHER"
if ((node_rank == 0)); then # what the last job in this folder left about its end
    clear='import sys, pathlib; from rlhf.dist.exit_record import clear_marks; clear_marks(pathlib.Path(sys.argv[1]))'
    "$python" -c "$clear" "$run_folder"
fi

job_id="$(date +%s)_$$_$RANDOM"
launcher_log="$run_folder/logs/launcher_$node_rank.log"
if ((nnodes == 1)); then
    where=(--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --rdzv-id "$job_id" --local-addr 127.0.0.1)
else
    where=(--master-addr "${rendezvous%:*}" --master-port "${rendezvous##*:}" --node-rank "$node_rank")
fi
signal=""

deadline="" # when torchrun, told to end, has had its time
forward() {
    signal="${signal:-$1}"
    [[ -z ${torchrun:-} ]] || kill -TERM "$torchrun" 2>/dev/null || true
    deadline="${deadline:-$((SECONDS + 30))}"
}
trap 'forward TERM' TERM
trap 'forward INT' INT
trap 'touch "$run_folder/stop"' USR1

if [[ -t 1 ]]; then # rank 0 draws on this terminal, but its own descriptors lead into its log
    exec 8>&1 # inside $() 1 is a pipe
    read -r LINES COLUMNS <<<"$(stty size <&8)" && export LINES COLUMNS
    exec 8>&-
    echo "launch: starting $world_size rank(s), which takes some seconds; run folder $run_folder"
fi
# torchrun has a session of its own, so that a Ctrl-C reaches this script alone; its own noise goes into a file.
RLHF_JOB_ID="$job_id" setsid "$python" -m torch.distributed.run --nnodes "$nnodes" \
    --nproc-per-node $((world_size / nnodes)) "${where[@]}" --max-restarts 0 --shutdown-timeout 10 \
    --module "$module" "$@" 2>"$launcher_log" 9>&- &
torchrun=$!


while kill -0 "$torchrun" 2>/dev/null; do
    [[ -z $signal || -n $deadline ]] || forward "$signal"
    sleep 0.5 &
    wait $! || true # a trapped signal ends it at once
    [[ -z $deadline && -e $run_folder/exit.json ]] && deadline=$((SECONDS + 40))
    [[ -n $deadline ]] && ((SECONDS > deadline)) && kill -KILL "$torchrun" 2>/dev/null
done
wait "$torchrun" && code=0 || code=$?
trap '' TERM INT USR1
[[ -z $signal || ! -t 1 ]] || echo # the cursor stands where the table was left
"$python" -m rlhf.dist.aftermath --run-folder "$run_folder" --job-id "$job_id" --torchrun-code "$code" \
    --launcher-log "$launcher_log" --signal "$signal" || exit $?
