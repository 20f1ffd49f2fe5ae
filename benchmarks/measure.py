"""One case: inputs, the check of every candidate, its times and its memory."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers, timing
from benchmarks.problems import ROUNDING, Case


def measure(case: Case, families: list[str], *, seconds: float) -> dict:
    """The row of a case: {"seconds": {name: summary}, "temp_bytes": {name: bytes}, ...}.

    Raises SystemExit where a candidate's results are wrong: a fast wrong kernel is worth nothing.
    """
    count = timing.turns(case.input_bytes) if case.platform == "cuda" else 1
    sets = [_inputs(case, seed) for seed in range(count)]
    steps = peers.of_case(case, families)
    with concurrent.futures.ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
        each = pool.map(lambda step: step.lower(*sets[0]).compile(), steps.values())
        compiled = dict(zip(steps, each, strict=True))
    check(case, compiled, sets[0])
    candidates = {
        name: [functools.partial(step, *arrays) for arrays in sets]
        for name, step in compiled.items()
    }
    copy = jax.jit(peers.copy)
    candidates["copy"] = [functools.partial(copy, x) for x, *_ in sets]
    if case.platform == "cuda":
        times = {name: timing.traced(calls) for name, calls in candidates.items()}
    else:
        first = {name: calls[0] for name, calls in candidates.items()}
        times = timing.interleaved(first, jax.block_until_ready, seconds=seconds)
    temp = {name: step.memory_analysis().temp_size_in_bytes for name, step in compiled.items()}
    return case.row() | {"seconds": times, "temp_bytes": temp}


def _inputs(case: Case, seed: int) -> tuple:
    """(x, scale, bias, dy)."""
    keys = jax.random.split(jax.random.key(seed), 4)
    channels = case.problem.shape[-1:]
    x, dy = (jax.random.normal(key, case.shape, case.dtype) for key in keys[:2])
    scale, bias = (jax.random.normal(key, channels, case.dtype) for key in keys[2:])
    return x, scale, bias, dy


def check(case: Case, steps: dict[str, Callable], arrays: tuple) -> None:
    """Every candidate's results are those of "flax_exact", where they are written at all."""
    expected = steps["flax_exact"](*arrays)
    for name, step in steps.items():
        poison(expected)
        names = ("y", "dx", "dscale", "dbias")[: len(expected)]
        for result, want, got in zip(names, expected, step(*arrays), strict=True):
            error = float(relative_error(got, want))
            if not error < ROUNDING[case.dtype]:
                raise SystemExit(
                    f"{name} is wrong in {case.problem.name}, {case.dtype}, {case.layout}: "
                    f"{result} has a relative error of {error:.1e}"
                )


def poison(results: tuple) -> None:
    """Fills memory of the results' sizes with NaN and frees it, for the next call to get it.

    XLA's allocators hand out what was freed last, so that an element a kernel doesn't write is NaN.
    """
    poisoned = [jnp.full(r.shape, np.nan, r.dtype) for r in results]
    jax.block_until_ready(poisoned)
    for array in poisoned:
        array.delete()


@jax.jit
def relative_error(got, want):
    """By the 2-norm; NaN where any element is."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel())
