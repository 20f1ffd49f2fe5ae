"""The definition in `jax.numpy`: the specification, the "xla" implementation, the derivative rules.

With groups of D = C/G consecutive channels, M = spatial * D elements a group, per sample n, x with
its addend where there is one:

    mean = Σ x / M                rstd = 1 / sqrt(Σ (x - mean)² / M + epsilon)
    z = (x - mean) * rstd * scale + bias                           y = act(z)

and backward, with dz = dy * act'(z), A = Σ_spatial dz, B = Σ_spatial dz * (x - mean):

    dbias = Σ_n A     dscale = Σ_n rstd * B     (a per-sample parameter: without the Σ_n)
    dx = rstd * (scale * dz - Σ_D scale * A / M - (x - mean) * rstd² * Σ_D scale * B / M)

Both work in the accumulator type. Plain traceable functions: JAX differentiates them to any order.
Where shards of the positions lie on other devices, they serve too: `across` then names those, M
counts all shards' elements, and each pass makes one all-reduce of sums that have no spatial axes.
The sums of the shard itself are functions of their own, so that a kernel can take their place.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from ._problem import Across, Parameter, Problem

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=True),
    "leaky_relu": jax.nn.leaky_relu,
}


def forward(
    problem: Problem,
    x,
    scale,
    bias,
    addend=None,
    *,
    epsilon: float,
    across: Across | None = None,
    moments=None,
):
    """(y, mean, rstd): y as x, the statistics [N, G] in the accumulator type.

    `moments`: what takes the place of `local_moments`, a function of x and addend.
    """
    wide = _with_addend(problem, x, addend)
    high, low, var = local_moments(problem, wide) if moments is None else moments(x, addend)
    if across is not None:
        high, low, var = _merged(high, low, var, across)
    rstd = 1 / jnp.sqrt(var + epsilon)
    xc = _groups_view(problem, wide) - _statistic_view(problem, high)
    z = (xc - _statistic_view(problem, low)) * _statistic_view(problem, rstd)
    if scale is not None:
        z = z * _parameter_view(problem, scale)
    if bias is not None:
        z = z + _parameter_view(problem, bias)
    y = z if problem.activation is None else ACTIVATIONS[problem.activation](z)
    return y.reshape(problem.shape).astype(x.dtype), high + low, rstd


def backward(
    problem: Problem,
    dy,
    x,
    scale,
    bias,
    addend,
    mean,
    rstd,
    *,
    across: Across | None = None,
    channel_sums=None,
):
    """(dx, dscale, dbias), None for an absent parameter; bias is read only with an activation.

    The gradient of addend is dx, summed over the axes that addend doesn't have.
    `channel_sums`: what takes the place of `local_channel_sums`, a function of the seven arrays.
    """
    arrays = (dy, x, scale, bias, addend, mean, rstd)
    dz, xhat, weight = _dz(problem, *_wide(problem, *arrays))
    local = _over_positions(problem, dz, xhat) if channel_sums is None else channel_sums(*arrays)
    total, count = local, max(problem.spatial * problem.group_size, 1)
    if across is not None:
        total = _across(jax.lax.psum, local, across)
        count *= _across(jax.lax.psum, 1, across)
    _, within, _ = _axes(problem)
    p, q = (
        jnp.sum(weight * _parameter_view(problem, value), within, keepdims=True) / count
        for value in total
    )
    dx = _statistic_view(problem, rstd) * (weight * dz - p - xhat * q)
    own = total if across is None or across.shared_parameters else local
    return (
        dx.reshape(problem.shape).astype(x.dtype),
        _parameter_gradient(own[1], problem.scale),
        _parameter_gradient(own[0], problem.bias),
    )


def local_moments(problem: Problem, x, addend=None):
    """(high, low, var), each [N, G]: the mean as a sum of two numbers, and the biased variance.

    An element of the group is subtracted first: a constant group then gives mean = that constant
    and var = 0 exactly, and a large mean costs no digits of x - mean.
    """
    spatial, within, _ = _axes(problem)
    axes = (*spatial, within)
    shape = problem.statistics_shape
    x = _groups_view(problem, _with_addend(problem, x, addend))
    if math.prod(problem.shape) == 0:  # nothing to reduce: mean = var = 0, by definition of ours
        return (jnp.zeros(shape, x.dtype),) * 3
    first = tuple(slice(0, 1) if i in axes else slice(None) for i in range(x.ndim))
    shift = jax.lax.stop_gradient(x[first])
    shifted = x - shift
    offset = jnp.mean(shifted, axes, keepdims=True)
    xc = shifted - offset
    var = jnp.mean(xc * xc, axes, keepdims=True)
    return shift.reshape(shape), offset.reshape(shape), var.reshape(shape)


def local_channel_sums(problem: Problem, *arrays):
    """The sums of dz and of dz * xhat over the positions, each [N, C]; arrays as backward's."""
    dz, xhat, _ = _dz(problem, *arrays)
    return _over_positions(problem, dz, xhat)


def _over_positions(problem: Problem, dz, xhat):
    spatial, _, _ = _axes(problem)
    shape = (problem.n, problem.channels)
    return tuple(jnp.sum(value, spatial).reshape(shape) for value in (dz, dz * xhat))


def _dz(problem: Problem, dy, x, scale, bias, addend, mean, rstd):
    """(dz, xhat, scale or 1) in the grouped view."""
    x = _groups_view(problem, _with_addend(problem, x, addend))
    xhat = x - _statistic_view(problem, mean)
    xhat = xhat * _statistic_view(problem, rstd)
    weight = 1 if scale is None else _parameter_view(problem, scale)
    dz = _groups_view(problem, dy)
    if problem.activation is not None:
        shift = 0 if bias is None else _parameter_view(problem, bias)
        _, pull = jax.vjp(ACTIVATIONS[problem.activation], xhat * weight + shift)
        (dz,) = pull(dz)
    return dz, xhat, weight


def _merged(high, low, var, across: Across):
    """The moments of all devices, of as many elements each, by Chan's formula.

    They come to all devices in one all-reduce of arrays in which each device has a row of its own.
    """
    axis_name, groups, _ = across
    index, size = jax.lax.axis_index(axis_name), jax.lax.psum(1, axis_name)
    mine = (jnp.arange(size) == index).reshape(1, size, 1, 1)
    moments = jnp.where(mine, jnp.stack([high, low, var])[:, None], 0)
    highs, lows, variances = _across(jax.lax.psum, moments, across)
    if groups is not None:  # the rows of the devices that share this one's groups
        members = jnp.asarray([next(g for g in groups if i in g) for i in range(size)])[index]
        highs, lows, variances = highs[members], lows[members], variances[members]
    base = highs[0]
    deviations = (highs - base) + lows
    offset = jnp.mean(deviations, 0)
    return base, offset, jnp.mean(variances + (deviations - offset) ** 2, 0)


def _with_addend(problem: Problem, x, addend):
    """x + addend, of x's shape, in the accumulator type."""
    if addend is None:
        return x.astype(problem.accumulator)
    total = _groups_view(problem, x) + _parameter_view(problem, addend)
    return total.reshape(problem.shape)


def _wide(problem: Problem, *arrays):
    """The arrays in the accumulator type: cast once, so that derivatives are rounded once."""
    return tuple(a if a is None else a.astype(problem.accumulator) for a in arrays)


def _axes(problem: Problem) -> tuple[tuple[int, ...], int, int]:
    """(spatial axes, within-group axis, first spatial axis) of the grouped view."""
    rank = len(problem.shape)
    if problem.channels_first:  # [N, G, D, *spatial]
        return tuple(range(3, rank + 1)), 2, 3
    return tuple(range(1, rank - 1)), rank, 1  # [N, *spatial, G, D]


def _groups_view(problem: Problem, x):
    """x with its channel axis split in (G, D), in the accumulator type."""
    axis = problem.channel_axis
    split = (problem.num_groups, problem.group_size)
    shape = problem.shape[:axis] + split + problem.shape[axis + 1 :]
    return x.astype(problem.accumulator).reshape(shape)


def _broadcast_view(problem: Problem, value, n: int, split: tuple[int, int]):
    """value, [n, G, D] in memory, with size-1 spatial axes where the grouped view has its own."""
    spatial, _, first = _axes(problem)
    ones = (1,) * len(spatial)
    shape = (n, *ones, *split) if first == 1 else (n, *split, *ones)
    return value.astype(problem.accumulator).reshape(shape)


def _parameter_view(problem: Problem, value):
    split = (problem.num_groups, problem.group_size)
    return _broadcast_view(problem, value, problem.n if value.ndim == 2 else 1, split)


def _statistic_view(problem: Problem, value):
    return _broadcast_view(problem, value, problem.n, (problem.num_groups, 1))


def _parameter_gradient(per_sample, parameter: Parameter | None):
    if parameter is None:
        return None
    value = per_sample if parameter.per_sample else jnp.sum(per_sample, 0)
    return value.astype(parameter.dtype)


def standardized(
    x, axes: tuple[int, ...], *, epsilon: float, mask=None, across: Across | None = None
):
    """(x - mean) * rstd over any axes, for what the kernels don't serve.

    Args:
      x: of the accumulator type, or complex: var is then the mean of |x - mean|².
      mask: where to take mean and var from, of x's shape. Elsewhere x is normalized too, or
        0 without a derivative if it is not finite or huge; a group masked throughout gives 0.
      across: the devices that the axes go on over.
    """

    def total(value):
        return _across(jax.lax.psum, value, across)

    def mean(value):
        return total(jnp.sum(value, axes, keepdims=True, where=mask)) / divisor

    real = jnp.finfo(x.dtype).dtype
    if mask is None:
        count = total(jnp.asarray(math.prod(x.shape[axis] for axis in axes), real))
    else:
        count = total(jnp.sum(mask, axes, real, keepdims=True))
    divisor = jnp.maximum(count, 1)
    shift = _some_value(jax.lax.stop_gradient(x), axes, mask, across)  # as in local_moments
    # Masked values must not enter any product: 0 times NaN is NaN, in derivatives too.
    inside = x if mask is None else jnp.where(mask, x, shift)
    offset = mean(inside - shift)
    xc = inside - shift - offset
    var = jnp.where(count > 0, mean(jnp.real(xc * jnp.conj(xc))), 1)
    rstd = 1 / jnp.sqrt(var + epsilon)
    if mask is None:
        return xc * rstd
    # Not too large for an activation's powers of it either.
    size = jnp.abs(jax.lax.stop_gradient((x - shift - offset) * rstd))
    usable = (mask | (size < jnp.finfo(real).max ** 0.25)) & (count > 0)
    return jnp.where(usable, (jnp.where(usable, x, shift) - shift - offset) * rstd, 0)


def _some_value(x, axes: tuple[int, ...], mask, across):
    """A value from within each group, the same on all its devices; 0 where there is none."""
    if jnp.iscomplexobj(x):
        parts = (_some_value(part, axes, mask, across) for part in (x.real, x.imag))
        return jax.lax.complex(*parts)
    value = jnp.max(x, axes, keepdims=True, where=mask, initial=-jnp.inf)
    value = _across(jax.lax.pmax, value, across)
    return jnp.where(jnp.isfinite(value), value, 0)


def _across(collective, value, across):
    if across is None:
        return value
    return collective(value, across.axis_name, axis_index_groups=across.axis_index_groups)
