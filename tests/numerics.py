"""Truth and tolerance: every number that a test compares with is defined here.

Truth is the formula in numpy, in float64 (long double where x itself is float64), from the very
bits that the implementation was given. How far a result may be from it:

* A *unit* of error, per element, is one ULP of the truth in the result's type plus one ULP, in the
  accumulator's type, of the *terms* that the formula adds up to make that element. Where terms
  cancel (y near 0 out of xhat * scale + bias), the second part is what rounding must cost; where
  they don't, the unit is one ULP of the value. So one number, "the worst error in units", is
  meaningful for elements of any magnitude, for 16-bit results of 32-bit arithmetic, and for sums.
* The terms of a sum of L products are their 2-norm, i.e. sqrt(L) times their root mean square:
  rounding errors add up like a random walk.
* A kernel passes if its worst error <= 2 x the worst error of the definition ("xla") in the same
  type on the same data + 1. Comparing the worst elements, not element by element: the definition is
  exactly right in many places by luck.
* The definition must itself stay below `definition_limit`, so that two equal mistakes don't pass.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

RATIO, SLACK = 2.0, 1.0  # STYLE.md rule 11: error <= 2 x the reference's + 1 ULP

# What people asked for in the reports of cases.md, by the report's number there: absolute errors
# unless the test says relative.
FIELD = {1: 1e-2, 2: 1e-4, "2 jit": 1e-6, 4: 1e-4, 5: 1e-5, 7: 2e-3, 8: 2e-3, 13: 2.0**-7}
FIELD |= {6: 1e-5, 14: 1e-12, 20: 1e-6}

# Second derivatives in float32 of one function over devices and on one, by max-norm.
SECOND_ORDER = 1e-5


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a result should be, and the magnitude of the terms that make it."""

    truth: np.ndarray
    terms: np.ndarray
    dtype: np.dtype
    accumulator: np.dtype

    @property
    def unit(self) -> np.ndarray:
        return ulp(self.truth, self.dtype) + ulp(self.terms, self.accumulator)


def ulp(value, dtype) -> np.ndarray:
    """The distance between neighbours of `value` in `dtype`."""
    info = jnp.finfo(dtype)
    # XLA may flush subnormals of the wide exponent ranges to zero; float16 needs its own.
    smallest = info.smallest_subnormal if info.dtype == np.float16 else info.tiny
    magnitude = np.maximum(np.abs(value), float(info.tiny))
    exponent = np.floor(np.log2(magnitude.astype(np.float64)))
    spacing = float(info.eps) * np.exp2(exponent)
    # log2 rounds up just below a power of two.
    spacing = np.where(spacing * 2.0**info.nmant > magnitude, spacing / 2, spacing)
    return np.maximum(spacing, float(smallest))


def worst(result, expected: Expected) -> float:
    """The largest error in units; type, shape and finiteness must be right."""
    result = np.asarray(result)
    assert result.dtype == expected.dtype, f"{result.dtype} instead of {expected.dtype}"
    assert result.shape == expected.truth.shape, f"{result.shape}, not {expected.truth.shape}"
    assert np.isfinite(result.astype(np.float64)).all(), "not finite"
    error = np.abs(result.astype(expected.truth.dtype) - expected.truth)
    return float((error / expected.unit).max(initial=0.0))


def definition_limit(length: int) -> float:
    """Units within which the definition itself must be; `length` of its longest sum.

    XLA may add up one after the other: each partial sum, up to sqrt(length) terms large, rounds.
    """
    return 12.0 + math.sqrt(length)


def assert_definition(results: dict, expected: dict[str, Expected], length: int) -> None:
    for name, want in expected.items():
        units = worst(results[name], want)
        assert units <= definition_limit(length), f"{name}: the definition is {units:.1f} units off"


def assert_as_good_as(results: dict, reference: dict, expected: dict[str, Expected]) -> None:
    """The rule: worst error <= 2 x that of the reference + 1, in units."""
    for name, want in expected.items():
        units, allowed = worst(results[name], want), RATIO * worst(reference[name], want) + SLACK
        assert units <= allowed, f"{name}: {units:.2f} units off, allowed {allowed:.2f}"


def assert_same_function(result, expected: Expected) -> None:
    """Another library's result is the same function: it may compute in x's type throughout."""
    result = np.asarray(result)
    error = np.abs(result.astype(expected.truth.dtype) - expected.truth)
    size = np.abs(expected.terms) + np.abs(expected.truth)
    units = float((error / ulp(size, expected.dtype)).max(initial=0.0))
    assert units <= 32.0 + math.sqrt(result.size), f"another function: {units:.1f} units off"


def assert_agree(result, other, *, length: int = 1) -> None:
    """Two computations of the same values in different order: by max-norm, sums of `length`."""
    result, other = np.asarray(result), np.asarray(other)
    assert result.dtype == other.dtype and result.shape == other.shape, (result, other)
    wide = np.float64
    error = np.abs(result.astype(wide) - other.astype(wide)).max(initial=0.0)
    size = np.abs(other.astype(wide)).max(initial=0.0)
    allowed = 8.0 * float(jnp.finfo(result.dtype).eps) * math.sqrt(length) * size
    assert error <= allowed, f"they differ by {error:.3g}, allowed {allowed:.3g}"


def assert_error_below(result, truth, limit: float, *, relative: bool = False) -> None:
    """Finite, and the largest error (relative: to the largest value) is below `limit`."""
    result = np.asarray(result).astype(np.float64)
    assert np.isfinite(result).all(), "not finite"
    error = np.abs(result - np.asarray(truth, np.float64)).max()
    size = np.abs(np.asarray(truth, np.float64)).max() if relative else 1.0
    assert error <= limit * size, f"error {error:.3g}, allowed {limit * size:.3g}"


def assert_relative(error: float, dtype) -> None:
    """A relative max-norm error between two orders of the same short sums."""
    allowed = 8.0 * float(jnp.finfo(dtype).eps)
    assert error <= allowed, f"relative error {error:.3g}, allowed {allowed:.3g}"


def assert_same_bits(result, other) -> None:
    """Equal bit for bit: NaN equals NaN, 0.0 does not equal -0.0."""
    result, other = np.asarray(result), np.asarray(other)
    assert result.dtype == other.dtype and result.shape == other.shape, (result, other)
    different = np.frombuffer(result.tobytes(), np.uint8) != np.frombuffer(
        other.tobytes(), np.uint8
    )
    assert not different.any(), f"{int(different.sum())} of {different.size} bytes differ"


def wide_type(dtype) -> type:
    """The type truth is computed in: wider than the accumulator."""
    return np.longdouble if jnp.dtype(dtype) == np.float64 else np.float64


def normalized(x: np.ndarray, num_groups: int, epsilon: float) -> np.ndarray:
    """(x - mean) * rstd in float64, channels last: all that the largest problems need."""
    groups = x.reshape(x.shape[0], -1, num_groups, x.shape[-1] // num_groups).astype(np.float64)
    groups -= groups.mean((1, 3), keepdims=True)
    groups *= 1 / np.sqrt(np.square(groups).mean((1, 3), keepdims=True) + epsilon)
    return groups.reshape(x.shape)


class _View:
    """x as [N, spatial, G, D] and back; parameters as [N or 1, 1, G, D]."""

    def __init__(self, x: np.ndarray, channel_axis: int, num_groups: int):
        shape = x.shape
        self.channels = shape[channel_axis]
        self.axis, self.wide = channel_axis, wide_type(x.dtype)
        self.accumulator = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
        axis = channel_axis % len(shape)
        self.last = (*shape[:axis], *shape[axis + 1 :], self.channels)
        self.groups = (num_groups, self.channels // num_groups)
        self.n, self.spatial = shape[0], math.prod(self.last[1:-1])
        self.count = max(self.spatial * self.groups[1], 1)  # elements of a group

    def split(self, x) -> np.ndarray:
        last = np.moveaxis(np.asarray(x), self.axis, -1).astype(np.float64).astype(self.wide)
        return last.reshape(self.n, self.spatial, *self.groups)

    def join(self, x) -> np.ndarray:
        full = np.broadcast_to(x, (self.n, self.spatial, *self.groups))
        return np.moveaxis(full.reshape(self.last), -1, self.axis)

    def parameter(self, value, default: float) -> np.ndarray:
        if value is None:
            return np.full((1, 1, *self.groups), default, self.wide)
        rows = np.asarray(value).astype(np.float64).astype(self.wide)
        return rows.reshape(self.n if rows.ndim == 2 else 1, 1, *self.groups)

    def per_parameter(self, per_sample, shape, *, norm: bool = False) -> np.ndarray:
        """[N, 1, G, D] summed to the parameter's shape (norm: as a 2-norm)."""
        rows = per_sample.reshape(self.n, self.channels)
        if len(shape) == 2:
            return rows
        return np.sqrt(np.square(rows).sum(0)) if norm else rows.sum(0)


def activate(name: str | None, z):
    """(act(z), act'(z), terms of act: how a relative error of z and of the parts shows)."""
    one, zero = np.ones_like(z), np.zeros_like(z)
    if name is None:
        return z, one, zero
    if name == "relu":
        return np.maximum(z, 0), np.where(z > 0, one, zero), zero
    if name == "leaky_relu":
        slope = np.where(z >= 0, 1, 0.01)
        return z * slope, slope.astype(z.dtype), zero
    if name == "silu":
        s = 1 / (1 + np.exp(-z))
        return z * s, s * (1 + z * (1 - s)), np.abs(z * s)
    assert name == "gelu", name
    c = np.sqrt(z.dtype.type(2) / z.dtype.type(np.pi))
    t = np.tanh(c * (z + 0.044715 * z**3))
    slope = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * c * (1 + 3 * 0.044715 * z * z)
    return 0.5 * z * (1 + t), slope, 0.5 * np.abs(z) * (1 + np.abs(t))  # 1 + tanh cancels


def expected(
    x, scale=None, bias=None, dy=None, *, num_groups, epsilon=1e-6, channel_axis=-1, activation=None
) -> dict[str, Expected]:
    """y, mean, rstd and, with dy, dx, dscale, dbias (absent where their parameter is)."""
    x = np.asarray(x)
    view = _View(x, channel_axis, num_groups)
    wide, acc, count = view.wide, view.accumulator, view.count
    xg, s, b = view.split(x), view.parameter(scale, 1), view.parameter(bias, 0)

    mean = xg.sum((1, 3), keepdims=True) / count
    xc = xg - mean
    var = np.square(xc).sum((1, 3), keepdims=True) / count
    with np.errstate(divide="ignore"):
        rstd = 1 / np.sqrt(var + wide(epsilon))
    spread = np.sqrt(var)
    z = xc * rstd * s + b
    # mean is known to an ULP of the spread, whatever x - mean is for this element.
    z_terms = (np.abs(xc) + spread) * rstd * np.abs(s) + np.abs(b)
    y, slope, own = activate(activation, z)
    steep = np.abs(slope) if activation in (None, "silu", "gelu") else 1.0

    def result(truth, terms, dtype):
        return Expected(truth, np.asarray(terms, wide), np.dtype(dtype), acc)

    statistic = (view.n, num_groups)
    out = {
        "y": result(view.join(y), view.join(steep * z_terms + own), x.dtype),
        "mean": result(mean.reshape(statistic), (np.abs(mean) + spread).reshape(statistic), acc),
        "rstd": result(rstd.reshape(statistic), rstd.reshape(statistic), acc),
    }
    if dy is None:
        return out

    dyg = view.split(dy)
    dz = dyg * slope
    # act' is smooth and at most about 1, so dz is known to an ULP of dy; the pre-activation only as
    # well as the saved mean, rounded to the accumulator's type, lets it be recomputed from x.
    shift = np.abs(mean) * rstd * np.abs(s) if activation is not None else 0
    dz_terms = np.abs(dyg) * (1 + shift)
    a, b_sum = dz.sum(1, keepdims=True), (dz * xc).sum(1, keepdims=True)
    a_terms = np.sqrt(np.square(dz_terms).sum(1, keepdims=True))
    # mean is saved rounded to the accumulator's type: that shifts every x - mean alike.
    saved = np.abs(mean)
    b_terms = np.sqrt(np.square(dz_terms * (np.abs(xc) + spread)).sum(1, keepdims=True))
    b_terms = b_terms + saved * np.abs(a)
    p = (s * a).sum(3, keepdims=True) / count
    q = (s * b_sum).sum(3, keepdims=True) / count
    p_terms = np.abs(p) + np.sqrt(np.square(s * a_terms).sum(3, keepdims=True)) / count
    q_terms = np.abs(q) + np.sqrt(np.square(s * b_terms).sum(3, keepdims=True)) / count
    dx = rstd * (s * dz - p - xc * rstd**2 * q)
    dx_terms = (np.abs(xc) + spread) * rstd**2 * q_terms + saved * rstd**2 * np.abs(q)
    dx_terms = rstd * (np.abs(s) * dz_terms + p_terms + dx_terms)
    out["dx"] = result(view.join(dx), view.join(dx_terms), x.dtype)
    for name, parameter, rows, terms in (
        ("dscale", scale, rstd * b_sum, rstd * b_terms),
        ("dbias", bias, a, a_terms),
    ):
        if parameter is not None:
            shape = parameter.shape
            truth = view.per_parameter(rows, shape)
            norm = view.per_parameter(terms, shape, norm=True)
            out[name] = result(truth, norm, parameter.dtype)
    return out


def expected_sums(
    x, scale, bias, dy, mean, rstd, *, num_groups, epsilon=1e-6, channel_axis=-1, activation=None
) -> dict[str, Expected]:
    """A shard's sums: mean (high + low, in float64), variance, dz and dz_xhat.

    The last two with the mean and rstd given, which other shards have made what they are.
    """
    x = np.asarray(x)
    view = _View(x, channel_axis, num_groups)
    wide, acc, count = view.wide, view.accumulator, view.count
    xg, s, b = view.split(x), view.parameter(scale, 1), view.parameter(bias, 0)
    own = xg.sum((1, 3), keepdims=True) / count
    var = np.square(xg - own).sum((1, 3), keepdims=True) / count
    mean, rstd = (
        np.asarray(v).astype(wide).reshape(view.n, 1, num_groups, 1) for v in (mean, rstd)
    )
    dyg, xhat = view.split(dy), (xg - mean) * rstd
    z = xhat * s + b
    dz = dyg * activate(activation, z)[1]
    # Where dy is multiplied with a slope, it is known as well as the pre-activation is.
    steep = 1 + (np.abs(xhat * s) + np.abs(b) if activation is not None else 0)
    terms = np.abs(dyg) * steep

    def statistic(truth, size, dtype):
        shape = (view.n, num_groups)
        return Expected(truth.reshape(shape), np.asarray(size).reshape(shape), np.dtype(dtype), acc)

    def channel(value, size):
        size = np.sqrt(np.square(size).sum(1))
        shape = (view.n, view.channels)
        return Expected(value.sum(1).reshape(shape), size.reshape(shape), acc, acc)

    return {
        "mean": statistic(own, np.sqrt(var), np.float64),
        "variance": statistic(var, var, acc),
        "dz": channel(dz, terms),
        "dz_xhat": channel(dz * xhat, terms * (np.abs(xhat) + 1)),
    }


def near_kink(x, scale, bias, *, num_groups, epsilon, channel_axis, activation) -> np.ndarray:
    """Where z is within rounding of the kink of relu: there act' is either of two values."""
    options = {"num_groups": num_groups, "epsilon": epsilon, "channel_axis": channel_axis}
    z = expected(x, scale, bias, **options)["y"]
    kinked = activation in ("relu", "leaky_relu")
    return kinked & (np.abs(z.truth) <= 16 * ulp(z.terms, z.accumulator)) & (z.truth != 0)
