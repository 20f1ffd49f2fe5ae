"""What is timed: one forward + backward step of each implementation, as a jitted function."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

import jax_gn
from benchmarks.problems import NamedProblem

ACTIVATIONS = {
    None: lambda x: x,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "leaky_relu": jax.nn.leaky_relu,
}
EPSILON = 1e-6


def copy(x):
    """A pass that reads and writes one tensor: the bandwidth that the machine has."""
    return -x


def ours(problem: NamedProblem, layout: str, activation: str | None) -> Callable:
    """jax_gn.group_norm, its own choice of everything."""

    def norm(x, scale, bias):
        return jax_gn.group_norm(
            x,
            scale,
            bias,
            num_groups=problem.groups,
            epsilon=EPSILON,
            channel_axis=-1 if layout == "channels_last" else 1,
            activation=activation,
            implementation="ffi",
        )

    return _step(norm)


def flax(problem: NamedProblem, layout: str, activation: str | None) -> Callable:
    """What people run today: flax.linen.GroupNorm, then the activation, compiled by XLA."""
    from flax import linen

    layer = linen.GroupNorm(problem.groups, epsilon=EPSILON)

    def norm(x, scale, bias):
        # Flax's layer is channels-last; a channels-first model has the transposes XLA can fuse.
        x = x if layout == "channels_last" else jnp.moveaxis(x, 1, -1)
        y = jnp.asarray(layer.apply({"params": {"scale": scale, "bias": bias}}, x), x.dtype)
        y = ACTIVATIONS[activation](y)
        return y if layout == "channels_last" else jnp.moveaxis(y, -1, 1)

    return _step(norm)


def family(name: str) -> Callable:
    """A peer that runs one kernel family of ours through the plans."""

    def peer(problem: NamedProblem, layout: str, activation: str | None) -> Callable:
        def step(x, scale, bias, dy):
            options = {
                "num_groups": problem.groups,
                "channel_axis": -1 if layout == "channels_last" else 1,
                "scale_shape": scale.shape,
                "bias_shape": bias.shape,
                "scale_dtype": scale.dtype,
                "bias_dtype": bias.dtype,
                "activation": activation,
                "preference": name,
            }
            forward = jax_gn.plan_forward(x.shape, x.dtype, **options)
            backward = jax_gn.plan_backward(x.shape, x.dtype, **options)
            y, mean, rstd = forward.run(x, scale, bias, epsilon=EPSILON)
            return y, *backward.run(dy, x, scale, bias, mean, rstd)

        return jax.jit(step)

    return peer


def _step(norm: Callable) -> Callable:
    def step(x, scale, bias, dy):
        y, pull = jax.vjp(norm, x, scale, bias)
        return y, *pull(dy)

    return jax.jit(step)
