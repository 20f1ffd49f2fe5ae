"""The named problems of real models (shapes.json), cut to what a machine holds, and the cases."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

_FILE = pathlib.Path(__file__).with_name("shapes.json")
EPSILON = 1e-6
LAYOUTS = ("channels_last", "channels_first")
PASSES = ("forward", "both")
# What differs by more from the truth, by the 2-norm, isn't the same function. (16-bit types round
# between norm and activation.)
ROUNDING = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 3e-2, "float16": 5e-3}
# Tensors of x's size that a pass must move: x, y forward; dy, x, dx backward.
TENSORS = {"forward": 2, "both": 5}
# A CPU needs no larger tensor to leave its caches, and XLA's step takes seconds beyond.
BATCH_ELEMENTS, MOST_ELEMENTS = 12_000_000, 40_000_000


@dataclasses.dataclass(frozen=True)
class NamedProblem:
    """A GroupNorm that a model runs; shape is channels-last."""

    name: str
    shape: tuple[int, ...]
    groups: int
    activation: str | None
    model: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing that is timed: a problem in a type, layout and pass, with an activation or none."""

    problem: NamedProblem
    dtype: str
    layout: str
    direction: str  # the pass: "forward" or "both"
    activation: str | None
    platform: str  # "cpu" or "cuda"

    @property
    def shape(self) -> tuple[int, ...]:
        """x's, in its layout."""
        n, *spatial, c = self.problem.shape
        return self.problem.shape if self.layout == "channels_last" else (n, c, *spatial)

    @property
    def channel_axis(self) -> int:
        return -1 if self.layout == "channels_last" else 1

    @property
    def tensors(self) -> int:
        return TENSORS[self.direction]

    @property
    def tensor_bytes(self) -> int:
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
        return self.problem.elements * sizes[self.dtype]

    @property
    def input_bytes(self) -> int:
        """Of a call's tensors: x, and dy where there is a backward pass."""
        return self.tensor_bytes * (2 if self.direction == "both" else 1)

    def row(self) -> dict:
        """How a result names it."""
        return {
            "problem": self.problem.name,
            "shape": list(self.shape),
            "groups": self.problem.groups,
            "dtype": self.dtype,
            "layout": self.layout,
            "pass": self.direction,
            "activation": self.activation,
            "bytes": self.tensors * self.tensor_bytes,
            "copy_bytes": 2 * self.tensor_bytes,
        }


def load(names: list[str] | None = None) -> list[NamedProblem]:
    """The problems of those names, all of them by default."""
    rows = json.loads(_FILE.read_text())["problems"]
    unknown = set(names or ()) - set(rows)
    if unknown:
        raise SystemExit(f"no such problem: {', '.join(sorted(unknown))}; known: {', '.join(rows)}")
    return [
        NamedProblem(
            name,
            tuple(row["shape"]),
            row["groups"],
            None if row["act"] == "none" else row["act"],
            row["model"],
        )
        for name, row in rows.items()
        if not names or name in names
    ]


def cut_batch(problem: NamedProblem, max_elements: int) -> NamedProblem:
    """The same problem with the largest batch, at least 1, of at most max_elements elements."""
    per_sample = problem.elements // problem.shape[0]
    n = max(1, min(problem.shape[0], max_elements // per_sample))
    return dataclasses.replace(problem, shape=(n, *problem.shape[1:]))


def for_platform(problems: list[NamedProblem], platform: str) -> list[NamedProblem]:
    """A GPU takes them as they are; a CPU smaller batches, and not the largest problems."""
    if platform == "cuda":
        return problems
    cut = [cut_batch(problem, BATCH_ELEMENTS) for problem in problems]
    return [problem for problem in cut if problem.elements <= MOST_ELEMENTS]


def from_json(text: str) -> Case:
    """The Case that `to_json` wrote, for another process."""
    fields = json.loads(text)
    problem = fields.pop("problem")
    return Case(NamedProblem(**problem | {"shape": tuple(problem["shape"])}), **fields)


def to_json(case: Case) -> str:
    return json.dumps(dataclasses.asdict(case))
