"""`python -m jax_gn.check`: what is installed, what runs where and why, is it right, is it fast.

Exit code 0: the kernels serve the default backend and their numbers are right. 1: not so; the last
lines say why, and what to install or build. `--json` prints the report for programs.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from ._version import why_not_jax

# float32 kernels against float64 numpy, on numbers around 1: some hundred roundings of 6e-8.
_TOLERANCE = 1e-5
_PACKAGES = ("jax", "jaxlib", "jax_gn", "jax-gn-cuda13", "jax-cuda13-plugin", "jax-cuda12-plugin")
_PACKAGES += ("flax", "numpy")
# (name, dtype, [N, H, W, C]) of what is timed: a U-Net's layer and a VAE's, silu after both. Large
# enough to leave the caches, small enough for a check of seconds.
_TIMED = {
    "cpu": (("U-Net", "float32", (4, 32, 32, 640)), ("VAE", "bfloat16", (1, 160, 160, 128))),
    "cuda": (("U-Net", "bfloat16", (16, 64, 64, 320)), ("VAE", "bfloat16", (4, 512, 512, 128))),
}
_TENSORS = 5  # a forward and a backward pass move at least x, y, dy, x, dx; a copy moves 2
_ROUNDS, _SECONDS = 5, 0.05  # a round of each candidate is this long; the median of rounds counts


def main() -> int:
    parser = argparse.ArgumentParser("python -m jax_gn.check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--no-time", action="store_true", help="only what is right, not how fast")
    options = parser.parse_args()
    report = collect(timed=not options.no_time)
    print(json.dumps(report, indent=1) if options.json else in_words(report))
    return 0 if report["ok"] else 1


def collect(*, timed: bool = True) -> dict:
    """The report: versions, modules, devices with self-test and times, and the verdict."""
    report = {
        "versions": {
            "python": platform.python_version(),
            **installed_versions(_PACKAGES),
            "jax": jax.__version__,
        },
        "ffi_runtime": None,
        "default_backend": None,
        "modules": {},
        "devices": [],
        "reason": why_not_jax(),
        "hints": [],
        "ok": False,
    }
    if report["reason"]:
        return report
    from . import _ffi
    from ._group_norm import _why_not_ffi

    report["ffi_runtime"] = ".".join(map(str, _ffi.runtime_ffi_version()))
    report["default_backend"] = jax.default_backend()
    report["modules"] = {name: _module_state(name) for name in _ffi.PLATFORMS}
    broken = [m["state"] for m in report["modules"].values() if m["state"].startswith("broken")]
    report["reason"] = broken[0] if broken else _why_not_ffi() or _why_not_this_gpu()
    report["hints"] = _hints(report)
    if not report["reason"]:
        report["devices"] = [_device_report(d, timed=timed) for d in _one_device_a_kind()]
        report["ok"] = all(d["ok"] for d in report["devices"])
    return report


def in_words(report: dict) -> str:
    """The report as a person reads it."""
    lines = [f"{name:18} {value}" for name, value in report["versions"].items()]
    if report["default_backend"]:
        lines.append(f"{'FFI of jaxlib':18} {report['ffi_runtime']}")
        lines.append(f"{'default backend':18} {report['default_backend']}")
    for name, module in report["modules"].items():
        facts = [f"{key.replace('_', ' ')} {value}" for key, value in module.items()]
        lines.append(f"{'module ' + name:18} {', '.join(facts).removeprefix('state ')}")
    for device in report["devices"]:
        lines += _device_in_words(device)
    lines += [f"hint: {hint}" for hint in report["hints"]]
    if report["reason"]:
        lines.append(f"not used: {report['reason']}")
    lines.append("all right" if report["ok"] else "NOT all right")
    return "\n".join(lines)


def _device_in_words(device: dict) -> list[str]:
    errors = ", ".join(f"{k} {v:.1e}" for k, v in device["errors"].items())
    verdict = "right" if device["ok"] else f"WRONG (allowed {_TOLERANCE})"
    lines = [f"{'device':18} {device['device']}, {device['arch']}: {verdict}; errors {errors}"]
    for row in device["times"]:
        lines.append(
            f"  {row['name']:6} {row['dtype']}{row['shape']} + silu, forward and backward: "
            f"{row['ours_ms']:.3g} ms, XLA {row['xla_ms']:.3g} ms ({row['speed_up']:.2f} x); "
            f"{row['share_of_copy']:.0%} of what copying as many bytes allows; {row['family']}"
        )
    return lines


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _module_state(name: str) -> dict:
    from . import _ffi

    try:
        loaded = _ffi.module(name)
    except ImportError as error:
        return {"state": f"broken: {error}"}
    if loaded is None:
        return {"state": "not built"}
    state = {"state": "loaded", "file": loaded.__file__}
    state["ffi_headers"] = ".".join(map(str, loaded.ffi_api_version))
    if name == "cuda":
        state["architectures"] = loaded.architectures
        state["cuda_runtime"] = loaded.runtime_version()
        state["cuda_driver"] = loaded.driver_version()
    else:
        state["instruction_set"] = loaded.instruction_set()
    return state


def _why_not_this_gpu() -> str | None:
    """Why the CUDA module can't run on the present GPU; None: it can, or there is none."""
    from . import _ffi

    if jax.default_backend() != "gpu" or (loaded := _ffi.module("cuda")) is None:
        return None
    runtime, driver = loaded.runtime_version(), loaded.driver_version()
    if driver < runtime // 1000 * 1000:
        return (
            f"the driver serves CUDA up to {driver}, the module has CUDA {runtime}: update the "
            "driver (580 or newer for CUDA 13), or rebuild with an older nvcc"
        )
    try:
        present = loaded.device_limits(0)["capability"]
    except RuntimeError as error:
        return f"the module can't reach the GPU: {error}"
    compiled = sorted(map(int, loaded.architectures.split(";")))
    # Machine code runs within its major version; the newest is there as PTX too.
    if any(a // 10 == present // 10 and a <= present for a in compiled) or present > compiled[-1]:
        return None
    return (
        f"the GPU is an sm_{present} and the module was compiled for {loaded.architectures}: "
        f"rebuild it (`pip install . -C cmake.define.JAX_GN_CUDA=ON -C "
        f"cmake.define.JAX_GN_CUDA_ARCHITECTURES={present}`)"
    )


def _hints(report: dict) -> list[str]:
    hints = []
    if report["default_backend"] == "cpu" and os.path.exists("/dev/nvidia0"):
        hints.append(
            "there is an NVIDIA GPU, and jax does not use it: `pip install 'jax[cuda13]'` "
            "(or JAX_PLATFORMS hides it)"
        )
    if report["default_backend"] == "gpu" and report["modules"]["cuda"]["state"] == "not built":
        hints.append("`pip install 'jax_gn[cuda13]'` brings the CUDA module without a compiler")
    return hints


def _one_device_a_kind() -> list:
    return list({d.device_kind: d for d in reversed(jax.local_devices())}.values())


def _device_report(device, *, timed: bool) -> dict:
    """A forward and a backward pass on that device against float64 numpy, and its times."""
    backend = "cuda" if device.platform == "gpu" else "cpu"
    with jax.default_device(device):
        errors = _self_test()
        times = [_time(backend, *case) for case in _TIMED[backend]] if timed else []
    return {
        "device": f"{device.device_kind} ({device.platform})",
        "arch": _plan(backend, "float32", (1, 1, 1, 32)).arch,
        "errors": errors,
        "times": times,
        "ok": all(error <= _TOLERANCE for error in errors.values()),
    }


def _self_test() -> dict[str, float]:
    """The largest error of each result, relative to its largest value."""
    rng = np.random.default_rng(0)
    n, spatial, channels, groups, epsilon = 2, 77, 24, 4, 1e-6
    x, dy = rng.standard_normal((2, n, spatial, channels), np.float32)
    scale, bias = rng.standard_normal((2, channels), np.float32)
    step = _step("ffi", num_groups=groups, epsilon=epsilon, activation=None)
    got = zip(("y", "dx", "dscale", "dbias"), step(x, scale, bias, dy), strict=True)
    arrays = [a.astype(np.float64) for a in (dy, x, scale, bias)]
    want = truth(*arrays, groups=groups, epsilon=epsilon)
    return {
        name: float(np.abs(np.asarray(value) - want[name]).max() / np.abs(want[name]).max())
        for name, value in got
    }


def _step(implementation: str, **options):
    from ._group_norm import group_norm

    norm = functools.partial(group_norm, implementation=implementation, **options)

    @jax.jit
    def step(x, scale, bias, dy):
        y, pull = jax.vjp(norm, x, scale, bias)
        return y, *pull(dy)

    return step


def _plan(backend: str, dtype: str, shape: tuple[int, ...]):
    from ._plan import plan_backward

    return plan_backward(shape, dtype, num_groups=32, activation="silu", platform=backend)


def _time(backend: str, name: str, dtype: str, shape: tuple[int, ...]) -> dict:
    """Ours, the definition under XLA, and a copy: the median of rounds that take turns."""
    x, dy = (jax.random.normal(jax.random.key(i), shape, dtype) for i in range(2))
    scale, bias = jnp.ones(shape[-1], dtype), jnp.zeros(shape[-1], dtype)
    options = {"num_groups": 32, "activation": "silu"}
    calls = {
        "ours": functools.partial(_step("ffi", **options), x, scale, bias, dy),
        "xla": functools.partial(_step("xla", **options), x, scale, bias, dy),
        "copy": functools.partial(jax.jit(jnp.negative), x),
    }
    counts = {key: max(1, int(_SECONDS / _seconds(call, 2))) for key, call in calls.items()}
    rounds = [
        {key: _seconds(call, counts[key]) for key, call in calls.items()} for _ in range(_ROUNDS)
    ]
    ours, xla, copy = (statistics.median(r[key] for r in rounds) for key in calls)
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(shape),
        "family": _plan(backend, dtype, shape).family,
        "ours_ms": ours * 1e3,
        "xla_ms": xla * 1e3,
        "copy_ms": copy * 1e3,
        "speed_up": xla / ours,
        "share_of_copy": copy * _TENSORS / 2 / ours,
    }


def _seconds(call, count: int) -> float:
    """Of a call, of `count` that are in flight together: what a device takes, not its launch."""
    result = jax.block_until_ready(call())
    begin = time.perf_counter()
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / count


def truth(dy, x, scale, bias, *, groups: int, epsilon: float) -> dict[str, np.ndarray]:
    """The formula of group_norm's docstring and its gradient, in numpy; channels last."""
    n, *_, channels = x.shape
    grouped = (n, -1, groups, channels // groups)
    axes = (1, 3)
    xc = x.reshape(grouped) - x.reshape(grouped).mean(axes, keepdims=True)
    rstd = 1 / np.sqrt((xc**2).mean(axes, keepdims=True) + epsilon)
    xhat = xc * rstd
    g = (dy * scale).reshape(grouped)
    dx = rstd * (g - g.mean(axes, keepdims=True) - xhat * (g * xhat).mean(axes, keepdims=True))
    xhat = xhat.reshape(x.shape)
    positions = tuple(range(x.ndim - 1))
    return {
        "y": xhat * scale + bias,
        "dx": dx.reshape(x.shape),
        "dscale": (dy * xhat).sum(positions),
        "dbias": dy.sum(positions),
    }


if __name__ == "__main__":
    sys.exit(main())
