# shellcheck shell=bash
# What the batch scripts beside it share. They source it in the batch shell, on the job's first node, with RLHF_ROOT set:
# SLURM runs a copy of a batch script, so that its own place says nothing.
RLHF_ROOT="$(cd "$RLHF_ROOT" && pwd)" # what is mounted and named by it is named in full
export RLHF_ROOT

refuse() {
    echo "slurm: $*" >&2
    exit 2
}

# need_command FILE: the program of a batch script is part of this checkout.
need_command() {
    [[ -f $RLHF_ROOT/$1 ]] || refuse "$1: not in this checkout; needs one that has the command; update $RLHF_ROOT"
}

# With CONTAINER_IMAGE every step runs in it: srun's own containers (pyxis) where it has them, else apptainer. Paths are
# the same inside and outside, because both sides name run folders, configs and models by them.
container=() in_container=()
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    mounts="$RLHF_ROOT:$RLHF_ROOT"
    [[ $PWD == "$RLHF_ROOT" ]] || mounts+=",$PWD:$PWD"
    mounts+="${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
    if [[ $(srun --help) == *--container-image* ]]; then
        container=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD")
    elif command -v apptainer >/dev/null; then
        in_container=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$CONTAINER_IMAGE")
    else
        refuse "CONTAINER_IMAGE: set, but srun has no --container-image and there is no apptainer; needs one; install it"
    fi
fi
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    export RLHF_PYTHON="${RLHF_PYTHON:-python3}"
else
    export RLHF_PYTHON="${RLHF_PYTHON:-$RLHF_ROOT/.venv/bin/python}"
fi
export PYTHONPATH="$RLHF_ROOT${PYTHONPATH:+:$PYTHONPATH}"

# Before a command: one process on each node of the job; a node whose process fails ends the others.
step=(srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none "${container[@]}")

# HOST:PORT where the nodes meet: the address by which SLURM itself reaches the first node, a port of this job's own.
rendezvous() {
    local address
    address="$(scontrol show node --oneliner "$SLURMD_NODENAME" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')"
    echo "${RENDEZVOUS:-$address:$((20000 + SLURM_JOB_ID % 10000))}"
}

stop_asked="" run_folder=""
trap 'stop_asked=yes' USR1 # SLURM's warning before the time limit, or scancel --signal=USR1 --batch
trap ':' TERM              # scancel: the steps get it too, and this shell waits to see how they end

# launch_on_all_nodes MODULE [options of launch.sh] CONFIG [key=value ...]: the job from its check to its exit code.
# Does not return.
launch_on_all_nodes() {
    local nodes="$SLURM_JOB_NUM_NODES" options=(--module "$1") checked doctor=""
    shift
    while [[ ${1:-} == --* ]]; do
        options+=("$1")
        if [[ $1 == --doctor ]]; then
            doctor=1
        elif (($# > 1)); then
            options+=("$2") && shift
        fi
        shift
    done
    if [[ -n $doctor ]]; then
        run_folder="${1:-runs}/doctor"
    else
        checked="$("${step[@]}" --nodes=1 --ntasks=1 "${in_container[@]}" \
            "$RLHF_PYTHON" -m rlhf.preflight --nnodes "$nodes" "${options[@]:0:2}" "$@")" || exit $?
        { read -r _ && read -r run_folder; } <<<"$checked"
    fi
    echo "slurm: job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST; run folder $run_folder"
    # A first node that never starts would leave an old exit.json. The lock is that of the launcher on the first node.
    mkdir -p "$run_folder/logs"
    flock --nonblock "$run_folder/logs/.launch_0.lock" rm -f "$run_folder/exit.json" ||
        refuse "$run_folder: another job is at work in it; needs one at a time; set name=OTHER"
    options+=(--nnodes "$nodes" --rendezvous "$(rendezvous)")

    # 75 is a good end; as an exit code srun would take it for a failure and kill the nodes that are still sweeping up.
    # shellcheck disable=SC2016 # $@ is the inner shell's
    "${step[@]}" "${in_container[@]}" bash -c 'trap : TERM; "$@" || { code=$?; ((code == 75)) || exit $code; }' launch \
        "$RLHF_ROOT/scripts/launch.sh" "${options[@]}" "$@" &
    follow $!
}

# follow STEP: pass a request to stop on, wait for the end, and leave with the job's exit code.
follow() {
    local step_pid="$1" code=0 recorded
    while kill -0 "$step_pid" 2>/dev/null; do
        [[ -z $stop_asked ]] || touch "$run_folder/stop" # again and again: the start of a job clears an old request
        sleep 1 &
        wait $! || true # a trapped signal ends it at once
    done
    wait "$step_pid" || code=$?
    recorded="$(sed -n 's/.*"code": *\([0-9]*\).*/\1/p' "$run_folder/exit.json" 2>/dev/null || true)"
    if ((code == 0)) || [[ $recorded == [23] ]]; then
        code="${recorded:-$code}"
    fi
    if ((code == 75)) && [[ -n $stop_asked ]]; then
        echo "slurm: job $SLURM_JOB_ID stopped in time; back into the queue"
        scontrol requeue "$SLURM_JOB_ID" || echo "slurm: it could not be requeued; submit it again to go on"
    fi
    ((code != 3)) || name_nodes
    exit "$code"
}

# launch.sh knows nodes by number, and of one that never started nothing else.
name_nodes() {
    local names number
    mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    grep -oE 'nodes? [0-9][0-9, and]*' "$run_folder/exit.json" | grep -oE '[0-9]+' | sort -un | while read -r number; do
        echo "slurm: node $number is ${names[number]:-unknown}"
    done || true # it speaks of none
}
