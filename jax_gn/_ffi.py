"""The border with the compiled code: loading, registration, the calls. Only importer of jax.ffi.

Target names carry a version: the persistent compilation cache's key does not see the shared object,
so a kernel whose meaning changes needs a new name.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
from types import ModuleType

import jax
import jax.export
import jax.ffi
import jax.numpy as jnp
import numpy as np

from ._problem import Problem
from ._version import __version__

_VERSION = 2
TARGETS = {
    "forward": f"jax_gn.forward.v{_VERSION}",
    "backward": f"jax_gn.backward.v{_VERSION}",
    # What their first reading of x (and dy) sums up, where groups go on on other devices.
    "moments": f"jax_gn.moments.v{_VERSION}",
    "channel_sums": f"jax_gn.channel_sums.v{_VERSION}",
}
# platform -> (compiled modules, of which the first that is there serves; the name XLA registers
# their handlers under). The CUDA module is ours where the package was built with it, else that of a
# companion package: `pip install 'jax_gn[cuda13]'`.
_MODULES = {
    "cpu": (("jax_gn._cpu",), "cpu"),
    "cuda": (("jax_gn._cuda", "jax_gn_cuda13._cuda", "jax_gn_cuda12._cuda"), "CUDA"),
}
PLATFORMS = tuple(_MODULES)


def disabled_checks() -> list:
    """What `jax.export.export` needs as its ``disabled_checks`` for programs with our kernels.

    JAX exports only custom calls that it keeps compatible itself. Ours carry a version in their
    names: a program exported today calls the kernels of that version wherever it is loaded.
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in TARGETS.values()]


@functools.cache
def module(platform: str) -> ModuleType | None:
    """The compiled module that serves a platform, its handlers registered; None: not built.

    Raises ImportError where the module exists and can't be used: a broken build must surface.
    """
    if platform not in _MODULES:
        return None
    names, xla_platform = _MODULES[platform]
    loaded = next((found for name in names if (found := _import(name)) is not None), None)
    if loaded is None:
        return None
    _check_version(loaded)
    for target, handler in loaded.registrations().items():
        jax.ffi.register_ffi_target(TARGETS[target], handler, platform=xla_platform)
    return loaded


def _import(name: str) -> ModuleType | None:
    """The module of that name; None where it, or the package that it would be in, is not there."""
    package = name.partition(".")[0]
    try:
        companion = importlib.import_module(package)
        if companion.__version__ != __version__:
            raise ImportError(
                f"{package} {companion.__version__} is for jax_gn {companion.__version__}, and "
                f"this is jax_gn {__version__}: write `pip install "
                f"'jax_gn[{package.removeprefix('jax_gn_')}]=={__version__}'`"
            )
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, package):
            raise
        return None


def planner() -> ModuleType:
    """The module that holds the planner for every platform."""
    loaded = module("cpu")
    if loaded is None:
        raise ImportError(
            "jax_gn._cpu is missing: the package is not built. Write `pip install .` in a checkout "
            "(a source tree on sys.path hides the installed package)"
        )
    return loaded


def runtime_ffi_version() -> tuple[int, int]:
    """(major, minor) of the FFI interface that the installed jaxlib offers."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text()
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text)[1])  # pyright: ignore
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


def _check_version(loaded: ModuleType) -> None:
    """XLA takes a handler only if its header is not newer than the runtime.

    A newer one would break the first operation of *any* JAX program in the process, so it must not
    be registered at all.
    """
    built, runtime = tuple(loaded.ffi_api_version), runtime_ffi_version()
    if built[0] != runtime[0] or built[1] > runtime[1]:
        raise ImportError(
            f"{loaded.__name__} was built with XLA FFI headers {built[0]}.{built[1]}, the "
            f"installed jaxlib offers {runtime[0]}.{runtime[1]}: upgrade jax and jaxlib, or "
            "rebuild jax_gn against this jaxlib's headers (pip install . -C "
            "cmake.define.JAX_GN_XLA_INCLUDE=$(python -c "
            "'import jax.ffi; print(jax.ffi.include_dir())'))"
        )


def forward(
    problem: Problem, x, scale, bias, addend, *, epsilon: float, family: str, workspace_bytes: int
):
    """(y, mean, rstd) by the registered target of the platform that runs the call."""
    statistic = _like(x, problem.statistics_shape, problem.accumulator)
    results = (_like(x), statistic, statistic, _workspace(x, workspace_bytes))
    call = jax.ffi.ffi_call(TARGETS["forward"], results)
    y, mean, rstd, _ = call(
        *map(_or_empty, (x, scale, bias, addend)),
        epsilon=np.float64(epsilon),
        **_attributes(problem, family),
    )
    return y, mean, rstd


def backward(problem: Problem, *arrays, family: str, workspace_bytes: int):
    """(dx, dscale, dbias), None where absent, by the registered target.

    The arrays are those of `BackwardPlan.call`, in its order: x is the second.
    """
    x = arrays[1]
    gradients = [
        _like(x, (0,), "float32")
        if parameter is None
        else _like(x, problem.parameter_shape(parameter), parameter.dtype)
        for parameter in (problem.scale, problem.bias)
    ]
    call = jax.ffi.ffi_call(
        TARGETS["backward"], (_like(x), *gradients, _workspace(x, workspace_bytes))
    )
    dx, dscale, dbias, _ = call(*map(_or_empty, arrays), **_attributes(problem, family))
    return (
        dx,
        None if problem.scale is None else dscale,
        None if problem.bias is None else dbias,
    )


def moments(problem: Problem, x, addend, *, family: str, workspace_bytes: int):
    """(mean, what its rounding left, variance), each [N, G], by the registered target."""
    statistic = _like(x, problem.statistics_shape, problem.accumulator)
    results = (statistic, statistic, statistic, _workspace(x, workspace_bytes))
    call = jax.ffi.ffi_call(TARGETS["moments"], results)
    return tuple(call(x, _or_empty(addend), layout=problem.layout, family=family)[:3])


def channel_sums(problem: Problem, *arrays, family: str, workspace_bytes: int):
    """The sums of dz and of dz * xhat, each [N, C], by that target; arrays as backward's."""
    x = arrays[1]
    sums = _like(x, (problem.n, problem.channels), problem.accumulator)
    call = jax.ffi.ffi_call(TARGETS["channel_sums"], (sums, sums, _workspace(x, workspace_bytes)))
    dz, dz_xhat, _ = call(*map(_or_empty, arrays), **_attributes(problem, family))
    return dz, dz_xhat


def _attributes(problem: Problem, family: str) -> dict[str, str]:
    return {
        "layout": problem.layout,
        "activation": problem.activation or "none",
        "family": family,
    }


def _or_empty(array):
    """An absent parameter crosses the border as a buffer of shape [0]."""
    return jnp.zeros((0,), "float32") if array is None else array


def _like(x, shape: tuple[int, ...] | None = None, dtype: str | None = None):
    """A result type made from the operand's own: it carries the mesh and the varying axes along."""
    aval = jax.typeof(x)
    return aval.update(
        shape=aval.shape if shape is None else shape,
        dtype=aval.dtype if dtype is None else jnp.dtype(dtype),
        weak_type=False,
    )


def _workspace(x, size: int):
    """XLA owns the scratch memory: a result that is dropped.

    So XLA counts it, reuses it, and no kernel allocates. uint8, because garbage in a float buffer
    would trip jax_debug_nans.
    """
    return _like(x, (size,), "uint8")
