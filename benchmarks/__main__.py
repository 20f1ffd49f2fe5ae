"""Forward + backward on this machine's CPU: ours against Flax under XLA, next to a copy.

    python -m benchmarks                      all problems that fit, float32 and bfloat16
    python -m benchmarks sd15_unet_64 --activation silu --dtype float32

Writes a table and benchmarks/results/cpu.json. Every result is checked against Flax's before it is
timed. (GPU timings: tools/gpu.sh time.)
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import pathlib
import platform
import sys

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_gn
from benchmarks import peers
from benchmarks.problems import NamedProblem, cut_batch, load
from benchmarks.timing import interleaved

RESULTS = pathlib.Path(__file__).with_name("results")
# glibc returns every large block to the system and asks for it again, which costs each fresh result
# a page fault per 4 KiB: 20 of the 30 ms that any 84 MB result takes here. A training step reuses
# its memory; with these settings so does every candidate.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "1000000000",
    "MALLOC_ARENA_MAX": "1",
}
# A CPU needs no larger tensor to leave its caches, and XLA's step takes seconds beyond.
BATCH_ELEMENTS, MOST_ELEMENTS = 12_000_000, 40_000_000
TENSORS = 5  # compulsory: x, y forward; dy, x, dx backward


def main() -> None:
    options = _arguments()
    _keep_memory()
    problems = [cut_batch(p, BATCH_ELEMENTS) for p in load(options.problem or None)]
    problems = [p for p in problems if p.elements <= MOST_ELEMENTS]
    cases = [
        (problem, dtype, layout, activation)
        for problem in problems
        for dtype in options.dtype
        for layout in options.layout
        for activation in options.activation
    ]
    rows = []
    for case in tqdm(cases, unit="case", disable=None):
        rows.append(_measure(*case, families=options.family, seconds=options.seconds))
    _print_table(rows, options.family)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": _machine(), "rows": rows}, indent=1) + "\n")
    print(f"written to {options.out}")


def _keep_memory() -> None:
    """Starts this program again with glibc's settings, which it reads at its start alone."""
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "benchmarks"]
        os.execve(sys.executable, [*command, *sys.argv[1:]], os.environ | KEEP_MEMORY)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description="Forward + backward: ours and Flax's"
    )
    parser.add_argument("problem", nargs="*", help="names of shapes.json; default: all that fit")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--layout", nargs="+", default=["channels_last"])
    parser.add_argument(
        "--activation", nargs="+", default=[None, "silu"], type=lambda a: None if a == "none" else a
    )
    parser.add_argument("--family", nargs="*", default=["three_stage"], help="families to add")
    parser.add_argument("--seconds", type=float, default=2.0, help="time a case, about")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS / "cpu.json")
    return parser.parse_args()


def _measure(
    problem: NamedProblem,
    dtype: str,
    layout: str,
    activation: str | None,
    *,
    families: list[str],
    seconds: float,
) -> dict:
    rng = np.random.default_rng(0)
    shape = problem.in_layout(layout)
    x, dy = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in range(2))
    scale, bias = (jnp.asarray(rng.standard_normal(problem.shape[-1:]), dtype) for _ in range(2))
    steps = {"flax": peers.flax, "ours": peers.ours}
    steps |= {name: peers.family(name) for name in families}
    steps = {name: make(problem, layout, activation) for name, make in steps.items()}
    arrays = (x, scale, bias, dy)
    _check_equal({name: step(*arrays) for name, step in steps.items()}, dtype)
    copy = jax.jit(peers.copy)
    candidates = {name: functools.partial(step, *arrays) for name, step in steps.items()}
    candidates["copy"] = functools.partial(copy, x)
    times = interleaved(candidates, seconds=seconds)
    return {
        "problem": problem.name,
        "shape": shape,
        "groups": problem.groups,
        "dtype": dtype,
        "layout": layout,
        "activation": activation,
        "bytes": TENSORS * x.nbytes,
        "copy_bytes": 2 * x.nbytes,
        "seconds": times,
    }


def _check_equal(results: dict[str, tuple], dtype: str) -> None:
    """A fast wrong kernel is worth nothing: all outputs within rounding of Flax's."""
    rounding = 1e-3 if dtype == "float32" else 3e-2
    for name, outputs in results.items():
        for got, expected in zip(outputs, results["flax"], strict=True):
            got, expected = (np.asarray(a, np.float64) for a in (got, expected))
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            if not error < rounding:
                raise SystemExit(f"{name} is wrong: relative error {error:.1e} against flax")


def _print_table(rows: list[dict], families: list[str]) -> None:
    names = ["flax", "ours", *families]
    print(f"{'problem':18} {'shape':22} {'dtype':9} {'activation':10}", end="")
    print(
        "".join(f"{n + ' ms':>16}" for n in names),
        f"{'ours GB/s':>10} {'copy GB/s':>10} {'x flax':>7}",
    )
    for row in rows:
        ms = {name: row["seconds"][name]["median"] * 1e3 for name in (*names, "copy")}
        shape = "x".join(map(str, row["shape"]))
        print(
            f"{row['problem']:18} {shape:22} {row['dtype']:9} {row['activation'] or 'none':10}"
            + "".join(f"{ms[n]:16.2f}" for n in names)
            + f" {row['bytes'] / ms['ours'] / 1e6:10.1f}"
            + f" {row['copy_bytes'] / ms['copy'] / 1e6:10.1f} {ms['flax'] / ms['ours']:7.1f}"
        )
    ratios = [r["seconds"]["flax"]["median"] / r["seconds"]["ours"]["median"] for r in rows]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geometric mean over {len(ratios)} cases: {mean:.1f} x flax, smallest {min(ratios):.1f}")


def _machine() -> dict:
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jax_gn": jax_gn.__version__,
        "malloc": KEEP_MEMORY,
        "arch": jax_gn.plan_forward((1, 1, 1), "float32", num_groups=1, platform="cpu").arch,
    }


def _cpu_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
