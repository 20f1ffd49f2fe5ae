"""Draws what benchmarks/results/ holds, into docs/: `python -m benchmarks.plots`.

For each of cpu.json and cuda.json that is there: bandwidth as a share of the copy's, time of the
others over ours, temporary memory of fused and unfused. From accuracy.json: errors over the mean,
and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib

import matplotlib

from benchmarks.accuracy import table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = pathlib.Path(__file__).with_name("results")
PLOTS = RESULTS.parents[1] / "docs" / "plots"
PAGE = PLOTS.with_name("benchmarks.md")
MARK, END = "<!-- accuracy: written by benchmarks.plots -->", "<!-- end -->"
NAMES = {
    "ours": "jax_gn",
    "jax_gn": "jax_gn",
    "flax": "Flax (XLA)",
    "flax_exact": "Flax, exact variance",
    "torch": "torch",
    "torch_compiled": "torch.compile",
    "liger": "Liger",
}
COLORS = dict(zip(NAMES, ("C0", "C0", "C1", "C2", "C3", "C4", "C5"), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.plots", description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--out", type=pathlib.Path, default=PLOTS)
    options = parser.parse_args()
    for file in draw(options.results, options.out):
        print(f"written to {file}")
    accuracy_file = options.results / "accuracy.json"
    if accuracy_file.exists():
        PAGE.write_text(with_table(PAGE.read_text(), json.loads(accuracy_file.read_text())["rows"]))


def with_table(page: str, rows: list[dict]) -> str:
    """The page with the table of these rows between its marks."""
    begin, _, rest = page.partition(MARK)
    return f"{begin}{MARK}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}"


def draw(results: pathlib.Path, out: pathlib.Path) -> list[pathlib.Path]:
    """The files written."""
    out.mkdir(parents=True, exist_ok=True)
    written = []

    def save(name: str, figure) -> None:
        written.append(out / f"{name}.png")
        # No date and no version in the file: the same numbers give the same bytes.
        figure.savefig(written[-1], dpi=80, bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)

    for platform in ("cpu", "cuda"):
        file = results / f"{platform}.json"
        if file.exists():
            measured = json.loads(file.read_text())
            where = measured["machine"].get("gpu") or measured["machine"]["cpu"]
            for name, drawn in (("bandwidth", bandwidth), ("speedup", speedup), ("memory", memory)):
                save(f"{name}_{platform}", drawn(measured["rows"], where))
    if (results / "accuracy.json").exists():
        save("accuracy", accuracy(json.loads((results / "accuracy.json").read_text())["rows"]))
    return written


def bandwidth(rows: list[dict], where: str):
    """The bytes that must move, per second, over those of a copy in the same run."""

    def share(row: dict, name: str) -> float:
        seconds = {key: value["median"] for key, value in row["seconds"].items()}
        return row["bytes"] / seconds[name] / (row["copy_bytes"] / seconds["copy"])

    figure, panels = _panels(rows, share, ("ours", *_others(rows)), "share of a copy's bandwidth")
    _mark_one(panels)
    figure.suptitle(f"Bandwidth next to a copy, {where}")
    return figure


def speedup(rows: list[dict], where: str):
    """The others' time over ours."""

    def ratio(row: dict, name: str) -> float:
        return row["seconds"][name]["median"] / row["seconds"]["ours"]["median"]

    figure, panels = _panels(rows, ratio, _others(rows), "time over jax_gn's")
    _mark_one(panels)
    figure.suptitle(f"How much longer others take, {where}")
    return figure


def memory(rows: list[dict], where: str):
    """Temporary memory of a pass that XLA asks for, in tensors of x's size."""

    def tensors(row: dict, name: str) -> float:
        return row["temp_bytes"][name] / (row["copy_bytes"] / 2)

    label = "temporary memory, in tensors of x's size"
    figure, panels = _panels(rows, tensors, ("ours", "flax"), label)
    for panel in panels:
        panel.set_xlim(0, max(1.0, panel.get_xlim()[1]))  # nothing must not look like much
    figure.suptitle(f"Temporary memory of fused and unfused, {where}")
    return figure


def accuracy(rows: list[dict]):
    """The worst error of y and dx over the group sizes, by the offset of x."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, panels = plt.subplots(
        2, len(dtypes), figsize=(4 * len(dtypes), 6.5), sharey=True, squeeze=False
    )
    for line, result in zip(panels, ("y", "dx"), strict=True):
        for panel, dtype in zip(line, dtypes, strict=True):
            mine = [row for row in rows if row["dtype"] == dtype]
            for name in mine[0]["errors"]:
                offsets = sorted({row["offset"] for row in mine})
                worst = [
                    max(r["errors"][name][result] for r in mine if r["offset"] == offset)
                    for offset in offsets
                ]
                # Exact results are drawn at the bottom: a logarithm has no 0.
                worst = [max(value, 1e-9) for value in worst]
                panel.plot(offsets, worst, "o-", label=NAMES[name], color=COLORS[name], ms=3)
            panel.set_xscale("symlog", linthresh=10)
            panel.set_yscale("log")
            panel.set_title(f"{result}, {dtype}")
            panel.grid(alpha=0.3)
            panel.set_xlabel("mean of x, its deviation being 1")
        line[0].set_ylabel("largest error / largest value")
    panels[0][0].legend(fontsize=8)
    figure.suptitle("Errors against float64")
    figure.tight_layout()
    return figure


def _others(rows: list[dict]) -> tuple[str, ...]:
    return tuple(n for n in NAMES if n != "ours" and any(n in row["seconds"] for row in rows))


def _mark_one(panels) -> None:
    """A line where a ratio is 1."""
    for panel in panels:
        panel.axvline(1, color="black", linewidth=0.8)


def _panels(rows: list[dict], value, names: tuple[str, ...], label: str):
    """(figure, panels): one for each type, layout and pass; a group of bars for each problem.

    `value(row, name)` is a bar's length, of which `label` tells what it is.
    A problem that was timed with and without its activation counts with it.
    """
    kinds: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        kind = (row["dtype"], row["layout"], row["pass"])
        mine = kinds.setdefault(kind, {})
        if row["activation"] is not None or row["problem"] not in mine:
            mine[row["problem"]] = row
    most = max(map(len, kinds.values()))
    columns = min(4, len(kinds))
    lines = math.ceil(len(kinds) / columns)
    height = lines * (0.8 + 0.16 * most * (len(names) + 1))
    figure, grid = plt.subplots(
        lines, columns, figsize=(1.5 + 4 * columns, height), sharey=True, squeeze=False
    )
    panels = grid.ravel()
    for panel in panels[len(kinds) :]:
        panel.set_visible(False)
    for panel, (kind, mine) in zip(panels, kinds.items(), strict=False):
        for i, name in enumerate(names):
            bars = [(j, value(row, name)) for j, row in enumerate(mine.values()) if _has(row, name)]
            place = [j + 0.8 * (i + 0.5) / len(names) - 0.4 for j, _ in bars]
            color = COLORS[name]
            lengths = [v for _, v in bars]
            panel.barh(place, lengths, 0.8 / len(names), label=NAMES[name], color=color)
        panel.set_yticks(range(len(mine)), mine)
        panel.set_title(", ".join(kind).replace("both", "forward + backward"), fontsize=9)
        panel.grid(axis="x", alpha=0.3)
        panel.set_xlabel(label)
    panels[0].invert_yaxis()
    panels[columns - 1].legend(fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    return figure, panels


def _has(row: dict, name: str) -> bool:
    return name in row["seconds"]


if __name__ == "__main__":
    main()
