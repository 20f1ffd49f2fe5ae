"""Plans: what will run for a problem, and why. The decisions are C++'s (ffi/plan.h)."""

from __future__ import annotations

import dataclasses
import functools
import platform as _host
from typing import Any

import jax

from . import _ffi
from ._problem import (
    Problem,
    check_array,
    check_epsilon,
    check_parameter,
    make_problem,
)


@dataclasses.dataclass(frozen=True)
class DeviceLimits:
    """The limits of a CUDA device that plans depend on; the defaults are an H200's.

    Attributes:
      capability: compute capability, major * 10 + minor.
      multiprocessors: number of streaming multiprocessors.
      shared_memory_per_block: bytes, the opt-in maximum.
      l2_bytes: bytes of L2 cache.
    """

    capability: int = 90
    multiprocessors: int = 132
    shared_memory_per_block: int = 232448
    l2_bytes: int = 62914560

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be an integer >= 1, got {value!r}")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Fields that both directions share. `print(plan)` says in words what runs."""

    problem: Problem
    platform: str  # "cpu" or "cuda"
    preference: str | None  # the family that was asked for
    arch: str  # what the kernels are compiled for: "sm_90", "x86_64/avx2"
    family: str  # the kernel family that serves the problem
    kernels: tuple[str, ...]  # its stages, in order
    grid: tuple[int, ...]  # blocks (cuda) or tasks (cpu) of each
    workspace_bytes: int
    bytes_moved: int  # of x, y, dy, dx, read or written by the stages
    bytes_compulsory: int  # the same, each tensor once
    bit_stable: bool = True  # two runs give the same bits: no floating-point atomics
    deterministic: bool = True  # nor do the bits depend on the number of threads or devices

    op = ""
    sums_only = False  # of the op's steps only the sums, of this device's share of the positions

    @property
    def dtype(self) -> str:
        """Of x, y, dy and dx."""
        return self.problem.dtype

    @property
    def layout(self) -> str:
        """ "channels_last" or "channels_first"."""
        return self.problem.layout

    @property
    def accumulator(self) -> str:
        """The type of sums, mean and rstd."""
        return self.problem.accumulator

    @property
    def math_dtype(self) -> str:
        """The type in which each element is computed."""
        return self.problem.accumulator

    def _target(self, function, *arrays, **options):
        """What `function` of _ffi computes, as planned."""
        options |= {"family": self.preference or "auto", "workspace_bytes": self.workspace_bytes}
        return function(self.problem, *arrays, **options)

    def __str__(self) -> str:
        p = self.problem
        stages = ", ".join(f"{k} x {g}" for k, g in zip(self.kernels, self.grid, strict=True))
        unit = "blocks" if self.platform == "cuda" else "tasks"
        ratio = self.bytes_moved / self.bytes_compulsory if self.bytes_compulsory else 1
        asked = "asked for" if self.preference else "chosen by the planner"
        return "\n".join(
            [
                f"GroupNorm {self.op}{', sums only,' * self.sums_only} on {self.platform} "
                f"({self.arch})",
                f"  problem     {self.dtype}{list(p.shape)}, {self.layout}, {p.num_groups} groups "
                f"of {p.group_size} channels, {p.spatial} positions, {_affine_text(p)}, "
                f"activation {p.activation}",
                f"  family      {self.family} ({asked})",
                f"  kernels     {stages or 'none'} ({unit})",
                f"  workspace   {self.workspace_bytes:,} bytes",
                f"  bytes       {self.bytes_moved:,} moved, {self.bytes_compulsory:,} compulsory "
                f"({ratio:.2f} x)",
                f"  numbers     computed and summed in {self.accumulator}, variance centred; "
                "bit-stable, deterministic",
            ]
        )


@dataclasses.dataclass(frozen=True)
class ForwardPlan(_Plan):
    """What runs for y, mean and rstd; made by `plan_forward`."""

    op = "forward"

    def check(self, x, scale=None, bias=None, *, addend=None, epsilon: float = 0.0) -> None:
        """Raises ValueError or TypeError unless `run` would take these arguments.

        Args:
          x, scale, bias, addend: arrays or `jax.ShapeDtypeStruct`s; None where the plan has none.
          epsilon: as `run`'s.
        """
        p = self.problem
        check_array("x", x, p.shape, p.dtype)
        check_parameter("scale", scale, p, p.scale)
        check_parameter("bias", bias, p, p.bias)
        check_parameter("addend", addend, p, p.addend)
        check_epsilon(epsilon)

    def run(self, x, scale=None, bias=None, *, addend=None, epsilon: float):
        """(y, mean, rstd): y as x, mean and rstd `[N, G]` in the accumulator type. Jittable.

        Raises what `check` raises; NotImplementedError on a platform other than the plan's.
        """
        self.check(x, scale, bias, addend=addend, epsilon=epsilon)
        _require_module(self.platform)
        return _run_forward(self, float(epsilon), x, scale, bias, addend)

    def call(self, x, scale, bias, addend=None, *, epsilon: float):
        """`run` without the checks, on whatever platform is being lowered."""
        return self._target(_ffi.forward, x, scale, bias, addend, epsilon=epsilon)


@dataclasses.dataclass(frozen=True)
class BackwardPlan(_Plan):
    """What runs for dx, dscale and dbias; made by `plan_backward`."""

    op = "backward"

    def check(self, dy, x, scale, bias, mean, rstd, *, addend=None) -> None:
        """Raises ValueError or TypeError unless `run` would take these arguments.

        Args:
          dy, x: arrays or `jax.ShapeDtypeStruct`s of the plan's shape and dtype.
          scale, bias: as the plan's; None where it has none; bias also without an activation.
          mean, rstd: `[N, G]` in the accumulator type, as the forward pass saved them.
          addend: as the plan's; None where it has none.
        """
        p = self.problem
        check_array("dy", dy, p.shape, p.dtype)
        check_array("x", x, p.shape, p.dtype)
        check_parameter("scale", scale, p, p.scale)
        if bias is not None or p.activation is not None:
            check_parameter("bias", bias, p, p.bias)
        check_parameter("addend", addend, p, p.addend)
        check_array("mean", mean, p.statistics_shape, p.accumulator)
        check_array("rstd", rstd, p.statistics_shape, p.accumulator)

    def run(self, dy, x, scale, bias, mean, rstd, *, addend=None):
        """(dx, dscale, dbias), None where the plan has no such parameter. Jittable.

        The gradient of addend is dx, summed over all axes that addend doesn't have.

        Raises what `check` raises; NotImplementedError on a platform other than the plan's.
        """
        self.check(dy, x, scale, bias, mean, rstd, addend=addend)
        _require_module(self.platform)
        return _run_backward(self, dy, x, scale, bias, addend, mean, rstd)

    def call(self, dy, x, scale, bias, addend, mean, rstd):
        """`run` without the checks, on whatever platform is being lowered."""
        return self._target(_ffi.backward, dy, x, scale, bias, addend, mean, rstd)


@dataclasses.dataclass(frozen=True)
class MomentsPlan(_Plan):
    """What runs for the forward pass's sums of a share of the positions."""

    op = "forward"
    sums_only = True

    def call(self, x, addend=None):
        """(mean, what its rounding left, variance), each `[N, G]`."""
        return self._target(_ffi.moments, x, addend)


@dataclasses.dataclass(frozen=True)
class ChannelSumsPlan(_Plan):
    """What runs for the backward pass's sums of a share of the positions."""

    op = "backward"
    sums_only = True

    def call(self, dy, x, scale, bias, addend, mean, rstd):
        """The sums of dz and of dz * xhat, each `[N, C]`."""
        return self._target(_ffi.channel_sums, dy, x, scale, bias, addend, mean, rstd)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_forward(plan: ForwardPlan, epsilon: float, *arrays):
    call = functools.partial(plan.call, epsilon=epsilon)
    return jax.lax.platform_dependent(*arrays, **{plan.platform: call})


@functools.partial(jax.jit, static_argnums=(0,))
def _run_backward(plan: BackwardPlan, *arrays):
    return jax.lax.platform_dependent(*arrays, **{plan.platform: plan.call})


def plan_forward(
    shape,
    dtype,
    *,
    num_groups: int,
    channel_axis: int = -1,
    scale_shape=None,
    bias_shape=None,
    scale_dtype=None,
    bias_dtype=None,
    addend_shape=None,
    addend_dtype=None,
    activation: str | None = None,
    platform: str | None = None,
    device: DeviceLimits | None = None,
    preference: str | None = None,
) -> ForwardPlan:
    """The plan of a GroupNorm forward pass: what will run, with which workspace, and why.

    Shapes and dtypes only: nothing is allocated and no device is needed, so plans for "cuda" can be
    made on any machine.

    Args:
      shape, dtype: of x, `[N, *spatial, C]` or `[N, C, *spatial]`, rank 2 to 8.
      num_groups: number of groups G, a divisor of C.
      channel_axis: -1 or 1.
      scale_shape, bias_shape, addend_shape: `(C,)`, `(N, C)`, or None where absent.
      scale_dtype, bias_dtype, addend_dtype: default x's dtype.
      activation: None, "silu" ("swish"), "relu", "gelu" (tanh form) or "leaky_relu".
      platform: "cpu" or "cuda"; None: the default backend's.
      device: limits of the CUDA device; None: the present GPU's, else an H200's.
      preference: name of a kernel family, e.g. "three_stage"; None: the best is chosen.

    Returns:
      A frozen, printable plan.

    Raises:
      ValueError, TypeError: no GroupNorm has these arguments.
      NotImplementedError: the preferred family can't serve this problem on this platform.
    """
    problem = make_problem(
        shape,
        dtype,
        num_groups=num_groups,
        channel_axis=channel_axis,
        scale_shape=scale_shape,
        bias_shape=bias_shape,
        scale_dtype=scale_dtype,
        bias_dtype=bias_dtype,
        addend_shape=addend_shape,
        addend_dtype=addend_dtype,
        activation=activation,
    )
    return make_plan(ForwardPlan, problem, platform, device, preference)


def plan_backward(
    shape,
    dtype,
    *,
    num_groups: int,
    channel_axis: int = -1,
    scale_shape=None,
    bias_shape=None,
    scale_dtype=None,
    bias_dtype=None,
    addend_shape=None,
    addend_dtype=None,
    activation: str | None = None,
    platform: str | None = None,
    device: DeviceLimits | None = None,
    preference: str | None = None,
) -> BackwardPlan:
    """The plan of a GroupNorm backward pass; arguments and errors as `plan_forward`'s."""
    problem = make_problem(
        shape,
        dtype,
        num_groups=num_groups,
        channel_axis=channel_axis,
        scale_shape=scale_shape,
        bias_shape=bias_shape,
        scale_dtype=scale_dtype,
        bias_dtype=bias_dtype,
        addend_shape=addend_shape,
        addend_dtype=addend_dtype,
        activation=activation,
    )
    return make_plan(BackwardPlan, problem, platform, device, preference)


def make_plan(
    kind: type[Any],
    problem: Problem,
    platform: str | None = None,
    device: DeviceLimits | None = None,
    preference: str | None = None,
):
    """A `kind` (a class of plans) of a valid problem."""
    if platform is None:
        platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if platform not in _ffi.PLATFORMS:
        allowed = ", ".join(_ffi.PLATFORMS)
        raise ValueError(f"platform must be one of {allowed}, got {platform!r}")
    families = [f for f in _ffi.planner().families if f != "auto"]
    if preference is not None and preference not in families:
        raise ValueError(f"preference must be one of {', '.join(families)}, got {preference!r}")
    if device is None:
        device = present_device() or DeviceLimits()
    if not isinstance(device, DeviceLimits):
        raise TypeError(f"device must be a DeviceLimits or None, got {type(device).__name__}")
    return _make_plan(kind, problem, platform, device, preference)


@functools.lru_cache(maxsize=4096)
def _make_plan(kind, problem: Problem, platform: str, device: DeviceLimits, preference):
    answer = _ffi.planner().plan(
        op=kind.op,
        sums_only=kind.sums_only,
        dtype=problem.dtype,
        layout=problem.layout,
        activation=problem.activation or "none",
        scale=_parameter_form(problem.scale),
        bias=_parameter_form(problem.bias),
        addend=_parameter_form(problem.addend),
        scale_dtype=problem.scale.dtype if problem.scale else problem.dtype,
        bias_dtype=problem.bias.dtype if problem.bias else problem.dtype,
        addend_dtype=problem.addend.dtype if problem.addend else problem.dtype,
        n=problem.n,
        spatial=problem.spatial,
        channels=problem.channels,
        groups=problem.num_groups,
        platform=platform,
        preference=preference or "auto",
        **dataclasses.asdict(device),
    )
    if platform == "cuda":
        arch = f"sm_{device.capability}"
    else:
        arch = f"{_host.machine()}/{_ffi.planner().instruction_set()}"
    return kind(
        problem=problem,
        platform=platform,
        preference=preference,
        arch=arch,
        family=answer["family"],
        kernels=answer["kernels"],
        grid=answer["grid"],
        workspace_bytes=answer["workspace_bytes"],
        bytes_moved=answer["bytes_moved"],
        bytes_compulsory=answer["bytes_compulsory"],
    )


@functools.cache
def present_device() -> DeviceLimits | None:
    """The limits of this machine's first GPU; None without one, or without the CUDA module."""
    if jax.default_backend() != "gpu":
        return None
    loaded = _ffi.module("cuda")
    return None if loaded is None else DeviceLimits(**loaded.device_limits(0))


def _require_module(platform: str) -> None:
    if _ffi.module(platform) is None:
        raise NotImplementedError(
            f"this plan is for {platform}, and jax_gn was built without its module: write "
            f"platform={'cpu' if platform == 'cuda' else 'cuda'!r}, or build it"
        )


def _parameter_form(parameter) -> str:
    if parameter is None:
        return "absent"
    return "per_sample" if parameter.per_sample else "per_channel"


def _affine_text(problem: Problem) -> str:
    def text(name, parameter):
        return f"{name} {_parameter_form(parameter).replace('_', ' ')}" + (
            f" {parameter.dtype}" if parameter else ""
        )

    texts = [text("scale", problem.scale), text("bias", problem.bias)]
    return ", ".join(texts + ([text("addend", problem.addend)] if problem.addend else []))
