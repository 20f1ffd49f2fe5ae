"""What is timed: each implementation as a function, forward alone or forward + backward.

A peer is made for a Case and called as f(x, scale, bias, dy): it returns (y,) in the pass
"forward", (y, dx, dscale, dbias) in "both".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_gn
from benchmarks.problems import EPSILON, Case

ACTIVATIONS = {
    None: lambda x: x,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "leaky_relu": jax.nn.leaky_relu,
}


def copy(x):
    """A pass that reads and writes one tensor: the bandwidth that the machine has."""
    return -x


def ours(case: Case) -> Callable:
    """jax_gn.group_norm, its own choice of everything."""
    norm = functools.partial(
        jax_gn.group_norm,
        num_groups=case.problem.groups,
        epsilon=EPSILON,
        channel_axis=case.channel_axis,
        activation=case.activation,
        implementation="ffi",
    )
    return _step(case, norm)


def flax(case: Case, *, exact: bool = False) -> Callable:
    """What people run today: flax.linen.GroupNorm, then the activation, compiled by XLA."""
    from flax import linen

    layer = linen.GroupNorm(
        case.problem.groups, epsilon=EPSILON, use_fast_variance=not exact, dtype=case.dtype
    )

    def norm(x, scale, bias):
        # Flax's layer is channels-last; a channels-first model has the transposes XLA can fuse.
        x = jnp.moveaxis(x, case.channel_axis, -1)
        y = layer.apply({"params": {"scale": scale, "bias": bias}}, x)
        return jnp.moveaxis(ACTIVATIONS[case.activation](y), -1, case.channel_axis)

    return _step(case, norm)


def family(case: Case, name: str) -> Callable:
    """One kernel family of ours, by its plan. NotImplementedError: it can't serve the case."""
    options = {
        "num_groups": case.problem.groups,
        "channel_axis": case.channel_axis,
        "activation": case.activation,
        "scale_shape": case.problem.shape[-1:],
        "bias_shape": case.problem.shape[-1:],
        "platform": case.platform,
        "preference": name,
    }
    forward = jax_gn.plan_forward(case.shape, case.dtype, **options)
    if case.direction == "forward":
        return jax.jit(lambda x, scale, bias, dy: forward.run(x, scale, bias, epsilon=EPSILON)[:1])
    backward = jax_gn.plan_backward(case.shape, case.dtype, **options)

    def step(x, scale, bias, dy):
        y, mean, rstd = forward.run(x, scale, bias, epsilon=EPSILON)
        return y, *backward.run(dy, x, scale, bias, mean, rstd)

    return jax.jit(step)


def of_case(case: Case, families: list[str]) -> dict[str, Any]:
    """{name: peer} of all that JAX runs; a family that can't serve the case is left out."""
    found = {
        "flax": flax(case),
        "flax_exact": flax(case, exact=True),
        "ours": ours(case),
    }
    for name in families:
        try:
            found[name] = family(case, name)
        except NotImplementedError:
            continue
    return found


def _step(case: Case, norm: Callable) -> Callable:
    if case.direction == "forward":
        return jax.jit(lambda x, scale, bias, dy: (norm(x, scale, bias),))

    def step(x, scale, bias, dy):
        y, pull = jax.vjp(norm, x, scale, bias)
        return y, *pull(dy)

    return jax.jit(step)
