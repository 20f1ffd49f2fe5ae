"""Many Python threads, and pools that are full: right bits and no deadlock."""

import concurrent.futures
import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

import calls
import interpreter
import numerics
import problems

# Long enough for several tasks a call in both layouts; and a small one, run in between.
LARGE = problems.Case("large", (4, 64, 48, 64), 16, "silu")
CASES = (
    LARGE,
    dataclasses.replace(LARGE, layout="channels_first", dtype="bfloat16"),
    dataclasses.replace(LARGE, shape=(2, 3, 3, 32)),
)


def _step(case):
    function = calls.function_of(case, "ffi")

    @jax.jit
    def step(x, scale, bias, dy):
        y, pull = jax.vjp(function, x, scale, bias)
        return y, *pull(dy)

    return step


def test_concurrent_calls():
    """Of different problems from more threads than the pool has."""
    steps = [(_step(case), [jnp.asarray(v) for v in case.arrays]) for case in CASES]
    want = [jax.block_until_ready(step(*arrays)) for step, arrays in steps]

    def work(i):
        step, arrays = steps[i % len(steps)]
        return jax.block_until_ready(step(*arrays))

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(work, range(96), timeout=120))
    for i, result in enumerate(results):
        jax.tree.map(numerics.assert_same_bits, result, want[i % len(want)])


def test_concurrent_tracing():
    """The caches of plans, modules and batching rules are filled by many threads at once."""
    cases = [dataclasses.replace(LARGE, shape=(1, 3, 3, 8 * (i + 1)), groups=8) for i in range(8)]

    def work(case):
        x, scale, bias, _ = map(jnp.asarray, case.arrays)
        function = calls.function_of(case, "ffi")
        return function(x, scale, bias), jax.vmap(function, (0, None, None))(x[None], scale, bias)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, cases, timeout=120))
    for case, (y, mapped) in zip(cases, results, strict=True):
        numerics.assert_definition({"y": y}, {"y": case.expected["y"]}, case.longest_sum)
        numerics.assert_same_bits(mapped[0], y)


def test_calls_inside_one_program():
    """Independent calls that XLA may run side by side, each wanting the whole pool."""
    case = CASES[0]
    function = calls.function_of(case, "ffi")
    x, scale, bias, _ = map(jnp.asarray, case.arrays)
    inputs = [x * (i + 1) for i in range(8)]
    together = jax.jit(lambda xs: [function(x, scale, bias) for x in xs])(inputs)
    for value, one in zip(together, inputs, strict=True):
        numerics.assert_same_bits(value, jax.jit(function)(one, scale, bias))


PROGRAM = """
    import hashlib, os, sys
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
    import jax, numpy as np
    jax.config.update("jax_platforms", "cpu")
    import jax_gn
    digest = hashlib.sha256()
    for axis in (-1, 1):
        rng = np.random.default_rng(0)
        x, dy = (rng.standard_normal((3, 40, 50, 64)).astype("float32") for _ in "xd")
        scale = rng.standard_normal(x.shape[axis]).astype("float32")
        f = lambda x, s: jax_gn.group_norm(
            x, s, s, num_groups=8, channel_axis=axis, activation="silu", implementation="ffi"
        )
        y, pull = jax.vjp(f, x, scale)
        for value in (y, *pull(dy)):
            digest.update(np.asarray(value).tobytes())
    print(digest.hexdigest())
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="no way to take cores from a process"
)
def test_bits_do_not_depend_on_the_number_of_threads():
    """DESIGN.md section 3, "deterministic": the same digest on one core and on all (CPU only)."""
    digests = {interpreter.output(PROGRAM, str(cores)) for cores in (1, os.cpu_count())}
    assert len(digests) == 1
