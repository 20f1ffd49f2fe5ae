"""What the grids run over: named problems of real models, corners, forms of scale, bias."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import numerics

DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYOUTS = ("channels_last", "channels_first")
ACTIVATIONS = (None, "silu", "relu", "gelu", "leaky_relu")
FORMS = (None, "channel", "sample")  # of scale and bias: absent, (C,), (N, C)

# Named problems are cut to this many elements, for a CPU with two cores and a float64 truth.
MAX_ELEMENTS = 2**18


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of group_norm with its data; shape is channels-last whatever the layout."""

    name: str
    shape: tuple[int, ...]
    groups: int
    activation: str | None = None
    dtype: str = "float32"
    layout: str = "channels_last"
    scale: str | None = "channel"
    bias: str | None = "channel"
    scale_dtype: str | None = None  # None: x's
    bias_dtype: str | None = None
    epsilon: float = 1e-6
    mean: float = 0.3
    spread: float = 1.0

    def __str__(self) -> str:
        forms = f"scale_{self.scale or 'none'}-bias_{self.bias or 'none'}"
        return f"{self.name}-{self.dtype}-{self.layout}-{self.activation or 'linear'}-{forms}"

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of x in its layout."""
        n, *spatial, channels = self.shape
        return self.shape if self.layout == "channels_last" else (n, channels, *spatial)

    @property
    def options(self) -> dict:
        """The keyword arguments of group_norm."""
        return {
            "num_groups": self.groups,
            "epsilon": self.epsilon,
            "channel_axis": -1 if self.layout == "channels_last" else 1,
            "activation": self.activation,
        }

    @property
    def plan_arguments(self) -> dict:
        """The arguments of plan_forward and plan_backward."""
        options = {k: v for k, v in self.options.items() if k != "epsilon"}
        for name in ("scale", "bias"):
            value = self.arrays[("x", "scale", "bias").index(name)]
            if value is not None:
                options |= {f"{name}_shape": value.shape, f"{name}_dtype": value.dtype}
        return {"shape": self.full_shape, "dtype": self.dtype, **options}

    @property
    def longest_sum(self) -> int:
        """Terms of the longest sum among the results: of a group or of a channel over the batch."""
        n, *spatial, channels = self.shape
        return max(1, math.prod(spatial)) * max(channels // self.groups, n)

    def precision(self):
        """A context in which JAX has the types of this case."""
        types = (self.dtype, self.scale_dtype, self.bias_dtype)
        return jax.enable_x64("float64" in types)

    @functools.cached_property
    def arrays(self) -> tuple:
        """(x, scale, bias, dy) in numpy, the same for the same case everywhere."""
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        n, channels = self.shape[0], self.shape[-1]
        shapes = {None: None, "channel": (channels,), "sample": (n, channels)}

        def draw(shape, mean, spread, dtype):
            value = mean + spread * rng.standard_normal(shape)
            return value.astype(jnp.dtype(dtype or self.dtype))

        x = draw(self.full_shape, self.mean, self.spread, self.dtype)
        scale = self.scale and draw(shapes[self.scale], 1.0, 0.3, self.scale_dtype)
        bias = self.bias and draw(shapes[self.bias], 0.1, 0.3, self.bias_dtype)
        dy = draw(self.full_shape, 0.1, 1.0, self.dtype)
        dy[numerics.near_kink(x, scale, bias, **self.options)] = 0
        return x, scale, bias, dy

    @functools.cached_property
    def expected(self) -> dict[str, numerics.Expected]:
        return numerics.expected(*self.arrays, **self.options)


def _cut(shape: list[int]) -> tuple[int, ...]:
    """Two samples and smaller spatial axes; channels stay, they decide how kernels tile.

    Odd extents stay odd. A problem without spatial axes keeps more samples.
    """
    n, *spatial, channels = shape
    n = min(n, 2 if spatial else MAX_ELEMENTS // channels)
    while n * math.prod(spatial) * channels > MAX_ELEMENTS:
        largest = spatial.index(max(spatial))
        spatial[largest] = spatial[largest] // 2 | spatial[largest] % 2
    return (n, *spatial, channels)


def _named() -> tuple[Case, ...]:
    file = pathlib.Path(__file__).parents[1] / "benchmarks" / "shapes.json"
    cases = {}
    for name, row in json.loads(file.read_text())["problems"].items():
        activation = None if row["act"] == "none" else row["act"]
        form = "sample" if name.startswith("edm") else "channel"  # EDM's scale and shift are FiLM's
        case = Case(name, _cut(row["shape"]), row["groups"], activation, scale=form, bias=form)
        # Problems that differ only in what was cut away are one problem here.
        cases.setdefault(dataclasses.replace(case, name=""), case)
    return tuple(cases.values())


NAMED = _named()

CORNERS = tuple(
    Case(name, shape, groups)
    for name, shape, groups in (
        # Channels that no vector divides, group sizes 1, 3, 37, 13 (cases.md 17).
        ("c31_g31", (2, 5, 7, 31), 31),
        ("c33_g11", (2, 7, 3, 33), 11),
        ("c37_g1", (3, 4, 5, 37), 1),
        ("c26_g2", (2, 5, 3, 26), 2),
        ("c3_g3", (2, 6, 5, 3), 3),
        ("c1_g1", (2, 9, 4, 1), 1),
        ("c96", (2, 4, 5, 96), 32),
        ("c256", (1, 9, 9, 256), 32),
        ("c384", (2, 3, 7, 384), 32),
        ("c1152", (1, 5, 3, 1152), 32),
        # Few positions, or none.
        ("spatial_1", (4, 1, 1, 64), 8),
        ("spatial_7x7", (2, 7, 7, 64), 8),
        ("one_element", (3, 1, 1, 6), 6),
        # Every rank from 2 to 8.
        ("rank2", (9, 48), 6),
        ("rank3", (2, 17, 24), 4),
        ("rank5", (2, 3, 5, 4, 24), 4),
        ("rank6", (1, 2, 3, 2, 5, 14), 7),
        ("rank7", (2, 2, 1, 3, 2, 1, 10), 2),
        ("rank8", (2, 2, 1, 3, 2, 2, 2, 12), 3),
        # Tails: a last vector of 4 of 8, a prime row count, one wide row, one channel of many rows.
        ("tail_20", (1, 3, 3, 20), 2),
        ("prime_rows", (2, 1031, 8), 2),
        ("wide_row", (1, 2, 4099), 1),
        ("many_rows", (1, 20011, 2), 2),
        ("many_samples", (67, 3, 8), 4),
    )
)

# The small problem on which forms, types and activations are crossed: channels last has a tail in
# its rows of 24, channels first in its runs of 30 * 6.
SMALL = Case("small", (3, 6, 5, 24), 4)


def corner_cases() -> tuple[Case, ...]:
    """Every corner in float32 in both layouts, in bfloat16, and in float16 or float64.

    Reduced: activation, form of scale and bias, and the layout of the other types go round instead
    of being crossed. The definition's compile time (0.5 s a case) is what a larger grid would cost;
    `crossed_cases` crosses them on one shape.
    """
    cases = []
    for i, corner in enumerate(CORNERS):
        last = ("float16", "float64")[i % 2]
        for j, (dtype, layout) in enumerate(
            (("float32", 0), ("float32", 1), ("bfloat16", i // 2), (last, i // 2 + 1))
        ):
            turn = i + j
            cases.append(
                dataclasses.replace(
                    corner,
                    dtype=dtype,
                    layout=LAYOUTS[layout % 2],
                    activation=ACTIVATIONS[turn % 5],
                    scale=FORMS[(turn + 1) % 3],
                    bias=FORMS[(turn // 3 + 1) % 3],
                )
            )
    return tuple(cases)


def named_cases() -> tuple[Case, ...]:
    """Every named problem in float32 in both layouts and in one of the others, going round.

    Reduced like `corner_cases`, for the same reason; the activation is the model's.
    """
    cases = []
    for i, case in enumerate(NAMED):
        others = ("bfloat16", "float16", "bfloat16", "float64")
        cases += [dataclasses.replace(case, layout=layout) for layout in LAYOUTS]
        cases.append(dataclasses.replace(case, dtype=others[i % 4], layout=LAYOUTS[i // 4 % 2]))
    return tuple(cases)


def crossed_cases() -> tuple[Case, ...]:
    """On the small problem: dtypes x activations, and forms of scale x forms of bias x both kinds.

    Reduced: pairs, not the whole product of 4 x 2 x 5 x 9 calls; no code knows more than two.
    """
    cases = [
        dataclasses.replace(SMALL, dtype=dtype, activation=activation, layout=LAYOUTS[(i + j) % 2])
        for i, dtype in enumerate(DTYPES)
        for j, activation in enumerate(ACTIVATIONS)
    ]
    cases += [
        dataclasses.replace(
            SMALL, scale=scale, bias=bias, activation=activation, layout=LAYOUTS[(i + j + k) % 2]
        )
        for i, scale in enumerate(FORMS)
        for j, bias in enumerate(FORMS)
        for k, activation in enumerate((None, "silu"))
    ]
    return tuple(dict.fromkeys(cases))
