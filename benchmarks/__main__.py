"""Forward, and forward + backward: ours against Flax under XLA, torch and Liger, next to a copy.

    python -m benchmarks                            all problems, float32 and bfloat16
    python -m benchmarks --problems sd15_unet_64 vae_512_128 --dtype bfloat16 --pass forward
    python -m benchmarks --family streaming three_stage

On a GPU: device time alone, by CUPTI, with inputs that take turns so that none is in the L2 cache.
On a CPU: the host's clock, candidates taking turns (torch after them). Results are checked before a
candidate is timed. Peers that aren't installed are left out. Writes a table and a JSON of
benchmarks/results/; `python -m benchmarks.plots` draws it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import sys

import jax
from tqdm import tqdm

import jax_gn
from benchmarks import machine, problems, torch_peers
from benchmarks.measure import measure
from benchmarks.problems import Case

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
PEERS = ("flax", "flax_exact", "torch", "torch_compiled", "liger", "ours")


def main() -> None:
    options = arguments().parse_args()
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if platform == "cpu":
        _keep_memory()
    out = options.out or RESULTS / f"{platform}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    about = machine.describe(platform) | {
        "platform": platform,
        "method": "CUPTI kernel time" if platform == "cuda" else "host clock",
        "arch": jax_gn.plan_forward((1, 1, 1), "float32", num_groups=1).arch,
    }
    worker = torch_peers.Worker() if options.torch and torch_peers.installed() else None
    rows = []
    for case in tqdm(cases(options, platform), unit="case", disable=None):
        row = measure(case, options.family, seconds=options.seconds)
        if worker:
            theirs = worker.measure(case)
            row |= {"torch_error": theirs["error"]} if "error" in theirs else {}
            row["seconds"] |= {} if "error" in theirs else theirs
        rows.append(row)
        # After each case: a run that is cut short keeps what it has.
        out.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    if worker:
        worker.close()
    print(table(rows))
    print(f"written to {out}")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="of shapes.json; default all")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--layout", nargs="+", default=["channels_last"], choices=problems.LAYOUTS)
    parser.add_argument(
        "--pass", nargs="+", default=["both"], choices=problems.PASSES, dest="passes"
    )
    parser.add_argument(
        "--activation",
        nargs="+",
        default=["model"],
        help='"model", "none" or names; "model": its own',
    )
    parser.add_argument("--family", nargs="*", default=["three_stage"], help="families to add")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave torch out")
    parser.add_argument("--seconds", type=float, default=2.0, help="time a case, about (CPU)")
    parser.add_argument(
        "--out", type=pathlib.Path, help="default: benchmarks/results/PLATFORM.json"
    )
    return parser


def cases(options: argparse.Namespace, platform: str) -> list[Case]:
    """What the arguments ask for; a combination that says the same twice counts once."""
    found = [
        Case(
            problem,
            dtype,
            layout,
            direction,
            {"model": problem.activation, "none": None}.get(activation, activation),
            platform,
        )
        for problem in problems.for_platform(problems.load(options.problems), platform)
        for dtype in options.dtype
        for layout in options.layout
        for direction in options.passes
        for activation in options.activation
    ]
    return list(dict.fromkeys(found))


def table(rows: list[dict]) -> str:
    """What a person reads: times in ms, bandwidth next to the copy's, the ratio to Flax."""
    names = [name for name in PEERS if any(name in row["seconds"] for row in rows)]
    extra = {name for row in rows for name in row["seconds"]} - {*names, "copy"}
    names += sorted(extra)
    lines = [
        f"{'problem':18} {'shape':22} {'dtype':9} {'layout':14} {'pass':8} {'activation':10}"
        + "".join(f"{name + ' ms':>18}" for name in names)
        + f" {'ours GB/s':>10} {'copy GB/s':>10} {'of copy':>8} {'x flax':>7}"
    ]
    for row in rows:
        seconds = {name: value["median"] for name, value in row["seconds"].items()}
        ours, copy = row["bytes"] / seconds["ours"], row["copy_bytes"] / seconds["copy"]
        cells = "".join(
            f"{seconds[name] * 1e3:18.3f}" if name in seconds else f"{'-':>18}" for name in names
        )
        lines.append(
            f"{row['problem']:18} {'x'.join(map(str, row['shape'])):22} {row['dtype']:9} "
            f"{row['layout']:14} {row['pass']:8} {row['activation'] or 'none':10}{cells}"
            f" {ours / 1e9:10.1f} {copy / 1e9:10.1f} {ours / copy:8.0%}"
            f" {seconds['flax'] / seconds['ours']:7.2f}"
        )
    ratios = [r["seconds"]["flax"]["median"] / r["seconds"]["ours"]["median"] for r in rows]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    lines.append(
        f"geometric mean over {len(ratios)} cases: {mean:.2f} x flax, smallest {min(ratios):.2f}"
    )
    return "\n".join(lines)


def _keep_memory() -> None:
    """Starts this program again with glibc's settings, which it reads at its start alone."""
    if any(os.environ.get(name) != value for name, value in KEEP_MEMORY.items()):
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-m", "benchmarks"]
        os.execve(sys.executable, [*command, *sys.argv[1:]], os.environ | KEEP_MEMORY)


if __name__ == "__main__":
    main()
