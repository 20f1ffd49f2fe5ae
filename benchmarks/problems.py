"""The named problems of real models (shapes.json), cut to what a machine can hold."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

_FILE = pathlib.Path(__file__).with_name("shapes.json")


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

    def in_layout(self, layout: str) -> tuple[int, ...]:
        """The shape in "channels_last" or "channels_first"."""
        n, *spatial, c = self.shape
        return self.shape if layout == "channels_last" else (n, c, *spatial)


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
        if names is None or name in names
    ]


def cut_batch(problem: NamedProblem, max_elements: int) -> NamedProblem:
    """The same problem with the largest batch, at least 1, of at most max_elements elements."""
    per_sample = problem.elements // problem.shape[0]
    n = max(1, min(problem.shape[0], max_elements // per_sample))
    return dataclasses.replace(problem, shape=(n, *problem.shape[1:]))
