"""What the linen and nnx norms share: which call of the kernels a layer is, and the definition of
what the kernels don't have (masks, scattered axes, complex input).

apply                 the result's dtype; learned and given scale and bias become one pair
  _kernel_call          the reshape (no transpose) after which group_norm computes the layer, or why
                        there is none
  group_norm            served
  _definition           not served: the same formula in jax.numpy, in float32 or wider
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from ._group_norm import choose, group_norm
from ._problem import (
    ACCUMULATORS,
    MAX_RANK,
    ONE_CHANNEL_A_GROUP,
    across_of,
    check_activation,
    check_epsilon,
)
from ._reference import ACTIVATIONS, standardized


@dataclasses.dataclass(frozen=True)
class Layer:
    """A Flax norm layer without its arrays, for x of one shape; axes are sorted and positive."""

    reduced: tuple[int, ...]  # a GroupNorm's with the channel axis
    features: tuple[int, ...]  # the axes of the learned scale and bias
    num_groups: int | None  # None: one channel a group
    epsilon: float
    dtype: Any  # of the result; None: inferred
    axis_name: Any
    axis_index_groups: Any
    activation: str | None
    implementation: str | Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class _KernelCall:
    """group_norm of x.reshape(shape)."""

    shape: tuple[int, ...]
    channel_axis: int
    per_sample: int  # rows of a (N, C) parameter become this many rows each


def layer_of(module, reduced: tuple[int, ...], features: tuple[int, ...], num_groups) -> Layer:
    """The Layer of a linen or nnx module for the axes of one x."""
    same = ("epsilon", "dtype", "axis_name", "axis_index_groups", "activation", "implementation")
    options = {name: getattr(module, name) for name in same}
    return Layer(reduced, features, num_groups, **options)


def raise_missing_flax(module: str, error: ModuleNotFoundError) -> NoReturn:
    """Where `from flax import ...` failed with `error`."""
    if error.name != "flax":
        raise error  # Flax is there, and something that it needs is not
    raise ImportError(f"{module} needs Flax: write `pip install 'flax>=0.12'`") from error


def canonical_axes(what: str, axes: int | Iterable[int], rank: int) -> tuple[int, ...]:
    """The axes sorted, positive, each once."""
    given = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    if any(not -rank <= axis < rank for axis in given):
        raise ValueError(
            f"{what} must lie between {-rank} and {rank - 1} for x of rank {rank}, got {axes}"
        )
    return tuple(sorted({axis % rank for axis in given}))


def group_axes(reduction_axes, rank: int) -> tuple[int, ...]:
    """A GroupNorm's reduced axes; None: all but the first."""
    if rank == 0:
        raise ValueError("x must have a channel axis, got a scalar")
    if reduction_axes is None:
        return (*range(1, rank - 1), rank - 1)
    axes = canonical_axes("reduction_axes", reduction_axes, rank)
    if not axes or axes[-1] != rank - 1:
        raise ValueError(
            f"reduction_axes must include the last axis, which holds the channels, "
            f"got {reduction_axes} for x of rank {rank}: write {(*axes, rank - 1)}"
        )
    return axes


def result_dtype(*arrays, dtype):
    """`dtype`, or what JAX's promotion makes of the arrays; always inexact."""
    if dtype is None:
        dtype = jnp.result_type(*(a for a in arrays if a is not None))
        if not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"dtype must be a floating point or complex type, got {dtype}")
    return jax.dtypes.canonicalize_dtype(dtype)


def apply(layer: Layer, x, learned, given, addend, mask):
    """The layer's output for x + addend; `learned` and `given` are (scale, bias), each optional."""
    check_epsilon(layer.epsilon)
    activation = check_activation(layer.activation)
    x = jnp.asarray(x)
    features = tuple(x.shape[axis] for axis in layer.features)
    learned = tuple(
        _learned(name, value, features) for name, value in zip(_NAMES, learned, strict=True)
    )
    given = tuple(
        _given(name, value, x, layer, features) for name, value in zip(_NAMES, given, strict=True)
    )
    addend = _given("addend", addend, x, layer, features)
    dtype = result_dtype(x, *learned, dtype=layer.dtype)
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x.real  # what Flax makes of it
    compute = jnp.promote_types(x.dtype, dtype)
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # integers need not fit a short result type
        compute = jnp.promote_types(compute, jnp.float32)
    x = x.astype(compute)
    scale, bias = _joined(learned, given, jnp.promote_types(compute, jnp.float32))
    parameters = scale, bias, addend
    per_sample = any(v is not None and v.ndim > len(features) for v in parameters)

    call = _kernel_call(layer, x, per_sample, mask)
    if isinstance(call, str):
        _require_definition(layer.implementation, call)
        y = _definition(layer, x, scale, bias, addend, mask, activation)
    else:
        groups: Any = ONE_CHANNEL_A_GROUP if layer.num_groups is None else layer.num_groups
        scale, bias, addend = (_parameter(v, call, features, compute) for v in parameters)
        y = group_norm(
            x.reshape(call.shape),
            scale,
            bias,
            addend=addend,
            num_groups=groups,
            epsilon=layer.epsilon,
            channel_axis=call.channel_axis,
            activation=activation,
            implementation=layer.implementation,
            axis_name=layer.axis_name,
            axis_index_groups=layer.axis_index_groups,
        )
        y = jnp.reshape(y, x.shape)  # pyright: ignore[reportArgumentType]
    return y.astype(dtype)


_NAMES = ("scale", "bias")


def _learned(name: str, value, features: tuple[int, ...]):
    """A learned parameter in the features' shape; nnx keeps it flat for several feature axes."""
    if value is None or value.shape == features:
        return value
    size = math.prod(features)
    if value.size != size:
        raise TypeError(
            f"the layer's {name} has {value.size} elements (shape {value.shape}), x has {size} "
            f"channels: make the layer with num_features={size}"
        )
    if value.ndim != 1:
        raise ValueError(
            f"the layer's {name} must have shape ({size},), got {value.shape}: write "
            f"layer.{name}[...] = value.reshape({size})"
        )
    return value.reshape(features)


def _given(name: str, value, x, layer: Layer, features: tuple[int, ...]):
    """A scale, bias or addend of the call, `features` or `(N, *features)`."""
    if value is None:
        return None
    value = jnp.asarray(value)
    allowed = [features] if 0 in layer.features else [features, (x.shape[0], *features)]
    if value.shape not in allowed:
        fitting = [s for s in allowed if math.prod(s) == value.size]
        hint = f": write {name}.reshape({fitting[-1]})" if fitting else ""
        shapes = " or, per sample, ".join(map(str, allowed))
        raise ValueError(f"{name} must have shape {shapes}, got {value.shape}{hint}")
    if not jnp.issubdtype(value.dtype, jnp.inexact if jnp.iscomplexobj(x) else jnp.floating):
        raise TypeError(f"{name} must be a floating point array for {x.dtype} x, got {value.dtype}")
    return value


def _joined(learned, given, wide):
    """One (scale, bias) for "learned, then given": (z * s + b) * s' + b'."""
    (scale, bias), (given_scale, given_bias) = learned, given
    if given_scale is not None:
        bias = None if bias is None else bias.astype(wide) * given_scale
        scale = given_scale if scale is None else scale.astype(wide) * given_scale
    if given_bias is not None:
        bias = given_bias if bias is None else bias.astype(wide) + given_bias
    return scale, bias


def _parameter(value, call: _KernelCall, features: tuple[int, ...], compute):
    """A parameter as group_norm takes it: (C,) or (N, C), a type that it knows."""
    if value is None:
        return None
    if jnp.dtype(value.dtype).name not in ACCUMULATORS:
        value = jnp.asarray(value, compute)
    channels = math.prod(features)
    if value.ndim == len(features):
        return value.reshape(channels)
    n = value.shape[0]
    rows = jnp.broadcast_to(value.reshape(n, 1, channels), (n, call.per_sample, channels))
    return rows.reshape(n * call.per_sample, channels)


def _kernel_call(layer: Layer, x, per_sample: bool, mask) -> _KernelCall | str:
    """How the kernels compute the layer, or what about it they don't have."""
    if mask is not None:
        return "mask"
    if jnp.dtype(x.dtype).name not in ACCUMULATORS:
        return f"{x.dtype} input"
    if x.size == 0 and 0 in [x.shape[axis] for axis in layer.features]:
        return "x without channels"
    if layer.num_groups is not None:
        first = x.ndim - len(layer.reduced)
        if layer.reduced != tuple(range(first, x.ndim)):
            return f"reduction_axes {layer.reduced} (the reduced axes must be the last ones)"
        if first == 0 and per_sample:
            return "a scale, bias or addend per sample where the batch is reduced"
        shape = _within_rank(math.prod(x.shape[:first]), x.shape[first:-1], x.shape[-1:])
        return _KernelCall(shape, -1, math.prod(x.shape[1:first]))
    first, last = layer.features[0], layer.features[-1]
    channels = (math.prod(x.shape[axis] for axis in layer.features),)
    spatial = tuple(x.shape[axis] for axis in layer.reduced)
    if layer.features == tuple(range(first, x.ndim)):
        return _KernelCall(_within_rank(x.shape[0], spatial, channels), -1, 1)
    if layer.features == tuple(range(1, last + 1)):
        spatial = _within_rank(x.shape[0], spatial, ())[1:]
        return _KernelCall((x.shape[0], *channels, *spatial), 1, 1)
    return f"feature_axes {layer.features} (they must be the last axes, or the first after axis 0)"


def _within_rank(n: int, spatial: tuple[int, ...], channels: tuple[int, ...]) -> tuple[int, ...]:
    """(n, *spatial, *channels), the spatial axes as one where there are too many."""
    if len(spatial) + 2 > MAX_RANK:
        spatial = (math.prod(spatial),)
    return (n, *spatial, *channels)


def _require_definition(implementation, reason: str) -> None:
    """Raises where `implementation` rules the definition out."""
    names = (implementation,) if implementation is None else implementation
    names = (names,) if isinstance(names, str) else names
    if not {None, "xla"}.intersection(names):
        choose(implementation)  # a name that doesn't exist: its error
        raise NotImplementedError(
            f'the kernels don\'t serve {reason}: write implementation="xla" or None'
        )


def _definition(layer: Layer, x, scale, bias, addend, mask, activation: str | None):
    """The layer in jax.numpy, in at least float32."""
    shape, axes = x.shape, layer.reduced
    if layer.num_groups is not None:
        shape = (*shape[:-1], layer.num_groups, shape[-1] // layer.num_groups)
        axes = (*axes[:-1], x.ndim)
    if mask is not None:
        mask = _broadcast_mask(mask, x.shape).reshape(shape)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if addend is not None:
        wide = wide + _feature_view(layer, addend, x.ndim).astype(wide.dtype)
    wide = wide.reshape(shape)
    across = across_of(layer.axis_name, layer.axis_index_groups)
    z = standardized(wide, axes, epsilon=layer.epsilon, mask=mask, across=across).reshape(x.shape)
    if scale is not None:
        z = z * _feature_view(layer, scale, x.ndim)
    if bias is not None:
        z = z + _feature_view(layer, bias, x.ndim)
    return z if activation is None else ACTIVATIONS[activation](z)


def _broadcast_mask(mask, shape: tuple[int, ...]):
    mask = jnp.asarray(mask, bool)
    try:
        return jnp.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(
            f"mask must broadcast to x's shape {shape}, got {mask.shape}: write one axis for each "
            "of x's, of the same size or 1"
        ) from None


def _feature_view(layer: Layer, value, rank: int):
    """A `features` or `(N, *features)` parameter with size-1 axes where x has others."""
    per_sample = value.ndim > len(layer.features)
    sizes = dict(zip(layer.features, value.shape[per_sample:], strict=True))
    if per_sample:
        sizes[0] = value.shape[0]
    return value.reshape([sizes.get(axis, 1) for axis in range(rank)])
