"""A U-Net of Stable Diffusion 1.5's shape, trained with five norms: what does GroupNorm cost?

    python examples/sd_unet.py                                        # on a GPU: batch 8, 64x64
    python examples/sd_unet.py --width 32 --batch 1 --size 16 --turns 2     # tiny, on any machine

320/640/1280/1280 channels, 2 residual blocks a level (3 on the way up), skip concatenations, a time
embedding added before each second norm; no attention. The norm and silu of a block are, by turns:

    flax      flax.nnx.GroupNorm, then silu
    unfused   jax_gn.nnx.GroupNorm, then silu
    fused     jax_gn.nnx.GroupNorm(activation="silu")
    added     the same, which adds the time embedding and the convolution's bias itself:
              norm(h, addend=time + bias)
    none      silu alone: what remains of the step is not the norm's

All in one run: each step is compiled, then they take turns, some steps each as a training loop runs
them, without waiting between; the median counts. Prints a table and writes JSON. --trace tells what
the device did in a step; --hlo DIR keeps the optimized HLO and counts transposes and copies at our
calls.
"""

import argparse
import json
import runpy
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout

import jax_gn.nnx

try:
    import optax
except ModuleNotFoundError:  # see adam()
    optax = None

jax.config.update("jax_default_prng_impl", "rbg")  # compiles faster than threefry
LATENT_CHANNELS, LEARNING_RATE = 4, 1e-4
HERE = Path(__file__).parent
LAYOUT_CHANGES = runpy.run_path(str(HERE / "hlo_layouts.py"))["layout_changes"]
DEVICE_TIME = runpy.run_path(str(HERE / "device_time.py"))["device_time"]
VARIANTS = ("flax", "unfused", "fused", "added", "none")


def norm_silu(variant: str, groups: int, channels: int, *, dtype, rngs: nnx.Rngs):
    """silu(norm(x)) in one of these ways."""
    if variant == "none":
        return nnx.Sequential(nnx.silu)
    options = {"num_groups": groups, "dtype": dtype, "rngs": rngs}
    if variant in ("fused", "added"):
        return jax_gn.nnx.GroupNorm(channels, activation="silu", **options)
    make = nnx.GroupNorm if variant == "flax" else jax_gn.nnx.GroupNorm
    return nnx.Sequential(make(channels, **options), nnx.silu)


class ResBlock(nnx.Module):
    """norm, silu, conv, plus time, norm, silu, conv, plus a skip connection."""

    def __init__(
        self, inputs: int, outputs: int, context: int, norm, adds: bool, *, dtype, rngs: nnx.Rngs
    ):
        options = {"dtype": dtype, "rngs": rngs}
        self.norm1 = norm(inputs, **options)
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), use_bias=not adds, **options)
        # The convolution's bias, where the norm adds it, too.
        self.bias = nnx.data(None)
        if adds:
            self.bias = nnx.Param(nnx.initializers.zeros(rngs.params(), (outputs,)))
        self.time = nnx.Linear(context, outputs, **options)
        self.norm2 = norm(outputs, **options)
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), **options)
        self.skip = nnx.data(None)
        if inputs != outputs:
            self.skip = nnx.Conv(inputs, outputs, (1, 1), **options)

    def __call__(self, x, context):
        h, time = self.conv1(self.norm1(x)), self.time(context)
        if self.bias is None:
            h = self.norm2(h + time[:, None, None])
        else:
            h = self.norm2(h, addend=time + self.bias)
        h = self.conv2(h)
        return h + (x if self.skip is None else self.skip(x))


class UNet(nnx.Module):
    """The noise in latents x [N, H, W, 4] at time t [N]."""

    def __init__(self, widths: list[int], blocks: int, norm, adds: bool, *, dtype, rngs: nnx.Rngs):
        width, context = widths[0], 4 * widths[0]
        options = {"dtype": dtype, "rngs": rngs}
        block = partial(ResBlock, context=context, norm=norm, adds=adds, **options)
        self.width = width
        self.time1 = nnx.Linear(width, context, **options)
        self.time2 = nnx.Linear(context, context, **options)
        self.stem = nnx.Conv(LATENT_CHANNELS, width, (3, 3), **options)
        down, up, skips = [], [], [width]
        for level, outputs in enumerate(widths):
            inputs = widths[max(level - 1, 0)]
            level_blocks = [block(inputs if i == 0 else outputs, outputs) for i in range(blocks)]
            skips += [outputs] * blocks
            halve = None
            if level < len(widths) - 1:
                halve = nnx.Conv(outputs, outputs, (3, 3), strides=2, **options)
                skips.append(outputs)
            down.append(nnx.List([*level_blocks, nnx.data(halve)]))
        self.middle = nnx.List([block(widths[-1], widths[-1]) for _ in range(2)])
        inputs = widths[-1]
        for level, outputs in reversed(list(enumerate(widths))):
            level_blocks = []
            for _ in range(blocks + 1):
                level_blocks.append(block(inputs + skips.pop(), outputs))
                inputs = outputs
            double = nnx.Conv(outputs, outputs, (3, 3), **options) if level else None
            up.append(nnx.List([*level_blocks, nnx.data(double)]))
        self.down, self.up = nnx.List(down), nnx.List(up)
        self.norm = norm(width, **options)
        self.head = nnx.Conv(width, LATENT_CHANNELS, (3, 3), **options)

    def __call__(self, x, t):
        angles = t[:, None] * jnp.geomspace(1.0, 1e-4, self.width // 2)
        features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        context = nnx.silu(self.time2(nnx.silu(self.time1(features))))
        h = self.stem(x)
        skips = [h]
        for *blocks, halve in self.down:
            for block in blocks:
                h = block(h, context)
                skips.append(h)
            if halve is not None:
                h = halve(h)
                skips.append(h)
        for block in self.middle:
            h = block(h, context)
        for *blocks, double in self.up:
            for block in blocks:
                h = block(jnp.concatenate([h, skips.pop()], axis=-1), context)
            if double is not None:
                h = double(h.repeat(2, axis=1).repeat(2, axis=2))
        return self.head(self.norm(h)).astype(jnp.float32)


def adam():
    """(name, init, step) of Adam; written out where optax is not installed."""
    if optax is not None:
        optimizer = optax.adam(LEARNING_RATE)

        def step(grads, state, params):
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state

        return f"adam of optax {optax.__version__}", optimizer.init, step

    def init(params):
        return jnp.zeros(()), *(jax.tree.map(jnp.zeros_like, params) for _ in range(2))

    def step(grads, state, params):
        count, first, second = state
        count += 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, grads)
        scales = 1 - 0.9**count, 1 - 0.999**count

        def update(p, m, v):
            return p - LEARNING_RATE * m / scales[0] / (jnp.sqrt(v / scales[1]) + 1e-8)

        return jax.tree.map(update, params, first, second), (count, first, second)

    return "Adam by hand (optax is not installed)", init, step


@dataclass
class Run:
    """One variant: its compiled step, its state and what was measured."""

    name: str
    step: jax.stages.Compiled
    state: tuple
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def advance(self, batch, steps: int) -> None:
        """So many steps, of which the device begins one while the last one runs."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state, loss = self.step(self.state, *batch)
        self.losses.append(float(jax.block_until_ready(loss)))
        self.seconds.append((time.perf_counter() - start) / steps)

    def summary(self) -> dict:
        memory = self.step.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        whole = held - memory.alias_size_in_bytes + memory.temp_size_in_bytes
        # The first two turns warm up; a single one has no quartiles.
        timed = self.seconds[2:] if len(self.seconds) > 3 else self.seconds
        low, median, high = statistics.quantiles(timed, n=4)
        return {
            "step_ms": 1e3 * median,
            "step_ms_quartiles": [1e3 * low, 1e3 * high],
            "temp_bytes": memory.temp_size_in_bytes,
            "peak_bytes": getattr(memory, "peak_memory_in_bytes", 0) or whole,
            "argument_bytes": memory.argument_size_in_bytes,
            "kernel_calls": str(self.step.as_text()).count('custom_call_target="jax_gn.'),
            "losses": [self.losses[0], self.losses[-1]],
        }


def chosen_layouts(step, state, batch):
    """The layouts in memory that XLA would like the state to have when a step begins."""
    free = Format(Layout.AUTO)
    jitted = jax.jit(step, in_shardings=(free, *(None for _ in batch)), out_shardings=(free, None))
    return jitted.lower(jax.eval_shape(lambda: state), *batch).compile().input_formats[0][0]


def prepare(variant: str, dtype: str, options, batch) -> Run:
    """The variant's state, and its training step compiled."""
    widths = [options.width * m for m in options.multiples]
    norm, adds = partial(norm_silu, variant, options.groups), variant == "added"
    _, init, update = adam()

    def make():
        return nnx.split(UNet(widths, options.blocks, norm, adds, dtype=dtype, rngs=nnx.Rngs(0)))

    graph = nnx.graphdef(nnx.eval_shape(lambda: nnx.merge(*make())))

    @jax.jit
    def start():
        params = make()[1]
        return params, init(params)

    def loss_of(params, x, noise, t):
        return jnp.mean((nnx.merge(graph, params)(x, t) - noise) ** 2)

    def step(state, x, noise, t):
        params, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, x, noise, t)
        return update(grads, moments, params), loss

    begin, state = time.perf_counter(), start()
    if options.layouts == "auto":
        formats = chosen_layouts(step, state, batch)
        step = jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(formats, *(None for _ in batch)),
            out_shardings=(formats, None),
        )
        state = jax.device_put(state, formats)
    else:
        step = jax.jit(step, donate_argnums=0)
    compiled = step.lower(state, *batch).compile()
    print(f"{dtype} {variant}: compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    return Run(variant, compiled, state)


def measure(dtype: str, options, batch) -> dict:
    """All variants of one dtype in turns: {variant: numbers}."""
    runs = [prepare(variant, dtype, options, batch) for variant in options.variants]
    for i in range(options.turns + 2):
        for run in runs if i % 2 else reversed(runs):
            run.advance(batch, options.steps)
    table = {run.name: run.summary() for run in runs}
    for run in runs if options.trace else ():
        table[run.name]["device"] = DEVICE_TIME(partial(run.advance, batch), options.trace)
    for run in runs if options.hlo else ():
        options.hlo.mkdir(parents=True, exist_ok=True)
        path = options.hlo / f"{dtype}-{run.name}.txt"
        path.write_text(str(run.step.as_text()))
        table[run.name]["layout_changes"] = LAYOUT_CHANGES(path.read_text())
        print(f"{path}: {table[run.name]['layout_changes']['summary']}")
    return table


def show(dtype: str, table: dict) -> None:
    heads = ("step, ms", "norms, ms", "temp, MiB", "peak, MiB", "calls")
    print(f"\n{dtype:10}" + "".join(f"{head:>11}" for head in heads))
    rest = table.get("none", {}).get("step_ms", float("nan"))
    for name, row in table.items():
        sizes = (row[key] / 2**20 for key in ("temp_bytes", "peak_bytes"))
        numbers = f"{row['step_ms']:11.2f}{row['step_ms'] - rest:11.2f}"
        print(f"{name:10}{numbers}{''.join(f'{s:11.0f}' for s in sizes)}{row['kernel_calls']:11}")
    if not {"flax", "none"} <= table.keys():
        return
    flax = table["flax"]["step_ms"]
    for name, row in table.items():
        if name in ("flax", "none"):
            continue
        ours = row["step_ms"]
        part = f"{(ours - rest) / (flax - rest):.0%}" if flax > rest else "not measurable"
        temp = row["temp_bytes"] / table["none"]["temp_bytes"] - 1
        print(f"{name}: step {flax / ours:.2f}x as fast; norms' part {part} of Flax's; ", end="")
        print(f"temporary memory {temp:+.0%} against no norms")


def show_device(table: dict) -> None:
    """Device milliseconds of a step by kind of kernel."""
    kinds = list(next(iter(table.values()))["device"]["ms"])
    print("\non the device, ms" + "".join(f"{kind:>11}" for kind in (*kinds, "idle", "kernels")))
    for name, row in table.items():
        device = row["device"]
        numbers = "".join(f"{device['ms'][kind]:11.2f}" for kind in kinds)
        print(f"{name:17}{numbers}{device['idle_ms']:11.2f}{device['kernels']:11}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What GroupNorm costs in a diffusion U-Net.")
    parser.add_argument("--width", type=int, default=320, help="channels of the first level")
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 2, 4, 4], help="per level")
    parser.add_argument("--blocks", type=int, default=2, help="residual blocks a level")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="height and width of the latents")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument(
        "--layouts",
        default="given",
        choices=["given", "auto"],
        help="of parameters and moments: Flax's (HWIO), or what XLA would have",
    )
    parser.add_argument("--turns", type=int, default=10, help="of each variant that are timed")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument(
        "--trace", type=int, default=0, help="GPU: steps to trace, by kind of kernel"
    )
    parser.add_argument("--hlo", type=Path, help="folder for the optimized HLO of each variant")
    parser.add_argument("--out", type=Path, help="JSON; benchmarks/results/sd_unet_<platform>.json")
    options = parser.parse_args()
    device = jax.devices()[0]
    shape = (options.batch, options.size, options.size, LATENT_CHANNELS)
    keys = jax.random.split(jax.random.key(0), 3)
    noise = jax.random.normal(keys[1], shape)
    t = jax.random.uniform(keys[2], (options.batch,))
    mix = t[:, None, None, None]
    x = (1 - mix) * jax.random.normal(keys[0], shape) + mix * noise
    report = {
        "device": f"{device.platform} {device.device_kind}",
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax")},
        "optimizer": adam()[0],
        "options": {k: v for k, v in vars(options).items() if not isinstance(v, Path | None)},
        "results": {},
    }
    print(f"{report['device']}; {report['versions']}; {report['optimizer']}")
    for dtype in options.dtype:
        report["results"][dtype] = measure(dtype, options, (x, noise, 1000 * t))
        show(dtype, report["results"][dtype])
        if options.trace:
            show_device(report["results"][dtype])
    # Of all variants together, for they are all held.
    report["process_peak_bytes"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    results = HERE.parent / "benchmarks" / "results"
    out = options.out or results / f"sd_unet_{device.platform}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{out} written")


if __name__ == "__main__":
    main()
