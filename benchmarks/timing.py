"""Wall-clock timing on a shared machine: candidates take turns, the median counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax


def interleaved(candidates: dict[str, Callable[[], object]], *, seconds: float, least: int = 5):
    """Median and spread, in seconds a call, of each candidate.

    One call of each in turn, so that a busy neighbour slows all of them alike; after a warm-up, for
    about `seconds`, and at least `least` rounds.

    Returns:
      {name: {"median": s, "low": s, "high": s, "rounds": n}}, low and high the quartiles.
    """
    for call in candidates.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    rounds = 0
    while rounds < least or time.perf_counter() - start < seconds:
        for name, call in candidates.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - begin)
        rounds += 1
    return {name: _summary(values) for name, values in times.items()}


def _summary(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "low": low, "high": high, "rounds": len(values)}
