"""A small diffusion U-Net on real handwritten digits, its GroupNorms through jax_gn's kernels.

    make demo                                      # or, with the package installed:
    python examples/digits_diffusion.py [--steps 600] [--width 16] [--out demo_out/digits.png]

The same model is trained twice, in alternating steps: once with `jax_gn.nnx.GroupNorm`, once with
Flax's own `nnx.GroupNorm`. Initial parameters, batches and noise are identical, so the two loss
curves should lie on one another; what differs is the time a step takes and the memory it needs.

The data are scikit-learn's 1,797 digits, enlarged from 8x8 to 16x16. The model learns the velocity
of a straight path from noise to image (flow matching, Lipman et al., arXiv:2210.02747), given the
time on the path and the digit's class.
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tqdm import tqdm

import jax_gn.nnx

jax.config.update("jax_default_prng_impl", "rbg")  # init: 9 s of CPU to compile, threefry 22
NUM_GROUPS = 8
NUM_CLASSES = 10
IMAGE_SIZE = 16
BATCH_SIZE = 32
PEAK_LEARNING_RATE = 4e-3
EMA_RATE = 0.01  # of the averaged weights that the samples are drawn with
SAMPLING_STEPS = 40


class KernelNorm(jax_gn.nnx.GroupNorm):
    """silu(norm(x) * (1 + gain) + shift), gain and shift [N, C] or 0: all in one kernel call."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        super().__init__(channels, num_groups=NUM_GROUPS, activation="silu", rngs=rngs)

    def __call__(self, x, gain=None, shift=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().__call__(x, scale=None if gain is None else 1 + gain, bias=shift)


class FlaxNorm(nnx.GroupNorm):
    """The same on Flax's layer, and the only difference between the two models."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        super().__init__(channels, num_groups=NUM_GROUPS, rngs=rngs)

    def __call__(self, x, gain=None, shift=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        y = super().__call__(x)
        if gain is not None:
            y = y * (1 + gain[:, None, None]) + shift[:, None, None]
        return nnx.silu(y)


class ResBlock(nnx.Module):
    """norm, conv, modulated norm, conv, plus a skip connection."""

    def __init__(self, inputs: int, outputs: int, context: int, norm, *, rngs: nnx.Rngs):
        zeros = nnx.initializers.zeros
        self.norm1 = norm(inputs, rngs=rngs)
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)
        self.modulation = nnx.Linear(context, 2 * outputs, rngs=rngs)
        self.norm2 = norm(outputs, rngs=rngs)
        # Zeros: every block begins as its skip connection alone.
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), kernel_init=zeros, rngs=rngs)
        self.skip = nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

    def __call__(self, x, context):
        gain, shift = jnp.split(self.modulation(context), 2, axis=-1)
        h = self.conv1(self.norm1(x))
        h = self.conv2(self.norm2(h, gain, shift))
        return self.skip(x) + h


class UNet(nnx.Module):
    """Velocity of image x [N, 16, 16, 1] at time t [N] for class label [N]; 11 norm layers."""

    def __init__(self, width: int, norm, *, rngs: nnx.Rngs):
        context = 4 * width
        self.time1 = nnx.Linear(width, context, rngs=rngs)
        self.time2 = nnx.Linear(context, context, rngs=rngs)
        # As large as the time features from the start: the class is what the samples are asked for.
        normal = nnx.initializers.normal(1.0)
        self.label = nnx.Embed(NUM_CLASSES, context, embedding_init=normal, rngs=rngs)
        self.stem = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.down1 = ResBlock(width, width, context, norm, rngs=rngs)  # 16x16
        self.down2 = ResBlock(width, 2 * width, context, norm, rngs=rngs)  # 8x8
        self.middle = ResBlock(2 * width, 2 * width, context, norm, rngs=rngs)  # 4x4
        self.up2 = ResBlock(4 * width, 2 * width, context, norm, rngs=rngs)  # 8x8
        self.up1 = ResBlock(3 * width, width, context, norm, rngs=rngs)  # 16x16
        self.norm = norm(width, rngs=rngs)
        self.head = nnx.Conv(width, 1, (3, 3), rngs=rngs)

    def __call__(self, x, t, label):
        context = self.time2(nnx.silu(self.time1(time_features(t, self.time1.in_features))))
        context = nnx.silu(context + self.label(label))
        fine = self.down1(self.stem(x), context)
        coarse = self.down2(halve(fine), context)
        h = self.middle(halve(coarse), context)
        h = self.up2(join(h, coarse), context)
        h = self.up1(join(h, fine), context)
        return self.head(self.norm(h))


def time_features(t, size: int):
    """Sines and cosines of t [N] at `size / 2` frequencies: [N, size]."""
    angles = t[:, None] * jnp.geomspace(1.0, 100.0, size // 2)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def halve(x):
    """Mean of each 2x2 square: [N, H, W, C] -> [N, H/2, W/2, C]."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))


def join(coarse, fine):
    """coarse, each pixel a 2x2 square, beside fine: [N, H, W, C], [N, 2H, 2W, D] -> [.., C + D]."""
    return jnp.concatenate([coarse.repeat(2, axis=1).repeat(2, axis=2), fine], axis=-1)


def load_images():
    """The digits in [-1, 1], [1797, 16, 16, 1], and their classes [1797]."""
    pixels, classes = load_digits(return_X_y=True)
    images = jnp.asarray(pixels / 8 - 1, jnp.float32).reshape(-1, 8, 8, 1)
    shape = (len(images), IMAGE_SIZE, IMAGE_SIZE, 1)
    return jax.image.resize(images, shape, "cubic").clip(-1, 1), jnp.asarray(classes)


@dataclass
class Run:
    """One of the two trainings: its compiled step, its state and what was measured."""

    name: str
    model: nnx.GraphDef
    state: tuple  # parameters, their moving average, the optimizer's state
    step: jax.stages.Compiled
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def advance(self, key, images, labels) -> None:
        start = time.perf_counter()
        self.state, loss = jax.block_until_ready(self.step(self.state, key, images, labels))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    @property
    def final_loss(self) -> float:
        """Mean of the last tenth: the loss of one batch depends on its noise."""
        return float(np.mean(self.losses[-(len(self.losses) // 10 + 1) :]))

    @property
    def step_ms(self) -> float:
        return 1e3 * float(np.median(self.seconds))

    @property
    def temporary_mib(self) -> float:
        return self.step.memory_analysis().temp_size_in_bytes / 2**20  # pyright: ignore

    @property
    def kernel_calls(self) -> int:
        """jax_gn's custom calls in the compiled step: the proof that the kernels run."""
        return str(self.step.as_text()).count('custom_call_target="jax_gn.')


def prepare(name: str, norm, params, width: int, steps: int, images, labels) -> Run:
    """Compile the training step of a UNet with this norm layer; `params` is where it starts."""
    model = nnx.graphdef(nnx.eval_shape(lambda: UNet(width, norm, rngs=nnx.Rngs(0))))
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK_LEARNING_RATE, steps // 20, steps)
    optimizer = optax.adam(schedule)

    def loss_of(params, key, images, labels):
        key_batch, key_noise, key_time = jax.random.split(key, 3)
        chosen = jax.random.randint(key_batch, (BATCH_SIZE,), 0, len(images))
        image, label = images[chosen], labels[chosen]
        noise = jax.random.normal(key_noise, image.shape)
        t = jax.nn.sigmoid(jax.random.normal(key_time, (BATCH_SIZE,)))  # most in mid-path
        x = noise + t[:, None, None, None] * (image - noise)
        velocity = nnx.merge(model, params)(x, t, label)
        return jnp.mean((velocity - (image - noise)) ** 2)

    def step(state, key, images, labels):
        params, average, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, key, images, labels)
        updates, moments = optimizer.update(grads, moments)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, EMA_RATE)
        return (params, average, moments), loss

    state = (params, params, optimizer.init(params))
    compiled = jax.jit(step).lower(state, jax.random.key(0), images, labels).compile()
    return Run(name, model, state, compiled)


def train(steps: int, width: int, images, labels) -> tuple[Run, Run]:
    """Both runs side by side: every step gets the same key, hence the same batch and noise."""
    params = jax.jit(lambda: nnx.state(UNet(width, KernelNorm, rngs=nnx.Rngs(0))))()
    print("compiling the training step of both models ...", flush=True)
    ours = prepare("jax_gn", KernelNorm, params, width, steps, images, labels)
    flax = prepare("Flax nnx.GroupNorm", FlaxNorm, params, width, steps, images, labels)
    progress = tqdm(range(steps), desc="training both", unit="step")
    for i in progress:
        key = jax.random.fold_in(jax.random.key(1), i)
        # Who goes first alternates, so that neither always finds the other's data in the caches.
        for run in (ours, flax) if i % 2 else (flax, ours):
            run.advance(key, images, labels)
        progress.set_postfix_str(f"loss {ours.losses[-1]:.3f}", refresh=False)
    return ours, flax


def draw_samples(run: Run, labels):
    """Follow the learned velocity from noise (t = 0) to images (t = 1): [N, 16, 16, 1]."""
    model = nnx.merge(run.model, run.state[1])

    @jax.jit
    def sample(key):
        def midpoint_step(i, x):
            dt = 1 / SAMPLING_STEPS
            t = jnp.full(len(labels), i * dt)
            halfway = x + dt / 2 * model(x, t, labels)
            return x + dt * model(halfway, t + dt / 2, labels)

        noise = jax.random.normal(key, (len(labels), IMAGE_SIZE, IMAGE_SIZE, 1))
        return jax.lax.fori_loop(0, SAMPLING_STEPS, midpoint_step, noise)

    return sample(jax.random.key(2))


def tile(images, rows: int):
    """[rows * 10, 16, 16, 1] -> one picture, ten digits a row, with a border of two pixels."""
    images = np.pad(images[..., 0], ((0, 0), (2, 2), (2, 2)), constant_values=-1)
    return np.block([[*row] for row in np.split(images, rows)])


def smooth(losses):
    """Moving average over a fortieth of the run, and the steps that it is centred on."""
    window = max(1, len(losses) // 40)
    mean = np.convolve(losses, np.ones(window) / window, mode="valid")
    return np.arange(len(mean)) + (window - 1) / 2, mean


def draw_figure(path: Path, ours: Run, flax: Run, samples, real) -> None:
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.15, 1))  # pyright: ignore
    axes = left.subplots()
    for run, color, width in ((flax, "tab:orange", 5), (ours, "tab:blue", 1.5)):
        axes.plot(run.losses, color=color, linewidth=0.5, alpha=0.25)
        label = f"{run.name}: {run.step_ms:.1f} ms a step, {run.temporary_mib:.0f} MiB"
        axes.plot(*smooth(run.losses), color=color, linewidth=width, label=label)
    axes.set(yscale="log", xlabel="step", ylabel="loss (mean squared error of the velocity)")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title("The same U-Net, the same batches and noise, two GroupNorms")
    axes.grid(which="both", alpha=0.2)
    axes.legend(frameon=False)
    top, bottom = right.subplots(2, 1, height_ratios=(len(samples), len(real)))
    for axes, title, images in ((top, "samples", samples), (bottom, "real digits", real)):
        axes.imshow(tile(images, len(images) // NUM_CLASSES), cmap="gray_r", vmin=-1, vmax=1)
        axes.set_title(title)
        axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description="A diffusion U-Net on digits.")
    parser.add_argument("--steps", type=int, default=600, help="of each model")
    parser.add_argument("--width", type=int, default=16, help=f"a multiple of {NUM_GROUPS}")
    parser.add_argument("--out", type=Path, default=Path("demo_out/digits.png"))
    options = parser.parse_args()
    start, device = time.perf_counter(), jax.devices()[0]
    images, labels = load_images()
    print(f"{len(images)} digits; jax {jax.__version__}; {device.platform}, {device.device_kind}")
    ours, flax = train(options.steps, options.width, images, labels)
    samples = draw_samples(ours, jnp.tile(jnp.arange(NUM_CLASSES), 6))
    in_order = np.concatenate([np.flatnonzero(labels == c)[:2, None] for c in range(10)], axis=1)
    draw_figure(options.out, ours, flax, samples, images[in_order.ravel()])

    print(f"{options.out} written; {time.perf_counter() - start:.0f} s in all")
    print(f"{'':20}{'final loss':>12}{'step, ms':>12}{'temporary, MiB':>16}{'kernel calls':>14}")
    for run in (ours, flax):
        numbers = f"{run.final_loss:12.4f}{run.step_ms:12.1f}{run.temporary_mib:16.1f}"
        print(f"{run.name:20}{numbers}{run.kernel_calls:14}")
    if not ours.kernel_calls:
        print("jax_gn ran without its kernels here: `python -m jax_gn.check` says why")


if __name__ == "__main__":
    main()
