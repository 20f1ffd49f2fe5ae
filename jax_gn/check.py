"""`python -m jax_gn.check`: what is installed, what runs where and why, and are its numbers right.

Exit code 0: the kernels serve the default backend and passed. 1: not so; the last lines say why.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys

import jax
import jax.numpy as jnp
import numpy as np

from . import __version__, _ffi, plan_backward
from ._group_norm import _why_not_ffi, group_norm

# float32 kernels against float64 numpy, on numbers around 1: some hundred roundings of 6e-8.
_TOLERANCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser("python -m jax_gn.check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    report = collect()
    print(json.dumps(report, indent=1) if parser.parse_args().json else in_words(report))
    return 0 if report["ok"] else 1


def collect() -> dict:
    """The report: versions, modules, devices with their self-test, and the verdict."""
    modules = {name: _module_state(name) for name in _ffi.PLATFORMS}
    broken = [m["state"] for m in modules.values() if m["state"].startswith("broken")]
    reason = broken[0] if broken else _why_not_ffi()
    devices = [] if reason else [_device_report(d) for d in _one_device_a_kind()]
    return {
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jax_gn": __version__,
            "ffi_runtime": ".".join(map(str, _ffi.runtime_ffi_version())),
        },
        "default_backend": jax.default_backend(),
        "modules": modules,
        "devices": devices,
        "reason": reason,
        "ok": reason is None and all(d["ok"] for d in devices),
    }


def in_words(report: dict) -> str:
    """The report as a person reads it."""
    lines = [f"{name:14} {value}" for name, value in report["versions"].items()]
    lines.append(f"{'backend':14} {report['default_backend']}")
    for name, module in report["modules"].items():
        built = f", FFI headers {module['ffi_headers']}" if "ffi_headers" in module else ""
        lines.append(f"{'module ' + name:14} {module['state']}{built}")
    for device in report["devices"]:
        errors = ", ".join(f"{k} {v:.1e}" for k, v in device["errors"].items())
        verdict = "right" if device["ok"] else f"WRONG (allowed {_TOLERANCE})"
        lines.append(f"{'device':14} {device['device']}: {verdict}; errors {errors}")
        lines.append(device["plan"])
    if report["reason"]:
        lines.append(f"not used: {report['reason']}")
    lines.append("all right" if report["ok"] else "NOT all right")
    return "\n".join(lines)


def _module_state(name: str) -> dict:
    try:
        loaded = _ffi.module(name)
    except ImportError as error:
        return {"state": f"broken: {error}"}
    if loaded is None:
        return {"state": "not built"}
    return {"state": "loaded", "ffi_headers": ".".join(map(str, loaded.ffi_api_version))}


def _one_device_a_kind() -> list:
    return list({d.device_kind: d for d in reversed(jax.local_devices())}.values())


def _device_report(device) -> dict:
    """A forward and a backward pass on that device against float64 numpy."""
    rng = np.random.default_rng(0)
    n, spatial, channels, groups, epsilon = 2, 77, 24, 4, 1e-6
    x, dy = rng.standard_normal((2, n, spatial, channels), np.float32)
    scale, bias = rng.standard_normal((2, channels), np.float32)
    with jax.default_device(device):

        def norm(x, scale, bias):
            return group_norm(
                x, scale, bias, num_groups=groups, epsilon=epsilon, implementation="ffi"
            )

        y, pull = jax.vjp(norm, *map(jnp.asarray, (x, scale, bias)))
        got = {"y": y, **dict(zip(("dx", "dscale", "dbias"), pull(jnp.asarray(dy)), strict=True))}
    arrays = [a.astype(np.float64) for a in (dy, x, scale, bias)]
    expected = _truth(*arrays, groups=groups, epsilon=epsilon)
    errors = {
        name: float(np.abs(np.asarray(got[name]) - value).max() / np.abs(value).max())
        for name, value in expected.items()
    }
    backend = "cuda" if device.platform == "gpu" else "cpu"
    plan = plan_backward(x.shape, "float32", num_groups=groups, platform=backend)
    return {
        "device": f"{device.device_kind} ({device.platform})",
        "errors": errors,
        "plan": str(plan),
        "ok": all(error <= _TOLERANCE for error in errors.values()),
    }


def _truth(dy, x, scale, bias, *, groups: int, epsilon: float) -> dict[str, np.ndarray]:
    """The formula of group_norm's docstring and its gradient, in numpy."""
    n, spatial, channels = x.shape
    grouped = (n, spatial, groups, channels // groups)
    axes = (1, 3)
    xc = x.reshape(grouped) - x.reshape(grouped).mean(axes, keepdims=True)
    rstd = 1 / np.sqrt((xc**2).mean(axes, keepdims=True) + epsilon)
    xhat = xc * rstd
    g = (dy * scale).reshape(grouped)
    dx = rstd * (g - g.mean(axes, keepdims=True) - xhat * (g * xhat).mean(axes, keepdims=True))
    xhat = xhat.reshape(x.shape)
    return {
        "y": xhat * scale + bias,
        "dx": dx.reshape(x.shape),
        "dscale": (dy * xhat).sum((0, 1)),
        "dbias": dy.sum((0, 1)),
    }


if __name__ == "__main__":
    sys.exit(main())
