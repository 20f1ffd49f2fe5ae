"""Times of candidates: by the host's clock on a CPU, by CUPTI's device time on a GPU.

A candidate is a list of calls without arguments that put work on the device, each with inputs of
its own. Nothing here knows JAX or torch, but for `traced`.
"""

from __future__ import annotations

import glob
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

Calls = Sequence[Callable[[], object]]
CALLS = 21  # of a candidate in one trace
# Inputs of the calls that take turns have this many bytes together: none is in a GPU's L2 cache
# (H200: 60 MB) when its turn comes.
WORKING_SET = 320 * 2**20


def turns(set_bytes: int) -> int:
    """How many sets of inputs take turns."""
    return max(2, WORKING_SET // max(1, set_bytes) + 1)


def summary(values: Sequence[float]) -> dict[str, float]:
    """{"median", "low", "high", "rounds"}: low and high are the quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "low": low, "high": high, "rounds": len(values)}


def interleaved(
    candidates: dict[str, Callable[[], object]],
    wait: Callable[[object], object],
    *,
    seconds: float,
    least: int = 5,
) -> dict[str, dict[str, float]]:
    """Seconds of a call by the host's clock, of each candidate.

    One call of each in turn, so that a busy neighbour slows all of them alike; after a warm-up, for
    about `seconds`, and at least `least` rounds.
    """
    for call in candidates.values():
        wait(call())
    times: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    rounds = 0
    while rounds < least or time.perf_counter() - start < seconds:
        for name, call in candidates.items():
            begin = time.perf_counter()
            wait(call())
            times[name].append(time.perf_counter() - begin)
        rounds += 1
    return {name: summary(values) for name, values in times.items()}


def alone(events: Sequence[tuple]) -> list[float]:
    """Seconds of each (start, duration, ...), in order of start, after those before it have ended.

    A kernel that is launched early, as XLA does it on Hopper, waits on the device for the one
    before it, and a trace counts the waiting as its duration: up to 160 us behind a convolution.
    """
    seconds, busy_until = [], 0.0
    for start, duration, *_ in sorted(events):
        end = start + duration
        seconds.append(max(0.0, end - max(start, busy_until)))
        busy_until = max(busy_until, end)
    return seconds


def per_call(events: Sequence[tuple], calls: int) -> dict[str, float]:
    """Device seconds of a call, from (start, duration, ...) of all that ran for `calls` equal ones.

    A call's time is the sum over its kernels of the time that each has the device for itself: the
    gaps between them are not in it, which favours whoever has more kernels. Every call runs the
    same kernels, so the calls' borders are known; where their number isn't a multiple of the
    calls', only the mean is.
    """
    if not events:
        raise RuntimeError("the trace holds no device events: is CUPTI missing, or not allowed?")
    durations = alone(events)
    kernels, rest = divmod(len(durations), calls)
    if rest:
        mean = sum(durations) / calls
        return {"median": mean, "low": mean, "high": mean, "rounds": 1}
    each = [sum(durations[i * kernels : (i + 1) * kernels]) for i in range(calls)]
    return summary(each) | {"kernels": kernels}


def traced(calls: Calls) -> dict[str, float]:
    """Device seconds of a JAX call, by CUPTI through jax.profiler; the calls take turns."""
    import jax

    def run() -> None:
        for i in range(CALLS):
            jax.block_until_ready(calls[i % len(calls)]())

    for call in calls[:2]:
        jax.block_until_ready(call())
    return per_call(trace(run), CALLS)


class Event(NamedTuple):
    start: float  # seconds
    duration: float
    kernel: str  # or memcpy
    instruction: str  # of the optimized HLO, where it is known


def trace(run: Callable[[], object]) -> list[Event]:
    """All that `run`, which waits for its work, has put on the GPUs."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        return device_events(jax.profiler.ProfileData.from_file(file))


def device_events(data) -> list[Event]:
    """All that ran on the GPUs' streams."""
    return [
        Event(
            event.start_ns * 1e-9,
            event.duration_ns * 1e-9,
            event.name,
            str(dict(event.stats).get("hlo_op", "")),
        )
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
