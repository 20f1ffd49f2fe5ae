"""How tests call: one compiled function per case and implementation, and what its HLO holds."""

from __future__ import annotations

import functools
import re

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

import jax_gn
from jax_gn._ffi import TARGETS, planner

from problems import Case

FORWARD, BACKWARD = TARGETS["forward"], TARGETS["backward"]
MOMENTS, CHANNEL_SUMS = TARGETS["moments"], TARGETS["channel_sums"]


def kernels(compiled_text: str) -> list[str]:
    """The custom calls of ours in a compiled HLO text, in its order."""
    return [
        target
        for target in re.findall(r'custom_call_target="([^"]+)"', compiled_text)
        if target in TARGETS.values()
    ]


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def kernels_of(function, *arguments) -> list[str]:
    return kernels(compiled(function, *arguments).as_text())


def flax_group_norm(x, scale, bias, *, num_groups, epsilon, channel_axis, activation):
    """Flax's GroupNorm and jax.nn's activation: what jax_gn replaces in a user's model."""
    x = jnp.moveaxis(x, channel_axis, -1)
    per_channel = {
        name: value
        for name, value in (("scale", scale), ("bias", bias))
        if value is not None and value.ndim == 1
    }
    # A bias per channel under a scale per sample comes after it.
    if scale is not None and scale.ndim == 2:
        per_channel = {}
    module = flax.linen.GroupNorm(
        num_groups=num_groups,
        epsilon=epsilon,
        use_fast_variance=False,
        use_scale="scale" in per_channel,
        use_bias="bias" in per_channel,
        dtype=x.dtype,
    )
    y = module.apply({"params": per_channel}, x)
    for name, value in (("scale", scale), ("bias", bias)):
        if value is not None and name not in per_channel:
            rows = value.reshape(-1, *(1,) * (x.ndim - 2), x.shape[-1]).astype(x.dtype)
            y = y * rows if name == "scale" else y + rows
    if activation is not None:
        y = getattr(jax.nn, activation)(y)
    return jnp.moveaxis(y, -1, channel_axis)


def function_of(case: Case, source: str):
    """f(x, scale, bias) of "ffi", "xla" or "flax"."""
    if source == "flax":
        return functools.partial(flax_group_norm, **case.options)
    return functools.partial(jax_gn.group_norm, **case.options, implementation=source)


def value(case: Case, source: str) -> dict[str, np.ndarray]:
    """{"y": ...} by the forward pass alone."""
    with case.precision():
        arrays = jax.tree.map(jnp.asarray, case.arrays[:3])
        call = compiled(function_of(case, source), *arrays)
        assert kernels(call.as_text()) == ([FORWARD] if source == "ffi" else [])
        return {"y": np.asarray(call(*arrays))}


def value_and_gradients(case: Case, source: str) -> dict[str, np.ndarray]:
    """y, dx, dscale, dbias (where they exist), from one compiled function."""

    def run(x, scale, bias, dy):
        y, pull = jax.vjp(function_of(case, source), x, scale, bias)
        return y, *pull(dy)

    with case.precision():
        arrays = jax.tree.map(jnp.asarray, case.arrays)
        call = compiled(run, *arrays)
        assert kernels(call.as_text()) == ([FORWARD, BACKWARD] if source == "ffi" else [])
        results = zip(("y", "dx", "dscale", "dbias"), call(*arrays), strict=True)
        return {name: np.asarray(value) for name, value in results if value is not None}


def families() -> list[str]:
    return [name for name in planner().families if name != "auto"]


def plans(make, **arguments) -> list:
    """The plan of every family that serves the problem."""
    plans = []
    for family in families():
        try:
            plans.append(make(**arguments, preference=family))
        except NotImplementedError as refusal:
            assert family in str(refusal) or "too large for one launch" in str(refusal)
            continue
        assert plans[-1].family == family
    return plans
