"""Device time of a compiled step by kind of kernel, from a trace of jax.profiler.

The host's clock sees a step; this sees which kernels it is made of: our norms, convolutions and
matrix products, and what XLA generates for all the rest. GPUs only: a CPU's trace has no kernels.
"""

import re
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

TIMING = Path(__file__).parents[1] / "benchmarks" / "timing.py"
TRACE, ALONE = (runpy.run_path(str(TIMING))[name] for name in ("trace", "alone"))

# Kind -> what the name of its kernels or of their HLO instruction holds; the first that fits.
KINDS = {
    "norms": r"jax_gn",
    "products": r"conv|cudnn|gemm|xmma|cutlass|nvjet|dgrad|wgrad|fprop|dot|nchwToNhwc|nhwcToNchw",
    "copies": r"^copy|memcpy|transpose",
}


def device_time(advance: Callable[[int], object], steps: int) -> dict:
    """What `advance(steps)` makes of the device's time, a step.

    {"ms": by kind, "idle_ms": the rest, "kernels", "longest": [[name, ms], ...]}. Where kernels
    overlap, the time is that of the one that began first.
    """
    events = sorted(TRACE(lambda: advance(steps)))
    kinds, names = Counter(), Counter()
    span = max(e.start + e.duration for e in events) - min(e.start for e in events)
    for seconds, (_, _, name, instruction) in zip(ALONE(events), events, strict=True):
        kinds[_kind(name, instruction)] += seconds
        names[re.sub(r"[_.\d]+$", "", name)[:120]] += seconds
    ms = 1e3 / steps
    return {
        "ms": {kind: kinds[kind] * ms for kind in (*KINDS, "other")},
        "idle_ms": (span - sum(kinds.values())) * ms,
        "kernels": len(events) // steps,
        "longest": [[name, seconds * ms] for name, seconds in names.most_common(40)],
    }


def _kind(name: str, instruction: str) -> str:
    for kind, pattern in KINDS.items():
        if re.search(pattern, name, re.IGNORECASE) or re.search(pattern, instruction):
            return kind
    return "other"
