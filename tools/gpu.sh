#!/usr/bin/env bash
# All that needs a GPU, for any machine that has one, with nvcc on the PATH and a python3 that holds
# jax with CUDA, flax, nanobind, scikit-build-core, cmake, ninja, pytest, pytest-xdist and hypothesis.
# Nothing is downloaded or installed: the build lands in build/gpu.
#
#   tools/gpu.sh [build] [native] [stress] [test] [sanitize] [time]   all by default; build first
#
# The sanitizers can be named one by one, `time` as kernel_times and bench. JAX_GN_HARNESS can name
# a native harness built elsewhere (and JAX_GN_STRESS_HARNESS one with -DJAX_GN_STRESS): then
# `JAX_GN_HARNESS=… tools/gpu.sh native memcheck initcheck racecheck` needs no build, and can run
# beside it. Each step but bench takes less than 10 minutes. Logs go to $OUT, else benchmarks/results/gpu/.
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-$root/benchmarks/results/gpu}
site=$root/build/gpu/site
work=$root/build/gpu/cmake
harness=${JAX_GN_HARNESS:-$work/cuda_harness}
workers=${JAX_GN_WORKERS:-8}
mkdir -p "$out" "$site"
export XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=2
failed=()

# What every log begins with.
about() {
  date -u +"date %FT%TZ"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  nvcc --version | tail -n 2
  python3 -c "
import importlib.metadata as m
print(*(f'{p} {m.version(p)}' for p in ('jax', 'jaxlib', 'flax', 'numpy')))"
}

# step NAME COMMAND...: runs it, keeps the log, goes on if it fails.
step() {
  local name=$1
  shift
  printf '==== %s\n' "$name"
  if { about; "$@"; } >"$out/$name.log" 2>&1; then
    tail -n "${show:-3}" "$out/$name.log"
  else
    failed+=("$name")
    tail -n 40 "$out/$name.log"
  fi
}

build() {
  python3 -m pip install -q --no-build-isolation --no-deps --upgrade --target "$site" . \
    -C build-dir="$work" -C cmake.define.JAX_GN_CUDA=ON -C cmake.define.JAX_GN_CUDA_HARNESS=ON &&
    ls -l "$site"/jax_gn/*.so "$harness"
}

native() { "$harness" check && "$harness" repeat; }

# Blocks that come late to their exchanges, at random: 20 runs a case, a graph, two streams at once.
stress() {
  if [ -z "${JAX_GN_STRESS_HARNESS:-}" ]; then
    cmake -G Ninja -S . -B "$work-stress" -DJAX_GN_CUDA=ON -DJAX_GN_CUDA_HARNESS=ON \
      -DPython_EXECUTABLE="$(command -v python3)" -DCMAKE_CUDA_FLAGS=-DJAX_GN_STRESS &&
      ninja -C "$work-stress" cuda_harness || return 1
  fi
  "${JAX_GN_STRESS_HARNESS:-$work-stress/cuda_harness}" repeat
}

# Runs tests outside the source tree's jax_gn/, against the package just built.
suite() { PYTHONPATH=$site JAX_GN_REQUIRE_CUDA=1 python3 -P -m pytest -q -p no:cacheprovider -p no:benchmark "$@"; }

test_all() {
  # Problems beyond 2^32 elements want the GPU for themselves. test_benchmarks.py tries the benchmark
  # with the host's clock, on a CPU; here it can run itself: PYTHONPATH=$site:. python3 -P -m benchmarks
  suite -n "$workers" tests --ignore tests/test_cuda.py --ignore tests/test_benchmarks.py
  local first=$?
  suite tests/test_cuda.py && return $first
}

# The tool must first find the bug planted for it.
finds() {
  local tool=$1 bug=$2
  ! compute-sanitizer --tool "$tool" --print-limit 2 --error-exitcode 9 "$harness" plant "$bug" || {
    echo "$tool does not find the planted bug $bug"
    return 1
  }
}
clean() { compute-sanitizer --tool "$1" --error-exitcode 9 "${@:2}"; }

memcheck() {
  finds memcheck out_of_bounds && clean memcheck "$harness" check small &&
    clean memcheck --padding 4096 "$harness" check small bare
}
initcheck() { finds initcheck uninitialised && clean initcheck "$harness" check small bare unpoisoned; }
racecheck() { finds racecheck race && clean racecheck "$harness" check small; }
memcheck_jax() {
  XLA_PYTHON_CLIENT_ALLOCATOR=platform PYTHONPATH=$site JAX_GN_REQUIRE_CUDA=1 \
    clean memcheck --target-processes all python3 -P -m pytest -q -p no:cacheprovider \
    tests/test_cuda.py -k "agree and small"
}

# NAME:N:SPATIAL:CHANNELS:GROUPS:ACTIVATION of every problem of shapes.json.
problems() {
  python3 -c "
import json, math
for name, row in json.load(open('benchmarks/shapes.json'))['problems'].items():
    n, *spatial, c = row['shape']
    print(name, n, math.prod(spatial), c, row['groups'], row['act'], sep=':')"
}
# shellcheck disable=SC2046
time_kernels() { "$harness" time $(problems); }
# The same problems through JAX, next to Flax, torch and Liger where they are installed.
bench() {
  PYTHONPATH=$site:. XLA_PYTHON_CLIENT_PREALLOCATE=true python3 -P -m benchmarks --pass forward both \
    --layout channels_last channels_first --out "$out/cuda.json"
}

for what in "${@:-build native stress test sanitize time}"; do
  for one in $what; do
    case $one in
      build) step build build ;;
      native) step native native ;;
      stress) step stress stress ;;
      test) show=25 step test test_all ;;
      sanitize)
        for tool in memcheck initcheck racecheck memcheck_jax; do step "$tool" "$tool"; done
        ;;
      memcheck | initcheck | racecheck | memcheck_jax) step "$one" "$one" ;;
      kernel_times) step kernel_times time_kernels ;;
      bench) step bench bench ;;
      time)
        step kernel_times time_kernels
        step bench bench
        ;;
      *)
        echo "no such step: $one" >&2
        exit 2
        ;;
    esac
  done
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
