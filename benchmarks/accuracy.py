"""Errors against float64 where the mean is large: ours, Flax's two variances, torch.

    python -m benchmarks.accuracy

x = deviations of size 1 around an offset of 0 to 1e6, rounded to its type; the truth is the formula
in float64 of that very x. An error is the largest of a result, divided by its largest value (for y
about 8; where all of them are 0, undivided). Writes benchmarks/results/accuracy.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks import machine, torch_peers
from benchmarks.problems import EPSILON
from jax_gn.check import truth

RESULTS = pathlib.Path(__file__).with_name("results") / "accuracy.json"
OFFSETS = (0.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)
DTYPES = ("float32", "bfloat16", "float16")
SHAPE, GROUPS = (2, 32, 32, 64), (64, 16, 4, 1)  # groups of 1, 4, 16 and 64 channels


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    # float16 ends at 65504, and a bfloat16 near 1e6 is a multiple of 4096: nothing would be left.
    cases = [
        (dtype, groups, offset)
        for dtype in DTYPES
        for groups in GROUPS
        for offset in OFFSETS
        if dtype != "float16" or offset < 6e4
    ]
    rows = [row(*case) for case in tqdm(cases, unit="case", disable=None)]
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    about = machine.describe(platform) | {"platform": platform, "shape": SHAPE}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    print(f"written to {options.out}")


def row(dtype: str, groups: int, offset: float, shape: tuple[int, ...] = SHAPE) -> dict:
    """{"errors": {peer: {result: error}}, "ratio": |mean| / deviation of the rounded x, ...}."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(offset + rng.standard_normal(shape), dtype)
    dy = jnp.asarray(rng.standard_normal(shape), dtype)
    scale, bias = (jnp.asarray(rng.standard_normal(shape[-1:]), dtype) for _ in range(2))
    arrays = (x, scale, bias, dy)
    exact = (np.asarray(a, np.float64) for a in (dy, x, scale, bias))
    want = truth(*exact, groups=groups, epsilon=EPSILON)
    wide = np.asarray(x, np.float64)
    return {
        "dtype": dtype,
        "group_size": shape[-1] // groups,
        "offset": offset,
        "ratio": float(abs(wide.mean()) / wide.std()) if wide.std() else None,
        "errors": {
            name: {result: _error(got, want[result]) for result, got in results.items()}
            for name, results in peers(groups, *arrays).items()
        },
    }


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / (np.abs(want).max() or 1.0))


def peers(groups: int, x, scale, bias, dy) -> dict[str, dict[str, np.ndarray]]:
    """{name: {result: float64 array}} of all that is installed."""
    import flax.linen

    import jax_gn

    def layer(fast: bool):
        norm = flax.linen.GroupNorm(groups, epsilon=EPSILON, use_fast_variance=fast, dtype=x.dtype)
        return lambda x, s, b: norm.apply({"params": {"scale": s, "bias": b}}, x)

    functions = {
        "jax_gn": functools.partial(jax_gn.group_norm, num_groups=groups, epsilon=EPSILON),
        "flax": layer(True),
        "flax_exact": layer(False),
    }
    names = ("y", "dx", "dscale", "dbias")
    found = {}
    for name, function in functions.items():
        y, pull = jax.jit(functools.partial(jax.vjp, function))(x, scale, bias)
        found[name] = dict(zip(names, (y, *pull(dy)), strict=True))
    if torch_peers.installed():
        found["torch"] = dict(zip(names, _torch(groups, x, scale, bias, dy), strict=True))
    return {
        name: {result: np.asarray(value, np.float64) for result, value in results.items()}
        for name, results in found.items()
    }


def _torch(groups: int, *arrays):
    """torch's GroupNorm on the CPU (JAX has this process's GPU), channels first, its own layout."""
    import torch  # pyright: ignore[reportMissingImports]

    dtype = getattr(torch, str(arrays[0].dtype))
    x, scale, bias, dy = (torch.tensor(np.asarray(a, np.float32)).to(dtype) for a in arrays)
    inputs = [t.requires_grad_() for t in (x, scale, bias)]
    y = torch.nn.functional.group_norm(x.movedim(-1, 1).contiguous(), groups, scale, bias, EPSILON)
    y = y.movedim(1, -1)
    return [t.detach().float().numpy() for t in (y, *torch.autograd.grad(y, inputs, dy))]


def table(rows: list[dict]) -> str:
    """Markdown: for each type and offset, the worst error of y over the group sizes."""
    names = list(rows[0]["errors"])
    lines = ["| x | offset | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for dtype, offset in dict.fromkeys((r["dtype"], r["offset"]) for r in rows):
        errors = [r["errors"] for r in rows if (r["dtype"], r["offset"]) == (dtype, offset)]
        # numpy's max: one NaN makes it NaN.
        worst = [np.max([e[name]["y"] for e in errors]) for name in names]
        cells = " | ".join(f"{w:.1e}" for w in worst)
        lines.append(f"| {dtype} | {offset:g} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
