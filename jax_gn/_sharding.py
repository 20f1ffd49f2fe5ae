"""How the two calls are cut over the devices of a mesh: each device works on its shard.

Automatic axes: `custom_partitioning` with a Shardy rule such as
"n s0 s1 (g d), (g d) -> n s0 s1 (g d), n g, n g". Explicit axes: `shard_map` over the axes that x's
type names. Either way batch, positions and channels (whole groups) stay sharded:

- batch and channels: the kernels; the gradient of a per-channel parameter is one all-reduce over
  the batch's mesh axes, nothing else moves;
- positions: the kernels' sums, with an all-reduce of moments forward and one of channel sums
  backward, and the rest as XLA fuses it;
- shards that cut a group, and uneven ones, are gathered first: right, but not free.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import _reference
from ._problem import Across, Parameter, Problem

_ARGUMENTS = {
    "forward": ("x", "scale", "bias", "addend"),
    "backward": ("dy", "x", "scale", "bias", "addend", "mean", "rstd"),
}
_RESULTS = {"forward": ("y", "mean", "rstd"), "backward": ("dx", "dscale", "dbias")}


_partition = contextvars.ContextVar("jax_gn_partitioning", default=True)


@contextlib.contextmanager
def partitioning(enabled: bool):
    """Whether calls traced inside work on sharded arrays shard by shard, where XLA shards them.

    ``with jax_gn.partitioning(False):`` around the tracing of a program (its first call, `lower` or
    `jax.export.export`) leaves the rule out, as JAX can't serialize a program that holds one: with
    more than one device, `jax.export` refuses it and the persistent compilation cache misses it.
    XLA then gathers sharded arrays before each call. Nothing changes on one device, inside
    `jax.shard_map` or under explicit mesh axes, which need no rule.
    """
    token = _partition.set(enabled)
    try:
        yield
    finally:
        _partition.reset(token)


def partitions() -> bool:
    """What `partitioning` says here."""
    return _partition.get()


def run(kind: str, local: Callable, call, *arrays):
    """local(call, *arrays), each device on its own shard where the mesh leaves that to us."""
    with _mesh_of(arrays[_ARGUMENTS[kind].index("x")]):
        return _run(kind, local, call, *arrays)


def _run(kind: str, local: Callable, call, *arrays):
    axis_types = jax.sharding.get_abstract_mesh().axis_types or ()
    if jax.device_count() == 1 or AxisType.Manual in axis_types:
        return local(call, *arrays)  # what is here is local
    if not call.partition and AxisType.Explicit not in axis_types:
        return local(call, *arrays)  # XLA gathers what is sharded
    given = tuple(n for n, a in zip(_ARGUMENTS[kind], arrays, strict=True) if a is not None)
    function = _explicit if AxisType.Explicit in axis_types else _partitioned
    results = function(kind, local, call, given)(*(a for a in arrays if a is not None))
    found = dict(zip(_result_names(kind, call.problem), results, strict=True))
    return tuple(found.get(name) for name in _RESULTS[kind])


def define(kind: str, call, *arrays):
    """The definition of that pass: differentiable, to any order."""
    if mesh_is_explicit(arrays[_ARGUMENTS[kind].index("x")]) and call.across is None:
        # Reshapes and slices of sharded axes have no types there.
        return _run_definition(kind, call, *arrays)
    return _definition(kind, call, *arrays)


# jit: an eager call has no devices for a mesh that only its arrays know.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_definition(kind: str, call, *arrays):
    return run(kind, functools.partial(_definition, kind), call, *arrays)


def vary_alike(*arrays):
    """The arrays as varying over all manual mesh axes (`shard_map`) that any of them varies over.

    Before the derivative rule, whose cotangents vary so: the sum over devices that the gradient of
    a replicated scale or bias takes is this cast's own transpose.
    """
    axes = frozenset().union(*(_varying(a) for a in arrays if a is not None))

    def cast(array):
        missing = () if array is None else tuple(sorted(axes - _varying(array)))
        if not missing:
            return array
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(array, missing, to="varying")
        # jax 0.8's name of it.
        return jax.lax.pvary(array, missing)  # pyright: ignore[reportAttributeAccessIssue]

    return tuple(map(cast, arrays))


def _varying(array) -> frozenset[str]:
    of_type = jax.typeof(array)
    return of_type.vma if hasattr(of_type, "vma") else of_type.mat.varying  # vma: jax 0.8


@contextlib.contextmanager
def _mesh_of(x):
    """The explicit mesh that x's type names is the current one, where none is (`jax.set_mesh`).

    An array that was put on such a mesh brings its own along, and so do all results of it.
    """
    mesh = jax.typeof(x).sharding.mesh
    explicit = AxisType.Explicit in (mesh.axis_types or ())
    if explicit and jax.sharding.get_abstract_mesh().empty:
        with jax.sharding.use_abstract_mesh(mesh):
            yield
    else:
        yield


def mesh_is_explicit(x) -> bool:
    """Whether x lies on a mesh of explicit axes, by the current mesh or its own."""
    with _mesh_of(x):
        axis_types = jax.sharding.get_abstract_mesh().axis_types or ()
    return AxisType.Explicit in axis_types and AxisType.Manual not in axis_types


def placed_like(value, array):
    """The value as its type must be to be the gradient of `array`: on explicit axes, placed so."""
    if not mesh_is_explicit(array):
        return value
    with _mesh_of(array):
        return jax.sharding.reshard(value, jax.typeof(array).sharding.spec)


def is_over_devices(across: Across) -> bool:
    """Whether its axes are those of `shard_map` or `pmap`, not of `vmap`.

    JAX can't name the latter in the backward pass of a custom_vjp.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_types or (), strict=True)
    names = across.axis_name if isinstance(across.axis_name, tuple) else (across.axis_name,)
    return {name for name, of_type in axes if of_type == AxisType.Manual}.issuperset(names)


def _definition(kind: str, call, *arrays):
    if kind == "forward":
        return _reference.forward(call.problem, *arrays, epsilon=call.epsilon, across=call.across)
    return _reference.backward(call.problem, *arrays, across=call.across)


def _result_names(kind: str, problem: Problem) -> tuple[str, ...]:
    absent = {"dscale": problem.scale is None, "dbias": problem.bias is None}
    return tuple(name for name in _RESULTS[kind] if not absent.get(name))


@functools.lru_cache(maxsize=4096)
def _partitioned(kind: str, local: Callable, call, given: tuple[str, ...]):
    """A function of the given arrays that returns the present results, with its partition rule."""
    results = _result_names(kind, call.problem)

    def whole(*arrays):
        return _run_given(kind, local, call, given, arrays)

    def partition(mesh, arg_shapes, _):
        cut = _Cut(call.problem, mesh, arg_shapes[given.index("x")].sharding.spec)
        shardings = {name: NamedSharding(mesh, cut.spec(name)) for name in (*given, *results)}
        return (
            mesh,
            lambda *arrays: _run_shard(kind, local, call, given, cut, arrays),
            tuple(shardings[name] for name in results),
            tuple(shardings[name] for name in given),
        )

    function = custom_partitioning(whole)
    rule, replicated = _rule(call.problem, given, results)
    sizes = {} if "(" not in rule else {"d": call.problem.group_size}
    function.def_partition(
        partition, sharding_rule=rule, need_replication_factors=replicated, **sizes
    )
    return function


def _explicit(kind: str, local: Callable, call, given: tuple[str, ...]):
    """The same under explicit mesh axes, where the types of arrays say how they are sharded."""

    def function(*arrays):
        mesh = jax.sharding.get_abstract_mesh()
        cut = _Cut(call.problem, mesh, jax.typeof(arrays[given.index("x")]).sharding.spec)
        types = {name: jax.typeof(a) for name, a in zip(given, arrays, strict=True)}
        arrays = [
            jax.sharding.reshard(a, cut.spec(name)) for name, a in zip(given, arrays, strict=True)
        ]
        names = _result_names(kind, call.problem)
        results = jax.shard_map(
            lambda *shards: _run_shard(kind, local, call, given, cut, shards),
            in_specs=tuple(cut.spec(name) for name in given),
            out_specs=tuple(cut.spec(name) for name in names),
            check_vma=False,
        )(*arrays)
        # A gradient has the type of what it is the gradient of, its sharding included.
        like = {"y": "x", "dx": "x", "dscale": "scale", "dbias": "bias"}
        return tuple(
            jax.sharding.reshard(r, types[like[name]].sharding.spec)
            if like.get(name) in types
            else r
            for name, r in zip(names, results, strict=True)
        )

    return function


def _run_shard(kind: str, local: Callable, call, given, cut: _Cut, arrays):
    """The present results of one shard, from its given arrays."""
    across = None if cut.space is None else Across(cut.space, shared_parameters=True)
    shard_call = dataclasses.replace(call, problem=cut.problem, across=across)
    if kind == "forward" or (cut.batch is None and cut.space is None):
        return _run_given(kind, local, shard_call, given, arrays)
    return _summed_over(cut.batch, local, shard_call, given, arrays)


def _run_given(kind: str, local: Callable, call, given, arrays):
    """local's present results, from the arrays that are given."""
    present = dict(zip(given, arrays, strict=True))
    results = local(call, *(present.get(name) for name in _ARGUMENTS[kind]))
    return tuple(r for r in results if r is not None)


def _summed_over(axes, local: Callable, call, given, arrays):
    """The backward pass of a shard of the batch: per-channel gradients are summed over `axes`.

    In the accumulator type, so that the number of devices costs no accuracy.
    """
    problem = call.problem
    arrays = [
        a.astype(problem.accumulator) if name in ("scale", "bias") else a
        for name, a in zip(given, arrays, strict=True)
    ]
    wide_call = dataclasses.replace(call, problem=problem.with_wide_parameters())
    dx, *gradients = _run_given("backward", local, wide_call, given, arrays)
    parameters = [p for p in (problem.scale, problem.bias) if p is not None]
    shared = [g for g, p in zip(gradients, parameters, strict=True) if not p.per_sample]
    summed = iter(jax.lax.psum(tuple(shared), axes) if shared and axes else shared)
    gradients = [
        (g if p.per_sample else next(summed)).astype(p.dtype)
        for g, p in zip(gradients, parameters, strict=True)
    ]
    return (dx, *gradients)


class _Cut:
    """How x is cut: mesh axes of the batch, the channels and each spatial axis; a shard's problem.

    An axis that its shards don't divide (channels: in whole groups) stays whole.
    """

    def __init__(self, problem: Problem, mesh, spec):
        self._whole = problem
        self._mesh = mesh
        rank = len(problem.shape)
        entries = (*spec, *(None,) * (rank - len(spec)))
        axis = problem.channel_axis
        pieces = {0: problem.n, axis: problem.num_groups}
        self._axes = [
            self._if_even(entry, pieces.get(i, problem.shape[i])) for i, entry in enumerate(entries)
        ]
        self.batch, self._channel = self._axes[0], self._axes[axis]
        spatial = [axes for i, axes in enumerate(self._axes) if i not in pieces and axes]
        self.space = tuple(name for axes in spatial for name in axes) or None
        counts = [self._count(axes) for axes in self._axes]
        self.problem = dataclasses.replace(
            problem,
            shape=tuple(d // k for d, k in zip(problem.shape, counts, strict=True)),
            num_groups=problem.num_groups // counts[axis],
        )

    def _if_even(self, entry, extent: int):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        return axes if axes and extent > 0 and extent % self._count(axes) == 0 else None

    def _count(self, axes) -> int:
        return math.prod(self._mesh.shape[name] for name in axes or ())

    def spec(self, name: str) -> PartitionSpec:
        """How the argument or result of that name is sharded."""
        if name in ("mean", "rstd"):
            return PartitionSpec(self.batch, self._channel)
        parameter = _parameter_of(self._whole, name)
        if parameter is None:
            return PartitionSpec(*self._axes)
        if parameter.per_sample:
            return PartitionSpec(self.batch, self._channel)
        return PartitionSpec(self._channel)


def _parameter_of(problem: Problem, name: str) -> Parameter | None:
    return {
        "scale": problem.scale,
        "dscale": problem.scale,
        "bias": problem.bias,
        "dbias": problem.bias,
        "addend": problem.addend,
    }.get(name)


def _rule(problem: Problem, given, results) -> tuple[str, tuple[str, ...]]:
    """The Shardy rule, and its factors that must not stay sharded, in the rule's order.

    A compound factor of size 1 is refused, so one group (G = 1) and one channel a group have
    rules of their own; then `o` is the dimension of size 1.
    """
    if problem.num_groups == 1:
        channel, group = "d", "o"
    elif problem.group_size == 1:
        channel, group = "g", "g"
    else:
        channel, group = "(g d)", "g"
    spatial = [f"s{i}" for i in range(len(problem.shape) - 2)]
    tensor = ["n", channel, *spatial] if problem.channels_first else ["n", *spatial, channel]

    def dims(name: str) -> str:
        if name in ("mean", "rstd"):
            return f"n {group}"
        parameter = _parameter_of(problem, name)
        if parameter is not None:
            return f"n {channel}" if parameter.per_sample else channel
        return " ".join(tensor)

    rule = f"{', '.join(map(dims, given))} -> {', '.join(map(dims, results))}"
    in_order = list(dict.fromkeys(f.strip("(),") for f in rule.replace("->", "").split()))
    return rule, tuple(f for f in in_order if f == "d")
