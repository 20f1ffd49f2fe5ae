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


def forward(call: Call, x, scale, bias, addend):
    """(y, mean, rstd) by the kernels."""
    if call.across is not None:
        return _local_forward(call, x, scale, bias, addend)
    return _forward(call)(x, scale, bias, addend)


def backward(call: Call, dy, x, scale, bias, addend, mean, rstd):
    """(dx, dscale, dbias) by the kernels."""
    if call.across is not None:
        return _local_backward(call, dy, x, scale, bias, addend, mean, rstd)
    return _backward(call)(dy, x, scale, bias, addend, mean, rstd)


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
def _run_forward(call: Call, *arrays):
    return _sharding.run("forward", _local_forward, call, *arrays)


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
def _run_moments(call: Call, *arrays):
    return _by_platform(call, MomentsPlan, {}, _reference.local_moments, *arrays)


@functools.partial(jax.jit, static_argnums=0)
def _run_channel_sums(call: Call, *arrays):
    return _by_platform(call, ChannelSumsPlan, {}, _reference.local_channel_sums, *arrays)


@functools.lru_cache(maxsize=4096)
def _forward(call: Call):
    mapped = custom_vmap(functools.partial(_run_forward, call))

    @mapped.def_vmap
    def rule(size, batched, x, *parameters):
        folded = _fold_problem(call, size, *batched[1:])
        (x,) = _fold_each(size, batched[:1], x)
        arrays = x, *_fold_parameters(call, folded, size, batched[1:], *parameters)
        outputs = forward(folded, *arrays)
        return tuple(_unfold(call, size, out) for out in outputs), (True, True, True)

    return mapped


@functools.lru_cache(maxsize=4096)
def _backward(call: Call):
    mapped = custom_vmap(functools.partial(_run_backward, call))

    @mapped.def_vmap
    def rule(size, batched, dy, x, scale, bias, addend, mean, rstd):
        # Gradients of a per-channel parameter sum over the batch, but not over the mapped axis:
        # ask for them per sample, in the accumulator type, and finish the sum here.
        folded = _fold_problem(call, size, True, True, batched[4])
        folded = dataclasses.replace(
            folded, problem=folded.problem.with_wide_parameters(per_sample=True)
        )
        dy, x, mean, rstd = _fold_each(size, (*batched[:2], *batched[5:]), dy, x, mean, rstd)
        scale, bias, addend = _fold_parameters(
            call, folded, size, batched[2:5], scale, bias, addend
        )
        acc = call.problem.accumulator
        scale, bias = (p if p is None else p.astype(acc) for p in (scale, bias))
        dx, dscale, dbias = backward(folded, dy, x, scale, bias, addend, mean, rstd)
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
    def rule(size, batched, x, addend):
        folded = _fold_problem(call, size, False, False, batched[1])
        (x,) = _fold_each(size, batched[:1], x)
        _, _, addend = _fold_parameters(
            call, folded, size, (False, False, batched[1]), None, None, addend
        )
        sums = _moments(folded)(x, addend)
        return tuple(_unfold(call, size, s) for s in sums), (True,) * 3

    return mapped


@functools.lru_cache(maxsize=4096)
def _channel_sums(call: Call):
    mapped = custom_vmap(functools.partial(_run_channel_sums, call))

    @mapped.def_vmap
    def rule(size, batched, dy, x, scale, bias, addend, mean, rstd):
        folded = _fold_problem(call, size, *batched[2:5])
        dy, x, mean, rstd = _fold_each(size, (*batched[:2], *batched[5:]), dy, x, mean, rstd)
        parameters = _fold_parameters(call, folded, size, batched[2:5], scale, bias, addend)
        sums = _channel_sums(folded)(dy, x, *parameters, mean, rstd)
        return tuple(_unfold(call, size, s) for s in sums), (True, True)

    return mapped


def _fold_problem(
    call: Call, size: int, scale_mapped: bool, bias_mapped: bool, addend_mapped: bool
) -> Call:
    """The call with the mapped axis folded into N; a mapped parameter becomes per sample."""
    p = call.problem

    def parameter(old, is_mapped):
        return dataclasses.replace(old, per_sample=True) if old and is_mapped else old

    problem = dataclasses.replace(
        p,
        shape=(size * p.n, *p.shape[1:]),
        scale=parameter(p.scale, scale_mapped),
        bias=parameter(p.bias, bias_mapped),
        addend=parameter(p.addend, addend_mapped),
    )
    return dataclasses.replace(call, problem=problem)


def _fold_parameters(call: Call, folded: Call, size: int, batched, *values):
    """scale, bias and addend with the mapped axis folded into N, as the folded problem has them."""
    p = call.problem

    def fold(value, name: str, is_mapped: bool):
        old, new = (getattr(c.problem, name) for c in (call, folded))
        if value is None or not new.per_sample:
            return value
        if old.per_sample:
            return _fold(size, is_mapped, value)
        # [C] or [size, C] -> one row a sample
        rows = value[:, None] if is_mapped else value
        rows = jnp.broadcast_to(rows, (size, p.n, p.channels))
        return rows.reshape(size * p.n, p.channels)

    return tuple(map(fold, values, ("scale", "bias", "addend"), batched))


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
