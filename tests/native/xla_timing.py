"""Device time of Flax's GroupNorm under XLA, and of jax_gn's calls through JAX, as JSON lines.

    python xla_timing.py OUTPUT [PROBLEM ...]

Forward, and forward + backward (jax.vjp), each one jitted program, over inputs that take turns
(together more than 320 MB, so that none is in the L2 cache). Time is the sum of the durations of
the kernels that the program ran, as CUPTI reports them through jax.profiler, a call: gaps between
kernels are not in it, which favours whoever has more kernels. The median over calls would need
their borders in the trace; it is the mean over the calls of one trace.
"""

import functools
import glob
import json
import pathlib
import sys
import tempfile

import flax.linen
import jax
import jax.numpy as jnp

import jax_gn

ROOT = pathlib.Path(__file__).parents[2]
WORKING_SET = 320 * 2**20
CALLS = 12
# Reduced: compilation takes longer than the timing. The most wanted first, should time run out.
COMBINATIONS = (
    ("bfloat16", "channels_last"),
    ("bfloat16", "channels_first"),
    ("float32", "channels_last"),
)


def flax_function(groups, activation, channel_axis):
    norm = flax.linen.GroupNorm(
        num_groups=groups, epsilon=1e-5, use_fast_variance=False, reduction_axes=None
    )

    def f(x, scale, bias):
        x = jnp.moveaxis(x, channel_axis, -1)
        y = norm.clone(dtype=x.dtype).apply({"params": {"scale": scale, "bias": bias}}, x)
        y = y if activation is None else getattr(jax.nn, activation)(y)
        return jnp.moveaxis(y, -1, channel_axis)

    return f


def ours(groups, activation, channel_axis):
    return functools.partial(
        jax_gn.group_norm,
        num_groups=groups,
        epsilon=1e-5,
        activation=activation,
        channel_axis=channel_axis,
        implementation="ffi",
    )


def backward(f):
    def run(x, scale, bias, dy):
        y, pull = jax.vjp(f, x, scale, bias)
        return y, pull(dy)

    return run


def device_seconds(function, argument_sets) -> float:
    """Kernel time of a call, from a trace of CALLS of them."""
    jax.block_until_ready(function(*argument_sets[0]))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(CALLS):
                jax.block_until_ready(function(*argument_sets[i % len(argument_sets)]))
        (file,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(file)
        planes = [p for p in data.planes if p.name.startswith("/device:GPU")]
        total = sum(
            event.duration_ns
            for plane in planes
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        )
    if total == 0:
        raise RuntimeError("the trace holds no device events: no CUPTI here?")
    return total * 1e-9 / CALLS


def measure(name, shape, groups, activation, dtype, layout):
    full = shape if layout == "channels_last" else (shape[0], shape[-1], *shape[1:-1])
    channel_axis = -1 if layout == "channels_last" else 1
    size = 3 * jnp.dtype(dtype).itemsize
    for extent in shape:
        size *= extent
    scale = jnp.ones(shape[-1], dtype)
    keys = [jax.random.key(i) for i in range(max(2, WORKING_SET // size + 1))]
    pairs = [
        (jax.random.normal(key, full, dtype), jax.random.normal(key, full, dtype)) for key in keys
    ]
    for source, make in (("xla", flax_function), ("jax_gn", ours)):
        f = make(groups, activation, channel_axis)
        for op, function, sets in (
            ("forward", jax.jit(f), [(x, scale, scale) for x, _ in pairs]),
            ("forward+backward", jax.jit(backward(f)), [(x, scale, scale, dy) for x, dy in pairs]),
        ):
            row = {"problem": name, "op": op, "dtype": dtype, "layout": layout, "source": source}
            yield row | {"us": round(device_seconds(function, sets) * 1e6, 2)}


def main():
    output, *names = sys.argv[1:]
    rows = json.loads((ROOT / "benchmarks" / "shapes.json").read_text())["problems"]
    with open(output, "w") as file:
        about = {"jax": jax.__version__, "flax": flax.__version__, "device": str(jax.devices()[0])}
        print(json.dumps(about | {"method": "CUPTI kernel time"}), file=file, flush=True)
        for dtype, layout in COMBINATIONS:
            for name in names or rows:
                activation = None if rows[name]["act"] == "none" else rows[name]["act"]
                shape, groups = tuple(rows[name]["shape"]), rows[name]["groups"]
                for row in measure(name, shape, groups, activation, dtype, layout):
                    print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
