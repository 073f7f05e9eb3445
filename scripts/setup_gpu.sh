#!/usr/bin/env bash
# Adds to .venv what runs on GPUs alone: Transformer Engine, flash-attn, Apex; or makes an environment for SGLang.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/setup_gpu.sh [--check] [--no-gpu] [train|sglang]

Looks at GPU, driver, CUDA toolkit, compiler and disk first, and says all that is missing (exit code 2). Then:
  train    .venv as scripts/setup.sh makes it, with Transformer Engine, flash-attn and NVIDIA's Apex (default)
  sglang   .venv-sglang, an environment of its own: SGLang wants another torch (README.md: "GPU set-up")

  --check   looks only
  --no-gpu  for building an image: looks for no GPU and no driver; set TORCH_CUDA_ARCH_LIST, such as "9.0"

All versions stand in constraints.txt. Compiling takes long (MAX_JOBS=N limits its processes, 2 GiB or more each).
This script has never run on a machine with a GPU.

examples:
  scripts/setup_gpu.sh --check
  MAX_JOBS=16 scripts/setup_gpu.sh
TEXT
}

check_only="" no_gpu="" part=train
while (($#)); do
    case "$1" in
        -h | --help) usage && exit 0 ;;
        --check) check_only=1 ;;
        --no-gpu) no_gpu=1 ;;
        train | sglang) part="$1" ;;
        *) usage >&2 && exit 2 ;;
    esac
    shift
done
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
python="${RLHF_PYTHON:-.venv/bin/python}"
log=.cache/setup_gpu.log
cuda_pin="$(sed -n 's/^# cuda \([0-9.]*\):.*/\1/p' constraints.txt)"
driver_pin="$(sed -n 's/^# driver \([0-9]*\):.*/\1/p' constraints.txt)"
apex_pin="$(sed -n 's/^# apex \(git+.*\)/\1/p' constraints.txt)"
free_gib_needed=30

missing=0
lacks() {
    echo "setup_gpu: $*" >&2
    missing=$((missing + 1))
}

fail() {
    echo "setup_gpu: $*" >&2
    exit "${code:-1}"
}

check_driver() {
    local found
    if ! command -v nvidia-smi >/dev/null; then
        lacks "GPU: no nvidia-smi on the path; needs NVIDIA's driver $driver_pin or newer; install it, or go to a GPU node"
        return
    fi
    found="$({ nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 || true; } | head -n 1)"
    if [[ ! $found =~ ^[0-9]+\. ]]; then
        lacks "GPU: nvidia-smi says '$found'; needs a GPU that it sees; mend the driver, or go to a GPU node"
    elif ((${found%%.*} < driver_pin)); then
        lacks "driver: found $found; needs $driver_pin or newer for CUDA $cuda_pin; update it"
    fi
}

check_toolkit() {
    local nvcc found
    nvcc="${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"
    [[ -x $nvcc ]] || nvcc="$(command -v nvcc || true)"
    if [[ -z $nvcc ]]; then
        lacks "CUDA toolkit: no nvcc in \$CUDA_HOME/bin, /usr/local/cuda/bin or on the path; needs CUDA $cuda_pin," \
            "for which torch is built; install it and set CUDA_HOME, or build scripts/Dockerfile"
        return
    fi
    found="$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')"
    [[ $found == "$cuda_pin" ]] ||
        lacks "CUDA toolkit: $nvcc is ${found:-unknown}; needs $cuda_pin, for which torch is built; set CUDA_HOME to it"
    export CUDA_HOME="${CUDA_HOME:-$(cd "$(dirname "$nvcc")/.." && pwd -P)}"
}

check_rest() {
    local name free
    for name in g++ git; do
        command -v "$name" >/dev/null || lacks "$name: not on the path; needs it to compile from source; install it"
    done
    free=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1048576))
    ((free >= free_gib_needed)) || lacks "disk: $free GiB free in $root; needs $free_gib_needed GiB; free some space"
}

# PyPI's apex is another project; with it installed, Megatron-Core would find no fused kernels, or crash.
check_apex() {
    [[ -x "$(command -v "$python")" ]] || return 0
    local where
    where="$("$python" -c 'from importlib.util import find_spec
found = find_spec("apex")
print(*(found.submodule_search_locations or ["a single file"] if found else []))')"
    [[ -z $where || -f $where/optimizers/__init__.py ]] ||
        lacks "apex: $where is not NVIDIA's (PyPI has another project of that name); run: $python -m pip uninstall apex"
}

[[ -n $cuda_pin && -n $driver_pin && -n $apex_pin ]] || fail "constraints.txt: no lines '# cuda', '# driver', '# apex'"
if [[ -z $no_gpu ]]; then
    check_driver
elif [[ $part == train && -z ${TORCH_CUDA_ARCH_LIST:-} ]]; then
    lacks "TORCH_CUDA_ARCH_LIST: not set; without a GPU to ask, needs the GPUs to compile for; set it, such as \"9.0\""
fi
check_toolkit
check_rest
check_apex
((missing == 0)) || code=2 fail "$missing thing(s) missing; nothing was installed"
echo "setup_gpu: GPU, driver, CUDA toolkit, compiler and disk will do"
[[ -z $check_only ]] || exit 0

# step TEXT COMMAND...: runs the command with its output in the log.
step() {
    local text="$1" start=$SECONDS
    shift
    echo "== $text: $*" >>"$log"
    echo "setup_gpu: $text ... (follow with: tail -f $root/$log)"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        tail -n 25 "$log" >&2
        fail "$text failed; the end of $root/$log is above; mend it and run the same command again"
    fi
    echo "setup_gpu: $text: done in $((SECONDS - start)) s"
}

mkdir -p .cache
export MAX_JOBS="${MAX_JOBS:-$(($(nproc) < 8 ? $(nproc) : 8))}"
if [[ $part == sglang ]]; then
    version="$(sed -n 's/^sglang==//p' constraints.txt)"
    step "making .venv-sglang" python3 -m venv .venv-sglang
    step "SGLang $version with its own torch" .venv-sglang/bin/python -m pip install "sglang==$version"
    step "importing it" .venv-sglang/bin/python -c 'import sglang, sgl_kernel'
    echo "setup_gpu: .venv-sglang is ready"
    exit 0
fi

scripts/setup.sh core
python=.venv/bin/python
built_for="$("$python" -c 'import torch; print(torch.version.cuda)')"
[[ $built_for == "$cuda_pin" ]] ||
    fail "torch: .venv has a build for CUDA $built_for; needs $cuda_pin; remove .venv and the CPU index from pip's" \
        "settings (PIP_EXTRA_INDEX_URL, pip.conf), and run this again"
pip=("$python" -m pip install --disable-pip-version-check -c constraints.txt)
step "build tools" "${pip[@]}" ninja pybind11 wheel
step "Transformer Engine" env NVTE_FRAMEWORK=pytorch \
    "${pip[@]}" --no-build-isolation 'transformer-engine[core_cu13,pytorch]'
step "flash-attn" "${pip[@]}" --no-build-isolation flash-attn
step "Apex from NVIDIA's source" env APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD="$MAX_JOBS" \
    "${pip[@]}" --no-build-isolation --no-deps "$apex_pin"
modules="transformer_engine.pytorch, flash_attn, apex.optimizers, amp_C, fused_weight_gradient_mlp_cuda"
[[ -n $no_gpu ]] || step "importing all of it" "$python" -c "import torch, $modules"
echo "setup_gpu: .venv is ready; next: $python tools/doctor.py"
