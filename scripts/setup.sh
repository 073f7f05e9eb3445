#!/usr/bin/env bash
# Makes .venv with the project and everything it needs. quickstart.sh, test.sh and .ci/run call it.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/setup.sh [core|test|dev] [sglang]

Makes .venv in the project's folder with the versions of constraints.txt. Returns at once when nothing changed.
  core     what a run needs (default)
  test     core and pytest, hypothesis
  dev      test and ruff, mypy
  sglang   beside one of these: SGLang for rollouts on CPUs (rollout.engine=sglang); 0.6 GB more to download

pip's own settings hold (pip.conf, PIP_INDEX_URL, ...). From plain PyPI torch comes as its CUDA build, which works on
a machine without a GPU too. For the small CPU build:
  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu scripts/setup.sh

examples:
  scripts/setup.sh
  scripts/setup.sh dev
  scripts/setup.sh test sglang
TEXT
}

wanted=core sglang=""
for word in "$@"; do
    case "$word" in
        core | test | dev) wanted="$word" ;;
        sglang) sglang=1 ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && exit 2 ;;
    esac
done
case "$wanted" in
    core) extras="" stamps=(core) ;;
    test) extras="[test]" stamps=(core test) ;;
    dev) extras="[dev]" stamps=(core test dev) ;;
esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
log=.cache/setup.log

fail() {
    echo "setup: $*" >&2
    exit 1
}

# What an environment was made from: the same text means that nothing is to be done.
fingerprint() {
    { echo "$root" && cat setup.py constraints.txt scripts/setup.sh rlhf/__init__.py .venv/pyvenv.cfg; } | sha256sum
}

is_current() {
    local stamp
    for stamp in "$wanted" ${sglang:+sglang}; do
        [[ -f .venv/.made-$stamp && -x .venv/bin/python && "$(<".venv/.made-$stamp")" == "$(fingerprint)" ]] || return 1
    done
}

find_python() {
    local name
    for name in python3.11 python3 python3.12 python3.13; do
        if command -v "$name" >/dev/null &&
            "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "python: found $(python3 --version 2>&1 || true); needs Python 3.11 or newer with venv and ensurepip;" \
        "install it (Debian: apt-get install python3.11 python3.11-venv; anywhere: uv python install 3.11)"
}

free_gib() { echo $(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1048576)); }

check_machine() {
    [[ "$(uname -s)" == Linux ]] || fail "system: found $(uname -s); needs Linux; use a Linux machine or container"
    local free
    free="$(free_gib)"
    ((free >= 4 + 3 * sglang)) ||
        fail "disk: $free GiB free in $root; needs $((4 + 3 * sglang)) GiB (10 GiB with torch's CUDA build); free some space"
    echo "setup: $1 ($("$1" --version)), $free GiB free"
    echo "setup: downloads about 0.6 GB with torch's CPU build (2-4 minutes), 3 GB with its CUDA build (4-10 minutes);"
    [[ -z $sglang ]] || echo "setup: downloads about 0.6 GB more for SGLang (1-2 minutes)"
    echo "setup: pip decides which from your settings (scripts/setup.sh --help says how to choose the CPU build)"
    ((free >= 10)) || echo "setup: note: the CUDA build needs 10 GiB; $free GiB may not do for it"
}

child=""
trap '[[ -z $child ]] || kill "$child" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# step TEXT COMMAND...: runs the command with its output in the log, and shows that time passes.
step() {
    local text="$1" start=$SECONDS next=30
    shift
    echo "== $text: $*" >>"$log"
    "$@" >>"$log" 2>&1 </dev/null 9>&- &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        if [[ -t 1 ]]; then
            printf '\rsetup: %s ... %d s ' "$text" $((SECONDS - start))
        elif ((SECONDS - start >= next)); then
            echo "setup: $text ... $((SECONDS - start)) s"
            next=$((next + 30))
        fi
        sleep 0.2
    done
    if ! wait "$child"; then
        child=""
        printf '\nsetup: %s failed; the end of %s:\n' "$text" "$root/$log" >&2
        tail -n 15 "$log" >&2
        fail "$text: see above; needs a package index that pip can reach; mend it and run the same command again"
    fi
    child=""
    [[ ! -t 1 ]] || printf '\r'
    echo "setup: $text: done in $((SECONDS - start)) s"
}

install() {
    local python="$1" pip=(.venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt)
    rm -f .venv/.made-*
    if [[ "$(cat .venv/.root 2>/dev/null)" != "$root" ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        step "making .venv" "$python" -m venv --clear .venv
        echo "$root" >.venv/.root
    fi
    step "installing torch" "${pip[@]}" torch
    step "installing the rest" "${pip[@]}" --use-pep517 --no-build-isolation --editable ".$extras"
    if [[ -n $sglang ]]; then
        step "installing what SGLang imports" "${pip[@]}" --use-pep517 --no-build-isolation --editable '.[sglang-cpu]'
        step "installing SGLang" "${pip[@]}" --no-deps sglang xgrammar
        stamps+=(sglang)
    fi
    local stamp
    for stamp in "${stamps[@]}"; do
        fingerprint >".venv/.made-$stamp"
    done
}

is_current && exit 0
python="$(find_python)"
check_machine "$python"
mkdir -p .cache
exec 9>.cache/setup.lock
flock -n 9 || { echo "setup: another set-up of this folder is at work; waiting for it" && flock 9; }
is_current && exit 0
install "$python"
echo "setup: .venv is ready"
