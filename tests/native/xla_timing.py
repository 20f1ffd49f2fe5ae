"""Device time of Flax's GroupNorm under XLA, and of jax_gn's calls through JAX, as JSON lines.

    python xla_timing.py OUTPUT [PROBLEM ...]

Forward, and forward + backward (jax.vjp), each one jitted program, over inputs that take turns
(together more than 320 MB, so that none is in the L2 cache). Time is the sum of the durations of
the kernels that the program ran, as CUPTI reports them through jax.profiler, a call: gaps between
kernels are not in it, which favours whoever has more kernels. The median over calls would need
their borders in the trace; it is the mean over the calls of one trace.
"""

import concurrent.futures
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
# The most wanted first, should time run out.
COMBINATIONS = (
    ("bfloat16", "channels_last"),
    ("bfloat16", "channels_first"),
    ("float32", "channels_last"),
    ("float32", "channels_first"),
)
COMPILERS = 8  # threads: compilation takes longer than the timing


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


def programs(row, dtype, layout):
    """{(source, op): compiled} of a problem."""
    *_, channels = shape = row["shape"]
    full = tuple(shape) if layout == "channels_last" else (shape[0], channels, *shape[1:-1])
    activation = None if row["act"] == "none" else row["act"]
    x, parameter = jax.ShapeDtypeStruct(full, dtype), jax.ShapeDtypeStruct((channels,), dtype)
    found = {}
    for source, make in (("xla", flax_function), ("jax_gn", ours)):
        f = make(row["groups"], activation, -1 if layout == "channels_last" else 1)
        arguments = (x, parameter, parameter)
        found[source, "forward"] = jax.jit(f).lower(*arguments).compile()
        found[source, "forward+backward"] = jax.jit(backward(f)).lower(*arguments, x).compile()
    return full, found


def measure(name, full, compiled, dtype, layout):
    size = 3 * jnp.dtype(dtype).itemsize
    for extent in full:
        size *= extent
    scale = jnp.ones(full[-1 if layout == "channels_last" else 1], dtype)
    keys = [jax.random.key(i) for i in range(max(2, WORKING_SET // size + 1))]
    pairs = [
        (jax.random.normal(key, full, dtype), jax.random.normal(key, full, dtype)) for key in keys
    ]
    for (source, op), function in compiled.items():
        sets = [(x, scale, scale, dy)[: 3 if op == "forward" else 4] for x, dy in pairs]
        row = {"problem": name, "op": op, "dtype": dtype, "layout": layout, "source": source}
        yield row | {"us": round(device_seconds(function, sets) * 1e6, 2)}


def main():
    output, *names = sys.argv[1:]
    rows = json.loads((ROOT / "benchmarks" / "shapes.json").read_text())["problems"]
    with open(output, "w") as file:
        about = {"jax": jax.__version__, "flax": flax.__version__, "device": str(jax.devices()[0])}
        print(json.dumps(about | {"method": "CUPTI kernel time"}), file=file, flush=True)
        wanted = [(name, *kind) for kind in COMBINATIONS for name in names or rows]
        with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
            compiled = [
                pool.submit(programs, rows[name], dtype, layout) for name, dtype, layout in wanted
            ]
            for (name, dtype, layout), future in zip(wanted, compiled, strict=True):
                for row in measure(name, *future.result(), dtype, layout):
                    print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
