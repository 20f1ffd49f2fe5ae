#!/usr/bin/env bash
# The CPU code under sanitizers, for every night or before a release:
#
#   tools/sanitize.sh [asan] [tsan]
#
# asan: AddressSanitizer and UndefinedBehaviorSanitizer, the module _cpu inside Python: the fuzz of the
#       handlers, the corner shapes, the threads. tsan: ThreadSanitizer on a native executable of the
#       loops with a thread pool of its own, since JAX's reports races of its own.
# Each must first find a bug that is planted for it. PYTHON names an interpreter that has jax, flax,
# hypothesis, pytest, nanobind, scikit-build-core, cmake and ninja (default: python3); JAX_GN_XLA_INCLUDE
# the FFI headers, else jaxlib's own.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
work=$PWD/build/sanitize
mkdir -p "$work"

asan() {
  local flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
  local headers=()
  [ -z "${JAX_GN_XLA_INCLUDE:-}" ] || headers=(-C "cmake.define.JAX_GN_XLA_INCLUDE=$JAX_GN_XLA_INCLUDE")
  "$python" -m pip install -q --no-build-isolation --no-deps --upgrade --target "$work/site" . \
    -C build-dir="$work/cmake" -C cmake.define.JAX_GN_CUDA=OFF -C install.strip=false \
    -C cmake.define.CMAKE_CXX_FLAGS="$flags" -C cmake.define.CMAKE_CXX_FLAGS_RELEASE="-O1" "${headers[@]}"
  # libstdc++ too: the sanitizer looks for __cxa_throw when it starts, before anything loads it.
  local preload
  preload=$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libstdc++.so)
  under() {
    LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 PYTHONPATH=$work/site:tests \
      JAX_PLATFORMS=cpu "$python" -P "$@"
  }
  echo "== asan must find what is planted: a handler told that x is larger than it is"
  under -c "
import test_fuzz as f, handler_call as h
operands, results, attributes = f.SIGNATURES['forward']
operands = [h.Buffer(*v) for v in operands.values()]
results = [h.Buffer(*v) for v in (*results.values(), f.WORKSPACE)]
large = (2, 300, 500, 12)
for buffer in (operands[0], results[0]):
    buffer.dims, buffer._dims = large, (h.I64 * 4)(*large)
h.call(f._handlers()['forward'], operands, results, attributes)" >"$work/planted.log" 2>&1 || true
  grep -q "AddressSanitizer: .*buffer-overflow" "$work/planted.log" || {
    tail -n 20 "$work/planted.log"
    echo "asan did not find it" >&2
    exit 1
  }
  # -s: a report must not end in a capture that dies with the process.
  under -m pytest -q -s -p no:cacheprovider -p no:faulthandler tests/test_fuzz.py tests/test_ffi.py \
    tests/test_shapes.py tests/test_threads.py -k "not any_call and not number_of_threads"
}

tsan() {
  g++ -std=c++17 -O1 -g -fsanitize=thread -DJAX_GN_ISA=baseline -Iffi -o "$work/cpu_threads" \
    tests/sanitize/cpu_threads.cc ffi/plan.cc ffi/plan_cpu.cc ffi/plan_cuda.cc ffi/cpu/*.cc -lpthread
  export TSAN_OPTIONS=halt_on_error=1:exitcode=66
  local run=(setarch -R "$work/cpu_threads")  # newer kernels' address layout is too random for it
  local code=0
  "${run[@]}" plant >"$work/planted.log" 2>&1 || code=$?
  [ "$code" = 66 ] || { echo "tsan did not find the planted race (exit $code)" >&2; exit 1; }
  "${run[@]}"
}

for what in "${@:-asan tsan}"; do
  for one in $what; do
    case $one in
      asan | tsan) echo "==== $one"; "$one" ;;
      *) echo "no such step: $one" >&2; exit 2 ;;
    esac
  done
done
