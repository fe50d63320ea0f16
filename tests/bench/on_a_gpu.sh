#!/usr/bin/env bash
# Everything that only a GPU can say of the kernels, in one run: correctness, sanitizers, the table with its peers, the sweep.
#
#   tests/bench/on_a_gpu.sh OUT                       all steps; logs, kernels.json, kernels.md and sweep.json go to OUT
#   tests/bench/on_a_gpu.sh OUT build check table     some of: build check tests memcheck racecheck initcheck table sweep
#
# Needs python with the package's dependencies, torch and pytest, nvcc (or CKPT_KERNELS=path:FILE), and compute-sanitizer for three
# of the steps. About 15 minutes; each step has a limit of its own and is judged by its exit code, and the others go on. To try the
# script where there is no GPU: ARCH=host SMALL=1 CKPT_KERNELS=host tests/bench/on_a_gpu.sh OUT
set -uo pipefail
out=$(mkdir -p "${1:?the folder for what comes out}" && cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 CKPT_KERNELS=${CKPT_KERNELS:-cuda}
steps=("$@")
((${#steps[@]})) || steps=(build check tests memcheck racecheck initcheck table sweep)
cases=2000 few=20 size=()
[[ -n ${SMALL:-} ]] && cases=5 few=1 size=(--mib 1 --repeats 1)
ckpt=(python -m ckpt_tool)
failed=0

step() { # NAME SECONDS COMMAND...
    local name=$1 seconds=$2 began=$SECONDS code=0
    shift 2
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1 </dev/null || code=$?
    printf '%-10s exit %d, %d s: %s\n' "$name" "$code" $((SECONDS - began)) "$(tail -n 1 "$out/$name.log")"
    ((code == 0)) || failed=1
}

sanitizer() { # TOOL
    if ! command -v compute-sanitizer >/dev/null; then
        printf '%-10s left out: no compute-sanitizer on the PATH\n' "$1"
        return
    fi
    step "$1" 300 compute-sanitizer --tool "$1" --error-exitcode 9 "${ckpt[@]}" kernels check --cases "$few"
}

for name in "${steps[@]}"; do
    case $name in
    build) step build 300 "${ckpt[@]}" kernels build --arch "${ARCH:-native}" ;;
    check) step check 300 "${ckpt[@]}" kernels check --cases "$cases" ;;
    tests) # one process: one GPU, and no plugin needed
        step tests 600 python -m pytest -q -o addopts=--import-mode=importlib -rs -m 'not slow and not peers and not crash' tests/kernels ;;
    memcheck | racecheck | initcheck) sanitizer "$name" ;;
    table) step table 580 python tests/bench/kernel_peers.py --out "$out" "${size[@]}" ;;
    sweep) step sweep 580 python tests/bench/kernel_peers.py --sweep --out "$out" "${size[@]}" ;;
    *) echo "no step $name" >&2 && exit 2 ;;
    esac
done
exit "$failed"
