"""How the two calls behave on several platforms and under vmap.

Each pass is `custom_vmap(jit(sharded(platform_dependent(cpu=…, cuda=…, default=definition))))`.
A mapped axis is folded into the batch: one custom call, no loop. Where groups go on on other
devices, only the sums of a pass are such a call, and the collectives around it see mapped axes.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from . import _ffi, _reference, _sharding
from ._plan import (
    BackwardPlan,
    ChannelSumsPlan,
    DeviceLimits,
    ForwardPlan,
    MomentsPlan,
    make_plan,
)
from ._problem import Across, Parameter, Problem


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about one call of group_norm."""

    problem: Problem
    epsilon: float
    fallback: bool  # the definition serves platforms without a kernel; False: they are an error
    partition: bool = True  # arrays on automatic mesh axes are worked on shard by shard
    across: Across | None = None  # x is a shard of the positions that lie on these devices


def forward(call: Call, x, scale, bias):
    """(y, mean, rstd) by the kernels."""
    if call.across is not None:
        return _local_forward(call, x, scale, bias)
    return _forward(call)(x, scale, bias)


def backward(call: Call, dy, x, scale, bias, mean, rstd):
    """(dx, dscale, dbias) by the kernels."""
    if call.across is not None:
        return _local_backward(call, dy, x, scale, bias, mean, rstd)
    return _backward(call)(dy, x, scale, bias, mean, rstd)


def _by_platform(call: Call, plan_kind, kernel_options, definition, *arrays):
    """The plan's kernel on each platform that has one, else the definition."""
    branches = {}
    for platform in _ffi.PLATFORMS:
        if _ffi.module(platform) is not None:
            # The workspace of a plan does not depend on the device: the default limits do.
            plan = make_plan(plan_kind, call.problem, platform, DeviceLimits())
            branches[platform] = functools.partial(plan.call, **kernel_options)
    if call.fallback:
        branches["default"] = functools.partial(definition, call.problem, **kernel_options)
    return jax.lax.platform_dependent(*arrays, **branches)


# jit makes an eager call hit the compilation cache instead of compiling its branches each time.
@functools.partial(jax.jit, static_argnums=0)
def _run_forward(call: Call, x, scale, bias):
    return _sharding.run("forward", _local_forward, call, x, scale, bias)


@functools.partial(jax.jit, static_argnums=0)
def _run_backward(call: Call, *arrays):
    return _sharding.run("backward", _local_backward, call, *arrays)


def _local_forward(call: Call, *arrays):
    """The forward pass of the arrays that one device holds."""
    options = {"epsilon": call.epsilon}
    if call.across is not None:
        options |= {"across": call.across, "moments": _moments(call)}
        return _reference.forward(call.problem, *arrays, **options)
    return _by_platform(call, ForwardPlan, options, _reference.forward, *arrays)


def _local_backward(call: Call, *arrays):
    if call.across is not None:
        options = {"across": call.across, "channel_sums": _channel_sums(call)}
        # Statistics over devices vary less than x: one kernel call wants its arrays to vary alike.
        return _reference.backward(call.problem, *_sharding.vary_alike(*arrays), **options)
    return _by_platform(call, BackwardPlan, {}, _reference.backward, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _run_moments(call: Call, x):
    return _by_platform(call, MomentsPlan, {}, _reference.local_moments, x)


@functools.partial(jax.jit, static_argnums=0)
def _run_channel_sums(call: Call, *arrays):
    return _by_platform(call, ChannelSumsPlan, {}, _reference.local_channel_sums, *arrays)


@functools.lru_cache(maxsize=4096)
def _forward(call: Call):
    mapped = custom_vmap(functools.partial(_run_forward, call))

    @mapped.def_vmap
    def rule(size, batched, x, scale, bias):
        folded = _fold_problem(call, size, batched[1], batched[2])
        arrays = _fold_arrays(call, size, batched, x, scale, bias)
        outputs = forward(folded, *arrays)
        return tuple(_unfold(call, size, out) for out in outputs), (True, True, True)

    return mapped


@functools.lru_cache(maxsize=4096)
def _backward(call: Call):
    mapped = custom_vmap(functools.partial(_run_backward, call))

    @mapped.def_vmap
    def rule(size, batched, dy, x, scale, bias, mean, rstd):
        # Gradients of a per-channel parameter sum over the batch, but not over the mapped axis:
        # ask for them per sample, in the accumulator type, and finish the sum here.
        folded = _fold_problem(call, size, True, True)
        folded = dataclasses.replace(
            folded, problem=folded.problem.with_wide_parameters(per_sample=True)
        )
        dy, mean, rstd = _fold_each(size, (batched[0], *batched[4:]), dy, mean, rstd)
        x, scale, bias = _fold_arrays(call, size, batched[1:4], x, scale, bias, per_sample=True)
        acc = call.problem.accumulator
        scale, bias = (p if p is None else p.astype(acc) for p in (scale, bias))
        dx, dscale, dbias = backward(folded, dy, x, scale, bias, mean, rstd)
        outputs = (
            _unfold(call, size, dx),
            _finish_gradient(call, size, dscale, call.problem.scale),
            _finish_gradient(call, size, dbias, call.problem.bias),
        )
        return outputs, jax.tree.map(lambda _: True, outputs)

    return mapped


@functools.lru_cache(maxsize=4096)
def _moments(call: Call):
    mapped = custom_vmap(functools.partial(_run_moments, call))

    @mapped.def_vmap
    def rule(size, _, x):
        folded = _fold_problem(call, size, False, False)
        sums = _moments(folded)(_fold(size, True, x))
        return tuple(_unfold(call, size, s) for s in sums), (True,) * 3

    return mapped


@functools.lru_cache(maxsize=4096)
def _channel_sums(call: Call):
    mapped = custom_vmap(functools.partial(_run_channel_sums, call))

    @mapped.def_vmap
    def rule(size, batched, dy, x, scale, bias, mean, rstd):
        folded = _fold_problem(call, size, batched[2], batched[3])
        dy, mean, rstd = _fold_each(size, (batched[0], *batched[4:]), dy, mean, rstd)
        x, scale, bias = _fold_arrays(call, size, batched[1:4], x, scale, bias)
        sums = _channel_sums(folded)(dy, x, scale, bias, mean, rstd)
        return tuple(_unfold(call, size, s) for s in sums), (True, True)

    return mapped


def _fold_problem(call: Call, size: int, scale_mapped: bool, bias_mapped: bool) -> Call:
    """The call with the mapped axis folded into N; a mapped parameter becomes per sample."""
    p = call.problem

    def parameter(old, is_mapped):
        return dataclasses.replace(old, per_sample=True) if old and is_mapped else old

    problem = dataclasses.replace(
        p,
        shape=(size * p.n, *p.shape[1:]),
        scale=parameter(p.scale, scale_mapped),
        bias=parameter(p.bias, bias_mapped),
    )
    return dataclasses.replace(call, problem=problem)


def _fold_arrays(call: Call, size, batched, x, scale, bias, *, per_sample=False):
    """x, scale and bias with the mapped axis folded into N."""
    p = call.problem

    def parameter(value, form, is_mapped):
        if value is None or (not is_mapped and not form.per_sample and not per_sample):
            return value
        if not form.per_sample:  # [C] or [size, C] -> one row a sample
            value = jnp.broadcast_to(
                value[:, None] if is_mapped else value, (size, p.n, p.channels)
            )
            return value.reshape(size * p.n, p.channels)
        return _fold(size, is_mapped, value)

    return (
        _fold(size, batched[0], x),
        parameter(scale, p.scale, batched[1]),
        parameter(bias, p.bias, batched[2]),
    )


def _fold_each(size: int, batched, *values):
    return tuple(_fold(size, b, value) for b, value in zip(batched, values, strict=True))


def _fold(size: int, is_mapped: bool, value):
    if not is_mapped:
        value = jnp.broadcast_to(value, (size, *value.shape))
    return value.reshape(size * value.shape[1], *value.shape[2:])


def _unfold(call: Call, size: int, value):
    return value.reshape(size, call.problem.n, *value.shape[1:])


def _finish_gradient(call: Call, size: int, per_sample, parameter: Parameter | None):
    if parameter is None:
        return None
    value = _unfold(call, size, per_sample)
    if not parameter.per_sample:
        value = value.sum(1)
    return value.astype(parameter.dtype)
