"""group_norm() and instance_norm(): choice of the implementation, and the derivatives.

group_norm            checks, chooses
  _kernel_group_norm    custom_vjp: saves x, scale, bias (with an activation), addend, mean, rstd
    _forward, _backward   custom_jvp: the kernel for the value, the definition's JVP for the
                          tangent, so that second derivatives exist
      _spmd.forward, _spmd.backward -> _plan -> _ffi
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from . import _ffi, _sharding, _spmd
from ._problem import (
    ONE_CHANNEL_A_GROUP,
    Problem,
    across_of,
    check_epsilon,
    is_static,
    problem_of,
)
from ._spmd import Call

IMPLEMENTATIONS = ("ffi", "xla")
# The name under which mean and rstd are saved, for jax.checkpoint policies.
STATISTICS_NAME = "jax_gn_statistics"


def group_norm(
    x,
    scale=None,
    bias=None,
    *,
    num_groups: int,
    addend=None,
    epsilon: float = 1e-6,
    channel_axis: int = -1,
    activation: str | None = None,
    implementation: str | Sequence[str] | None = None,
    axis_name=None,
    axis_index_groups=None,
):
    r"""Group normalization, optionally followed by an activation, as one fused kernel.

    For each sample n and each group g of C/G consecutive channels, over the M = spatial * C/G
    elements x of the group:

        mean = sum(x) / M
        var  = sum((x - mean)**2) / M                  (biased)
        y    = activation((x - mean) / sqrt(var + epsilon) * scale + bias)

    With an addend, x is x + addend there, in the type of the sums, and is not stored.

    Sums, mean and variance are in float32 (float64 for float64), the variance from centred values:
    large means cost y no accuracy, and its gradients what rounding the saved mean to float32 costs.
    Results are the same bits in every run.

    Reverse-mode derivatives of any order work, so does forward mode over reverse. Direct forward
    mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) needs ``implementation="xla"``; where JAX itself
    reports it, the text is "can't apply forward-mode differentiation (jvp) to a custom_vjp
    function" (or "forward-mode autodiff", by the version of JAX). mean and rstd are saved under the
    name "jax_gn_statistics" for `jax.checkpoint` policies.

    Args:
      x: `[N, *spatial, C]`, or `[N, C, *spatial]` with ``channel_axis=1``; rank 2 to 8; float32,
        float16, bfloat16 or float64. N may be one of `jax.export`'s symbols (then by the
        definition).
      scale: `(C,)`, or `(N, C)` for one scale a sample (AdaGN, FiLM); any of the four types; None:
        no scale.
      bias: likewise; its shape and type may differ from scale's.
      num_groups: the number of groups G, a divisor of C.
      addend: `(C,)` or `(N, C)`, as scale; what a model adds to x right before (the bias of a
        convolution without one, a time embedding): the kernels add it as they read x, which saves a
        pass over x. Its gradient is that of x, summed over the axes that it doesn't have.
      epsilon: added to the variance; a finite Python number >= 0.
      channel_axis: -1 (or rank - 1), or 1.
      activation: None, "silu" ("swish"), "relu", "gelu" (tanh form), "leaky_relu" (slope 0.01).
        Its input is recomputed in the backward pass, not stored.
      implementation: "ffi": the kernels; "xla": the `jax.numpy` definition, on any platform; None:
        the kernels where the platform has them, else the definition; a sequence: the first that can
        serve.
      axis_name: name(s) of mapped axes (`jax.shard_map`, `jax.pmap`) over whose devices a group
        goes on: x is then a shard of the positions, all shards of one size. The kernels take the
        sums of the shard, and each pass makes one all-reduce: of `[devices, N, G]` moments, of
        `[N, C]` sums (over an axis of `jax.vmap`: the definition). Not needed under `jit` with
        sharded arrays.
      axis_index_groups: the sets of devices that share groups, as `jax.lax.psum` has it.

    Returns:
      y, of x's shape and dtype.

    Raises:
      ValueError, TypeError: at trace time, for arguments that no GroupNorm has; nothing is run.
      NotImplementedError: a valid call that the named implementation can't serve, or a channel axis
        in the middle.
      ImportError: the compiled module is broken, or newer than the installed jaxlib.

    Source: Wu and He, "Group Normalization", ECCV 2018, arXiv:1803.08494.
    """
    x, scale, bias, addend = map(_as_array, (x, scale, bias, addend))
    problem = problem_of(
        x,
        scale,
        bias,
        addend,
        num_groups=num_groups,
        channel_axis=channel_axis,
        activation=activation,
    )
    epsilon = check_epsilon(epsilon)
    chosen = choose(implementation)
    if not is_static(problem.n):
        if implementation == "ffi":
            raise NotImplementedError(
                f"the kernels need a batch that is a number, got {problem.n}: write "
                'implementation="xla" or None, which exports the definition'
            )
        chosen = "xla"
    across = across_of(axis_name, axis_index_groups)
    if across is not None and not _sharding.is_over_devices(across):
        if implementation == "ffi":
            raise NotImplementedError(
                "the kernels need an axis_name of devices (jax.shard_map, jax.pmap), got "
                f'{axis_name!r}: write implementation="xla" or None'
            )
        chosen = "xla"
    partition = _sharding.partitions()
    call = Call(problem, epsilon, fallback=chosen is None, partition=partition, across=across)
    if chosen == "xla":
        return _sharding.define("forward", call, x, scale, bias, addend)[0]
    arrays = _sharding.vary_alike(x, scale, bias, addend)
    try:
        return _kernel_group_norm(call, *arrays)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "jax_gn's kernels have no direct forward mode (jax.jvp, jax.jacfwd, jax.linearize): "
            'write group_norm(..., implementation="xla") where it is needed'
        ) from error


def instance_norm(
    x,
    scale=None,
    bias=None,
    *,
    addend=None,
    epsilon: float = 1e-6,
    channel_axis: int = -1,
    activation: str | None = None,
    implementation: str | Sequence[str] | None = None,
    axis_name=None,
    axis_index_groups=None,
):
    """Instance normalization: `group_norm` with one channel a group (num_groups = C).

    Statistics per sample and channel, over the spatial axes. Arguments, result and errors are
    `group_norm`'s.

    Source: Ulyanov, Vedaldi and Lempitsky, "Instance Normalization", 2016, arXiv:1607.08022.
    """
    return group_norm(
        x,
        scale,
        bias,
        num_groups=ONE_CHANNEL_A_GROUP,  # pyright: ignore[reportArgumentType]
        addend=addend,
        epsilon=epsilon,
        channel_axis=channel_axis,
        activation=activation,
        implementation=implementation,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
    )


def _as_array(value):
    """numpy arrays become JAX's (and follow jax_enable_x64); the checks see to all else."""
    return jnp.asarray(value) if hasattr(value, "__array__") else value


def choose(implementation) -> str | None:
    """ "ffi", "xla", or None: the kernels with the definition as fallback."""
    if implementation is None:
        reason = _why_not_ffi()
        if reason is None:
            return None
        _warn_fallback(reason)
        # The kernels may still serve other platforms that this trace is lowered for.
        return None if _ffi.module("cpu") is not None else "xla"
    if isinstance(implementation, str):
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f'implementation must be "ffi", "xla", None or a sequence, got {implementation!r}'
            )
        reason = _why_not_ffi() if implementation == "ffi" else None
        if reason is not None:
            raise NotImplementedError(f'{reason}, or write implementation="xla"')
        return implementation
    if not isinstance(implementation, Sequence) or not implementation:
        raise ValueError(
            f'implementation must be "ffi", "xla", None or a sequence of them, '
            f"got {implementation!r}"
        )
    for position, name in enumerate(implementation):
        try:
            return choose(name)
        except NotImplementedError:
            if position == len(implementation) - 1:
                raise


def _why_not_ffi() -> str | None:
    """Why the default backend has no kernels here; None: it has them."""
    backend = jax.default_backend()
    if backend not in ("cpu", "gpu"):
        return f"jax_gn has no kernels for the default backend {backend!r}"
    if backend == "gpu" and "rocm" in jax.devices()[0].client.platform_version.lower():
        return "jax_gn has no kernels for ROCm"
    if _ffi.module("cpu") is None:
        return (
            "jax_gn's compiled modules are missing: install the package with `pip install .` (in a "
            "checkout the source tree hides the installed package: `cd` out of it, or `python -P`)"
        )
    if backend == "gpu" and _ffi.module("cuda") is None:
        return (
            "jax_gn was built without its CUDA module: rebuild it with nvcc on the PATH "
            "(`pip install . -C cmake.define.JAX_GN_CUDA=ON`)"
        )
    return None


@functools.cache
def _warn_fallback(reason: str) -> None:
    warnings.warn(
        f'{reason}. group_norm runs as plain JAX (implementation="xla") meanwhile',
        RuntimeWarning,
        stacklevel=4,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel_group_norm(call: Call, x, scale, bias, addend):
    return _forward(call, x, scale, bias, addend)[0]


def _kernel_group_norm_fwd(call: Call, x, scale, bias, addend):
    y, mean, rstd = _forward(call, x, scale, bias, addend)
    mean, rstd = (checkpoint_name(s, STATISTICS_NAME) for s in (mean, rstd))
    # Without an activation the pre-activation is not recomputed, and bias not needed; but under
    # explicit mesh axes its gradient must be sharded as it is.
    unneeded = call.problem.activation is None and not _sharding.mesh_is_explicit(x)
    saved_bias = None if unneeded else bias
    return y, (x, scale, saved_bias, addend, mean, rstd)


def _kernel_group_norm_bwd(call: Call, saved, dy):
    dx, dscale, dbias = _backward(call, dy, *saved)
    return dx, dscale, dbias, _addend_gradient(call.problem, dx, saved[3])


def _addend_gradient(problem: Problem, dx, addend):
    """dx summed over the axes that addend doesn't have: outside the kernels, as XLA sums it."""
    if problem.addend is None:
        return None
    kept = (0, problem.channel_axis) if problem.addend.per_sample else (problem.channel_axis,)
    axes = tuple(axis for axis in range(dx.ndim) if axis not in kept)
    total = jnp.sum(dx, axes, dtype=problem.accumulator).astype(addend.dtype)
    return _sharding.placed_like(total, addend)


_kernel_group_norm.defvjp(_kernel_group_norm_fwd, _kernel_group_norm_bwd)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward(call: Call, *arrays):
    return _spmd.forward(call, *arrays)


@_forward.defjvp
def _forward_jvp(call: Call, primals, tangents):
    definition = functools.partial(_sharding.define, "forward", call)
    return _forward(call, *primals), jax.jvp(definition, primals, tangents)[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(call: Call, *arrays):
    return _spmd.backward(call, *arrays)


@_backward.defjvp
def _backward_jvp(call: Call, primals, tangents):
    definition = functools.partial(_sharding.define, "backward", call)
    return _backward(call, *primals), jax.jvp(definition, primals, tangents)[1]
