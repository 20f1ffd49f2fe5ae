"""Device time of a compiled step by kind of kernel, from a trace of jax.profiler.

The host's clock sees a step; this sees which kernels it is made of: our norms, convolutions and
matrix products, and what XLA generates for all the rest. GPUs only: a CPU's trace has no kernels.
"""

import glob
import re
import tempfile
from collections import Counter
from collections.abc import Callable

import jax

# Kind -> what the name of its kernels or of their HLO instruction holds; the first that fits.
KINDS = {
    "norms": r"jax_gn",
    "products": r"conv|cudnn|gemm|xmma|cutlass|nvjet|dgrad|wgrad|fprop|dot|nchwToNhwc|nhwcToNchw",
    "copies": r"^copy|memcpy|transpose",
}


def device_time(advance: Callable[[int], object], steps: int) -> dict:
    """What `advance(steps)` makes of the device's time, a step.

    {"ms": by kind, "idle_ms": while no kernel ran, "kernels", "longest": [[name, ms], ...]}.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            advance(steps)
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        events = _events(jax.profiler.ProfileData.from_file(file))
    kinds, names = Counter(), Counter()
    span = max(end for *_, end in events) - min(start for *_, start, _ in events)
    for name, operation, start, end in events:
        seconds = end - start
        kinds[_kind(name, operation)] += seconds
        names[re.sub(r"[_.\d]+$", "", name)[:120]] += seconds
    ms = 1e3 / steps
    return {
        "ms": {kind: kinds[kind] * ms for kind in (*KINDS, "other")},
        "idle_ms": (span - sum(kinds.values())) * ms,
        "kernels": len(events) // steps,
        "longest": [[name, seconds * ms] for name, seconds in names.most_common(40)],
    }


def _kind(name: str, operation: str) -> str:
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE) or re.search(pattern, operation):
            return kind
    return "other"


def _events(data) -> list[tuple[str, str, float, float]]:
    """(kernel, HLO instruction where it is known, start, end) of all on the GPUs' streams."""
    return [
        (
            event.name,
            str(dict(event.stats).get("hlo_op", "")),
            event.start_ns * 1e-9,
            (event.start_ns + event.duration_ns) * 1e-9,
        )
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
