"""What a call is: the frozen Problem, the only validator, the table of types.

Everything below the public functions works on a `Problem` and checks nothing again.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

# dtype -> accumulator: the type of sums, mean and rstd.
ACCUMULATORS = {
    "float32": "float32",
    "float16": "float32",
    "bfloat16": "float32",
    "float64": "float64",
}
ACTIVATIONS = (None, "silu", "relu", "gelu", "leaky_relu")
ALIASES = {"swish": "silu"}
MIN_RANK, MAX_RANK = 2, 8
# Sizes of 0 count as 1. Byte counts of all that a plan adds up stay within 64 bits; as in decode.h.
MAX_ELEMENTS = 2**50
# The num_groups of instance norm: as many groups as channels.
ONE_CHANNEL_A_GROUP = object()


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A scale, bias or addend: `[C]`, or `[N, C]` when `per_sample`."""

    per_sample: bool
    dtype: str


class Across(NamedTuple):
    """The devices, besides this one, whose shards of the positions belong to the same groups."""

    axis_name: Any  # of mesh or mapped axes: one or several
    axis_index_groups: tuple[tuple[int, ...], ...] | None = None
    # Whether scale and bias are one array on all of them, whose gradient is the sum over them; else
    # each device has its own.
    shared_parameters: bool = False


@dataclasses.dataclass(frozen=True)
class Problem:
    """A valid GroupNorm: shapes, types and options, without arrays or epsilon."""

    shape: tuple[int, ...]
    dtype: str
    num_groups: int
    channel_axis: int  # 1, or the last axis
    scale: Parameter | None
    bias: Parameter | None
    activation: str | None
    addend: Parameter | None = None  # what is added to x before all else

    @property
    def n(self) -> int:
        return self.shape[0]

    @property
    def channels(self) -> int:
        return self.shape[self.channel_axis]

    @property
    def spatial(self) -> int:
        dims = [d for i, d in enumerate(self.shape) if i not in (0, self.channel_axis)]
        return math.prod(dims)

    @property
    def group_size(self) -> int:
        return self.channels // self.num_groups

    @property
    def channels_first(self) -> bool:
        return self.channel_axis != len(self.shape) - 1

    @property
    def layout(self) -> str:
        return "channels_first" if self.channels_first else "channels_last"

    @property
    def accumulator(self) -> str:
        return ACCUMULATORS[self.dtype]

    @property
    def statistics_shape(self) -> tuple[int, int]:
        return (self.n, self.num_groups)

    def with_wide_parameters(self, *, per_sample: bool = False) -> Problem:
        """The same, scale and bias, and so their gradients, in the accumulator type.

        For gradients that are summed further: over devices, or (`per_sample`) over a part of N.
        """

        def wide(old: Parameter | None) -> Parameter | None:
            return old and Parameter(old.per_sample or per_sample, self.accumulator)

        return dataclasses.replace(self, scale=wide(self.scale), bias=wide(self.bias))

    def parameter_shape(self, parameter: Parameter) -> tuple[int, ...]:
        return (self.n, self.channels) if parameter.per_sample else (self.channels,)


def make_problem(
    shape: Sequence[int],
    dtype: Any,
    *,
    num_groups: Any,
    channel_axis: int = -1,
    scale_shape: Sequence[int] | None = None,
    bias_shape: Sequence[int] | None = None,
    scale_dtype: Any = None,
    bias_dtype: Any = None,
    addend_shape: Sequence[int] | None = None,
    addend_dtype: Any = None,
    activation: str | None = None,
) -> Problem:
    """The Problem of these shapes and types, or the error that says what is wrong with them."""
    shape = _shape("shape", shape, symbolic_batch=True)
    if not MIN_RANK <= len(shape) <= MAX_RANK:
        raise ValueError(
            f"x must have rank {MIN_RANK} to {MAX_RANK} (batch, spatial axes, channels), "
            f"got shape {shape}"
        )
    axis = _channel_axis(channel_axis, len(shape))
    channels = shape[axis]
    if channels == 0:
        raise ValueError(f"x has no channels: shape {shape}, channel_axis {channel_axis}")
    if math.prod(max(d, 1) for d in shape if is_static(d)) > MAX_ELEMENTS:
        raise ValueError(f"x must have at most 2**50 elements, got shape {shape}")
    groups = channels
    if num_groups is not ONE_CHANNEL_A_GROUP:
        groups = _integer("num_groups", num_groups)
    if groups < 1 or channels % groups:
        raise ValueError(
            f"num_groups must be >= 1 and divide the number of channels, got num_groups={groups} "
            f"for C={channels} (shape {shape}, channel_axis {channel_axis})"
        )
    name = _dtype_name("x", dtype)
    return Problem(
        shape=shape,
        dtype=name,
        num_groups=groups,
        channel_axis=axis,
        scale=_parameter("scale", scale_shape, scale_dtype, shape[0], channels, name),
        bias=_parameter("bias", bias_shape, bias_dtype, shape[0], channels, name),
        activation=check_activation(activation),
        addend=_parameter("addend", addend_shape, addend_dtype, shape[0], channels, name),
    )


def problem_of(x, scale, bias, addend=None, *, num_groups, channel_axis, activation) -> Problem:
    """The Problem of these arrays (anything with shape and dtype)."""
    for name, value in (("x", x), ("scale", scale), ("bias", bias), ("addend", addend)):
        optional = " or None" if name != "x" else ""
        if not (hasattr(value, "shape") and hasattr(value, "dtype")) and (
            value is not None or name == "x"
        ):
            raise TypeError(
                f"{name} must be an array{optional}, got {type(value).__name__}: "
                f"write jnp.asarray({name})"
            )
    return make_problem(
        x.shape,
        x.dtype,
        num_groups=num_groups,
        channel_axis=channel_axis,
        scale_shape=None if scale is None else scale.shape,
        bias_shape=None if bias is None else bias.shape,
        scale_dtype=None if scale is None else scale.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        addend_shape=None if addend is None else addend.shape,
        addend_dtype=None if addend is None else addend.dtype,
        activation=activation,
    )


def across_of(axis_name: Any, axis_index_groups: Any) -> Across | None:
    """The devices of group_norm's two arguments; JAX checks both where it meets them."""
    if axis_name is None:
        return None
    name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    if axis_index_groups is None:
        return Across(name)
    return Across(name, tuple(tuple(map(int, group)) for group in axis_index_groups))


def check_epsilon(epsilon: Any) -> float:
    """Epsilon as a float, if it is a finite Python number >= 0."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, numbers.Real):
        raise TypeError(
            "epsilon must be a Python number (it is compiled into the kernel call), "
            f"got {type(epsilon).__name__}"
        )
    try:
        value = float(epsilon)
    except OverflowError:  # a Python integer beyond float64
        value = math.inf
    if not 0 <= value <= float(jnp.finfo(jnp.float32).max):  # false for NaN
        raise ValueError(f"epsilon must be finite (in float32) and >= 0, got {value}")
    return value


def check_array(name: str, value: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Raises unless value (an array or ShapeDtypeStruct) has that shape and dtype."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name} must be an array of shape {shape}, got {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    if jnp.dtype(value.dtype).name != dtype:
        raise TypeError(f"{name} must be {dtype}, got {jnp.dtype(value.dtype).name}")


def check_parameter(name: str, value: Any, problem: Problem, parameter: Parameter | None) -> None:
    """Raises unless value is what the problem says of that parameter of it (None: absent)."""
    if parameter is None:
        if value is not None:
            raise ValueError(f"{name} must be None: the plan was made without {name}_shape")
    else:
        check_array(name, value, problem.parameter_shape(parameter), parameter.dtype)


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def is_static(dim: Any) -> bool:
    """Whether a size is a number, not one of `jax.export`'s symbols."""
    return not jax.export.is_symbolic_dim(dim)


def _shape(name: str, shape: Sequence[int], symbolic_batch: bool = False) -> tuple[int, ...]:
    try:
        dims = tuple(shape)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {shape!r}") from None
    batch = dims[:1] if symbolic_batch and dims and not is_static(dims[0]) else ()
    sizes = tuple(_integer(f"every entry of {name}", d) for d in dims[len(batch) :])
    dims = (*batch, *sizes)
    if any(d < 0 for d in sizes):
        raise ValueError(f"{name} must not have negative entries, got {dims}")
    return dims


def _channel_axis(channel_axis: int, rank: int) -> int:
    axis = _integer("channel_axis", channel_axis)
    if not -rank <= axis < rank:
        raise ValueError(f"channel_axis {axis} is out of range for rank {rank}: allowed are 1, -1")
    axis %= rank
    if axis not in (1, rank - 1):
        raise NotImplementedError(
            f"channel_axis must be 1 or -1 (the last), got {channel_axis} at rank {rank}: write "
            f"jnp.moveaxis(x, {channel_axis}, -1) before and jnp.moveaxis(y, -1, {channel_axis}) "
            "after"
        )
    return axis


def _dtype_name(what: str, dtype: Any) -> str:
    try:
        name = str(None) if dtype is None else jnp.dtype(dtype).name  # NumPy's None is float64
    except TypeError:  # a PRNG key's, say
        name = str(dtype)
    if name not in ACCUMULATORS:
        hint = (
            f": write {what}.astype(jnp.float32)"
            if name.startswith(("int", "uint", "bool"))
            else ""
        )
        raise TypeError(f"{what} must be one of {', '.join(ACCUMULATORS)}, got {name}{hint}")
    return name


def _parameter(what, shape, dtype, n: int, channels: int, x_dtype: str) -> Parameter | None:
    if shape is None:
        if dtype is not None:
            raise ValueError(f"{what}_dtype is given without {what}_shape: write {what}_shape too")
        return None
    shape = _shape(f"{what}'s shape", shape, symbolic_batch=True)
    if shape not in ((channels,), (n, channels)):
        # Only what keeps the order of the values is advice: (C, N) has as many of them as (N, C).
        sizes = tuple(d for d in shape if d != 1)
        hint = ""
        if sizes == (channels,) or channels == math.prod(shape) == 1:
            hint = f": write {what}.reshape(({channels},))"
        elif sizes == (n, channels):
            hint = f": write {what}.reshape(({n}, {channels}))"
        elif shape == (channels, n):
            hint = f": write {what}.T"
        raise ValueError(
            f"{what} must have shape ({channels},) or, per sample, ({n}, {channels}), "
            f"got {shape}{hint}"
        )
    dtype = x_dtype if dtype is None else _dtype_name(what, dtype)
    return Parameter(per_sample=len(shape) == 2, dtype=dtype)


def check_activation(activation: Any) -> str | None:
    name = ALIASES.get(activation, activation) if isinstance(activation, str) else activation
    if name is not None and not (isinstance(name, str) and name in ACTIVATIONS):
        allowed = ", ".join(repr(a) for a in (*ACTIVATIONS, *ALIASES))
        raise ValueError(
            f"activation must be one of {allowed}, got {activation!r}: for any other, write "
            "group_norm(...) without one and apply yours to the result"
        )
    return name
