"""How the two calls are cut over the devices of a mesh: each device runs the kernel on its shard.

`custom_partitioning` with a Shardy rule such as "n s0 s1 (g d), (g d) -> n s0 s1 (g d), n g, n g".
Batch and channels (whole groups) stay sharded; the gradient of a per-channel parameter is one
all-reduce over the batch's mesh axes, nothing else moves. Shards of a spatial axis, and shards that
cut a group, are gathered first: right, but not free.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._problem import Parameter, Problem

_ARGUMENTS = {
    "forward": ("x", "scale", "bias"),
    "backward": ("dy", "x", "scale", "bias", "mean", "rstd"),
}
_RESULTS = {"forward": ("y", "mean", "rstd"), "backward": ("dx", "dscale", "dbias")}


def run(kind: str, local: Callable, call, *arrays):
    """local(call, *arrays), each device on its own shard where the mesh leaves that to XLA."""
    if jax.device_count() == 1 or not _mesh_is_automatic():
        return local(call, *arrays)
    given = tuple(n for n, a in zip(_ARGUMENTS[kind], arrays, strict=True) if a is not None)
    results = _partitioned(kind, local, call, given)(*(a for a in arrays if a is not None))
    found = dict(zip(_result_names(kind, call.problem), results, strict=True))
    return tuple(found.get(name) for name in _RESULTS[kind])


def _mesh_is_automatic() -> bool:
    """Inside shard_map, or under explicit axes, arrays are local already or JAX wants to know."""
    mesh = jax.sharding.get_abstract_mesh()
    return all(kind == AxisType.Auto for kind in mesh.axis_types or ())


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
        sharding = arg_shapes[given.index("x")].sharding
        batch, channel, shard = _shard(call.problem, mesh, sharding.spec)
        specs = {name: _spec(call.problem, name, batch, channel) for name in (*given, *results)}
        shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        local_call = dataclasses.replace(call, problem=shard)

        def lower(*arrays):
            if kind == "forward" or batch is None:
                return _run_given(kind, local, local_call, given, arrays)
            return _summed_over(batch, local, local_call, given, arrays)

        return (
            mesh,
            lower,
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
    summed = iter(jax.lax.psum(tuple(shared), axes) if shared else ())
    gradients = [
        (g if p.per_sample else next(summed)).astype(p.dtype)
        for g, p in zip(gradients, parameters, strict=True)
    ]
    return (dx, *gradients)


def _shard(problem: Problem, mesh, spec):
    """(mesh axes of the batch, of the channels, the problem of one shard)."""
    entries = (*spec, *(None,) * (len(problem.shape) - len(spec)))

    def axes_if(entry, allowed):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        count = math.prod(mesh.shape[a] for a in axes)
        return (axes, count) if axes and allowed(count) else (None, 1)

    batch, batch_shards = axes_if(entries[0], lambda k: problem.n % k == 0)
    channel, channel_shards = axes_if(
        entries[problem.channel_axis], lambda k: problem.num_groups % k == 0
    )
    shape = list(problem.shape)
    shape[0] //= batch_shards
    shape[problem.channel_axis] //= channel_shards
    groups = problem.num_groups // channel_shards
    return batch, channel, dataclasses.replace(problem, shape=tuple(shape), num_groups=groups)


def _parameter_of(problem: Problem, name: str) -> Parameter | None:
    return {
        "scale": problem.scale,
        "dscale": problem.scale,
        "bias": problem.bias,
        "dbias": problem.bias,
    }.get(name)


def _spec(problem: Problem, name: str, batch, channel) -> PartitionSpec:
    if name in ("mean", "rstd"):
        return PartitionSpec(batch, channel)
    parameter = _parameter_of(problem, name)
    if parameter is not None:
        return PartitionSpec(batch, channel) if parameter.per_sample else PartitionSpec(channel)
    entries: list = [None] * len(problem.shape)
    entries[0], entries[problem.channel_axis] = batch, channel
    return PartitionSpec(*entries)


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
    return rule, tuple(f for f in in_order if f == "d" or f.startswith("s"))
