"""What XLA makes of the calls: copies, memory, export, caches, donation, debug modes."""

import dataclasses
import os
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gn

import calls
import interpreter
import numerics
import problems
from calls import BACKWARD, FORWARD

CASE = problems.Case("compile", (2, 16, 24, 64), 8, "silu")


def _step(case, source="ffi"):
    function = calls.function_of(case, source)

    def step(x, scale, bias, dy):
        y, pull = jax.vjp(function, x, scale, bias)
        return y, *pull(dy)

    return step


def _arrays(case):
    return jax.tree.map(jnp.asarray, case.arrays)


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_around_the_call(layout, dtype):
    """cases.md 25: the HLO is the two custom calls: no transpose, copy, convert or broadcast.

    The addend that is not there is an operand without elements.
    """
    case = dataclasses.replace(CASE, layout=layout, dtype=dtype)
    text = calls.compiled(_step(case), *_arrays(case)).as_text()
    text = re.sub(r"^.* = f32\[0\]\S* constant\(.*$", "", text, flags=re.MULTILINE)
    operations = re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = .*? ([\w-]+)\(", text, re.MULTILINE)
    assert operations.count("custom-call") == 2 and calls.kernels(text) == [FORWARD, BACKWARD]
    allowed = {"parameter", "custom-call", "get-tuple-element", "tuple", "bitcast"}
    assert set(operations) <= allowed, sorted(set(operations) - allowed)


# Reduced: the workspace of the fast family is 0 for small problems; these have one in some layout.
@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("family", [None, "three_stage"])
def test_workspace_is_in_memory_analysis(layout, family):
    """XLA owns the workspace, so it is counted with the program's temporary memory."""
    case = problems.Case("memory", (2, 64, 64, 64), 32, layout=layout)
    x, scale, bias, dy = _arrays(case)
    statistic = jnp.ones((2, 32))
    plan = jax_gn.plan_backward(**case.plan_arguments, preference=family)
    compiled = calls.compiled(plan.run, dy, x, scale, bias, statistic, statistic)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    if family:
        assert plan.workspace_bytes == 2 * 2 * 32 * 4
    # XLA rounds allocations up, to 64 bytes a buffer, and adds the tuple's own pointers.
    assert plan.workspace_bytes <= temporary <= plan.workspace_bytes + 1024


def test_temporary_memory_is_no_tensor():
    """No x-sized temporary for a gradient: the activation's input is recomputed."""
    compiled = calls.compiled(_step(CASE), *_arrays(CASE))
    workspaces = sum(
        make(**CASE.plan_arguments).workspace_bytes
        for make in (jax_gn.plan_forward, jax_gn.plan_backward)
    )
    x_bytes = CASE.arrays[0].nbytes
    assert compiled.memory_analysis().temp_size_in_bytes <= workspaces + x_bytes // 2


@pytest.mark.parametrize("layout", problems.LAYOUTS)
def test_export_round_trip(layout):
    """cases.md 40: serialized, deserialized, called: the same bits."""
    case = dataclasses.replace(CASE, layout=layout)
    step, arrays = jax.jit(_step(case)), _arrays(case)
    exported = jax.export.export(step, disabled_checks=jax_gn.disabled_checks())(*arrays)
    restored = jax.export.deserialize(exported.serialize())
    jax.tree.map(numerics.assert_same_bits, restored.call(*arrays), step(*arrays))


def test_export_for_another_platform():
    """The default implementation lowers for a platform without our kernels, to the definition."""

    def layer(x):
        return jax_gn.group_norm(x, num_groups=8, activation="silu")

    here = jax.export.default_export_platform()
    exported = jax.export.export(
        jax.jit(layer), platforms=(here, "tpu"), disabled_checks=jax_gn.disabled_checks()
    )(jax.ShapeDtypeStruct(CASE.shape, jnp.float32))
    assert exported.platforms == (here, "tpu")
    x = _arrays(CASE)[0]
    numerics.assert_same_bits(exported.call(x), jax.jit(layer)(x))


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_twenty_runs_are_the_same_bits(layout, dtype):
    """cases.md 41, eager among them."""
    case = problems.Case("bits", (3, 33, 31, 48), 6, "gelu", dtype, layout)
    arrays = _arrays(case)
    step = jax.jit(_step(case))
    first = step(*arrays)
    for run in range(20):
        again = _step(case)(*arrays) if run % 10 == 9 else step(*arrays)
        jax.tree.map(numerics.assert_same_bits, again, first)


def test_donated_input():
    """x's buffer may be y's: the values are right, whether XLA reuses it or not."""
    case = dataclasses.replace(CASE, bias=None)
    x, scale, _, _ = _arrays(case)
    function = calls.function_of(case, "ffi")
    want = jax.jit(function)(x, scale, None)
    compiled = jax.jit(function, donate_argnums=0).lower(x, scale, None).compile()
    donated = jnp.array(x)
    numerics.assert_same_bits(compiled(donated, scale, None), want)
    assert donated.is_deleted()
    # In a loop, where y becomes the next x in place.
    looped = jax.jit(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, x: function(x, scale, None), x),
        donate_argnums=0,
    )
    for _ in range(3):
        x = jax.jit(function)(x, scale, None)
    numerics.assert_same_bits(looped(jnp.array(_arrays(case)[0])), x)


def test_debug_nans():
    """Workspaces and absent gradients hold garbage, which no check of JAX's may see."""
    case = dataclasses.replace(CASE, scale=None)
    x, _, bias, dy = _arrays(case)
    with jax.debug_nans(True), jax.debug_infs(True):
        results = jax.jit(_step(case))(x, None, bias, dy)
        _step(case)(x, None, bias, dy)
    assert results[2] is None
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        calls.function_of(case, "ffi")(
            x.at[0, 0, 0, 0].set(jnp.nan), None, bias
        ).block_until_ready()


def test_nan_stays_in_its_group():
    x = _arrays(CASE)[0].at[1, 3, 5, 17].set(jnp.nan)  # group 2 of 8 channels, of sample 1
    y = np.array(jax.jit(lambda x: calls.function_of(CASE, "ffi")(x, None, None))(x))
    assert np.isnan(y[1, :, :, 16:24]).all()
    y[1, :, :, 16:24] = 0
    assert np.isfinite(y).all()


PROGRAM = """
    import os, sys
    import jax, jax.numpy as jnp
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import jax_gn
    def loss(x):
        return jax_gn.group_norm(x, num_groups=2, activation="silu").sum()
    jax.block_until_ready(jax.jit(jax.grad(loss))(jnp.ones((2, 3, 8))))
"""


def test_export_with_a_symbolic_batch():
    """By the definition: the kernels' workspace needs a number."""

    def step(x, implementation=None):
        def loss(x):
            y = jax_gn.group_norm(x, num_groups=8, implementation=implementation)
            return (y**2 * jnp.arange(x.shape[-1])).sum()

        return jax.grad(loss)(x)

    x = _arrays(CASE)[0]
    shape = jax.export.symbolic_shape(f"b, {', '.join(map(str, CASE.shape[1:]))}")
    symbolic = jax.ShapeDtypeStruct(shape, jnp.float32)
    exported = jax.export.export(jax.jit(step))(symbolic)
    assert calls.kernels(exported.mlir_module()) == []
    restored = jax.export.deserialize(exported.serialize())
    for batch in (1, 3):
        some = jnp.tile(x[:1], (batch, *(1,) * (x.ndim - 1)))
        numerics.assert_agree(restored.call(some), step(some, "xla"), length=some[0].size // 8)
    with pytest.raises(NotImplementedError, match="batch that is a number"):
        jax.export.export(jax.jit(lambda x: step(x, "ffi")))(symbolic)


def test_persistent_compilation_cache(tmp_path):
    """cases.md 38: a second process finds everything that the first one compiled."""
    entries = []
    for _ in range(2):
        interpreter.output(PROGRAM, str(tmp_path))
        entries.append(sorted(name for name in os.listdir(tmp_path) if name.endswith("-cache")))
    assert entries[0] and entries[1] == entries[0]


def test_compiles_once_for_equal_problems():
    """A call is cached by its problem: epsilon and activation are in the key, arrays are not."""
    x = _arrays(CASE)[0]
    traces = []

    @jax.jit
    def layer(x):
        traces.append(1)
        return jax_gn.group_norm(x, num_groups=8, implementation="ffi")

    a, b = layer(x), layer(x + 1)
    assert len(traces) == 1
    assert not np.array_equal(a, b)
    first, second = (
        jax_gn.group_norm(x, num_groups=8, epsilon=e, implementation="ffi") for e in (1e-6, 1.0)
    )
    assert not np.array_equal(first, second)
