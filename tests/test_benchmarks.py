"""The parts of `python -m benchmarks`: cases, checks, arithmetic of times; a run of one case."""

import json
import math
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
# After the installed packages, so that jax_gn is not the source tree's.
sys.path.append(str(ROOT))

from benchmarks import __main__ as program  # noqa: E402
from benchmarks import accuracy, measure, peers, plots, problems, timing  # noqa: E402
from benchmarks.problems import Case  # noqa: E402

import numerics  # noqa: E402

SMALL = problems.NamedProblem("small", (3, 6, 5, 24), 4, "silu", "none")


def _case(**changes) -> Case:
    fields = {"dtype": "float32", "layout": "channels_last", "direction": "both"}
    return Case(SMALL, **fields | {"activation": "silu", "platform": "cpu"} | changes)


@pytest.mark.parametrize("direction", problems.PASSES)
@pytest.mark.parametrize("layout", problems.LAYOUTS)
def test_a_case(direction, layout):
    """All candidates pass the check, and the row says what was timed."""
    case = _case(direction=direction, layout=layout)
    row = measure.measure(case, ["three_stage", "resident"], seconds=0.01)
    assert set(row["seconds"]) == {"flax", "flax_exact", "ours", "three_stage", "copy"}
    size = 4 * math.prod(SMALL.shape)
    assert row["bytes"] == {"forward": 2, "both": 5}[direction] * size
    assert row["copy_bytes"] == 2 * size and tuple(row["shape"]) == case.shape
    for times in row["seconds"].values():
        assert 0 < times["low"] <= times["median"] <= times["high"] and times["rounds"] >= 5
    json.dumps(row)


@pytest.mark.parametrize("broken", ["scaled", "hole"])
def test_a_wrong_candidate_stops_the_run(broken):
    """Also one element that is never written (a NaN of the poison)."""
    case = _case()
    arrays = measure._inputs(case, 0)
    exact = peers.flax(case, exact=True)

    def wrong(*arrays):
        y, dx, *rest = exact(*arrays)
        dx = dx * 1.01 if broken == "scaled" else dx.at[0, 0, 0, 0].set(np.nan)
        return y, dx, *rest

    with pytest.raises(SystemExit, match="bad is wrong in small.*dx has a relative error"):
        measure.check(case, {"flax_exact": exact, "bad": wrong}, arrays)


def test_a_case_crosses_processes():
    case = _case(dtype="bfloat16", layout="channels_first")
    assert problems.from_json(problems.to_json(case)) == case


def test_per_call_finds_the_borders():
    """Three calls of two kernels each, out of order as a trace may have them."""
    events = [(5.0, 3.0), (0.0, 1.0), (1.0, 2.0), (8.0, 4.0), (20.0, 7.0), (16.0, 1.0)]
    times = timing.per_call(events, 3)
    assert times["kernels"] == 2 and times["rounds"] == 3
    assert times["median"] == 7.0 and times["low"] == 3.0 and times["high"] == 8.0


def test_per_call_without_borders_is_the_mean():
    times = timing.per_call([(0.0, 1.0), (1.0, 2.0), (3.0, 3.0)], 2)
    assert times["median"] == times["low"] == times["high"] == 3.0


def test_waiting_for_the_kernel_before_is_not_counted():
    """A convolution, a kernel that begins in it and waits, one that has ended before it has."""
    events = [(10.0, 4.0), (11.0, 4.0), (12.0, 1.0), (20.0, 2.0)]
    assert timing.alone(events) == [4.0, 1.0, 0.0, 2.0]


def test_a_trace_without_events_is_an_error():
    with pytest.raises(RuntimeError, match="CUPTI"):
        timing.per_call([], 3)


def test_device_events_are_those_of_streams():
    stats = [("hlo_op", "add.1"), ("hlo_module", "jit_f")]
    event = types.SimpleNamespace(start_ns=2e9, duration_ns=1e9, name="add_1", stats=stats)
    line = types.SimpleNamespace(name="Stream #13(Compute)", events=[event])
    other = types.SimpleNamespace(name="XLA Ops", events=[event])
    gpu = types.SimpleNamespace(name="/device:GPU:0", lines=[line, other])
    host = types.SimpleNamespace(name="/host:CPU", lines=[line])
    data = types.SimpleNamespace(planes=[gpu, host])
    assert timing.device_events(data) == [(2.0, 1.0, "add_1", "add.1")]


def test_the_profile_has_what_we_read(tmp_path):
    """The attributes of jax.profiler's events, in a trace of the CPU."""
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(jax.jit(peers.copy)(jnp.ones(1000)))
    (file,) = tmp_path.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    events = [e for p in data.planes for line in p.lines for e in line.events]
    assert events and all(e.start_ns >= 0 and e.duration_ns >= 0 for e in events)


def test_turns_leave_the_cache():
    for size in (1, 10**6, 10**8, 10**10):
        count = timing.turns(size)
        assert count >= 2 and count * size >= min(timing.WORKING_SET, 2 * size)


def test_arguments_make_cases():
    parser = program.arguments()
    words = (
        "--problems mlp_rows bit_r50_7 --dtype float32 --pass forward both --activation model none"
    )
    options = parser.parse_args(words.split())
    found = program.cases(options, "cuda")
    # mlp_rows has no activation of its own: "model" and "none" are one case.
    assert len(found) == 2 + 4
    assert {c.problem.elements for c in found} == {65536 * 1024, 128 * 49 * 2048}
    assert all(c.problem.elements <= 40e6 for c in program.cases(options, "cpu"))
    with pytest.raises(SystemExit, match="no such problem: sd16"):
        problems.load(["sd16"])


@pytest.mark.needs_package
def test_torch_computes_the_same(monkeypatch):
    """The formula that torch's peers are checked with is the one that ours is."""
    pytest.importorskip("torch")
    from benchmarks import torch_peers

    monkeypatch.setattr(torch_peers, "CHUNK", 100)
    monkeypatch.setattr(torch_peers, "SECONDS", 0.01)
    for layout in problems.LAYOUTS:
        case = _case(layout=layout)
        x, scale, bias, dy = torch_peers._inputs(case, 0, "cpu")
        want = [t.detach().numpy() for t in torch_peers.truth(case, x, scale, bias, dy)]

        def to_jax(t, last=layout == "channels_last"):
            array = t.detach().numpy()
            return jnp.asarray(np.moveaxis(array, 1, -1) if last and array.ndim > 1 else array)

        got = peers.ours(case)(*map(to_jax, (x, scale, bias, dy)))
        for ours, truth in zip(got, want, strict=True):
            if layout == "channels_last" and ours.ndim > 1:
                ours = jnp.moveaxis(ours, -1, 1)
            assert measure.relative_error(ours, jnp.asarray(truth)) < measure.ROUNDING["float32"]
        assert torch_peers.measure(case)["torch"]["median"] > 0


def test_the_program(tmp_path):
    """From the command line to table and JSON."""
    out = tmp_path / "results.json"
    command = [sys.executable, "-P", "-c"]
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); import benchmarks.__main__ as b; "
        "b._keep_memory = lambda: None; b.main()"
    )
    arguments = ["--problems", "sd15_unet_8", "--pass", "forward", "--dtype", "float32"]
    arguments += ["--seconds", "0.01", "--no-torch", "--out", str(out)]
    done = subprocess.run([*command, code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "geometric mean over 1 cases" in done.stdout and "sd15_unet_8" in done.stdout
    written = json.loads(out.read_text())
    assert written["machine"]["platform"] == "cpu" and written["machine"]["jax"] == jax.__version__
    (row,) = written["rows"]
    assert row["pass"] == "forward" and row["temp_bytes"]["ours"] >= 0


def test_accuracy_row():
    """Ours stays at rounding where Flax's default does not; the table shows the worst group."""
    rows = [accuracy.row("float32", g, 1e4, shape=(2, 8, 8, 16)) for g in (16, 2)]
    for row in rows:
        assert row["errors"]["jax_gn"]["y"] < 1e-6 < 1e-3 < row["errors"]["flax"]["y"]
        assert row["ratio"] == pytest.approx(1e4, rel=0.1)
        assert set(row["errors"]["jax_gn"]) == {"y", "dx", "dscale", "dbias"}
    worst = max(row["errors"]["flax"]["y"] for row in rows)
    assert f" {worst:.1e} |" in accuracy.table(rows)


def test_accuracy_of_constant_groups():
    """bfloat16 near 1e6 is constant: the gradient of its scale is 0, and so is the error."""
    errors = accuracy.row("bfloat16", 2, 1e6, shape=(2, 8, 8, 16))["errors"]["jax_gn"]
    assert errors["y"] == errors["dscale"] == 0.0


def test_the_truth_of_check_and_accuracy_is_the_suites():
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 2, 7, 12)).astype("float32")
    scale, bias = rng.standard_normal((2, 12)).astype("float32")
    want = numerics.expected(x, scale, bias, dy, num_groups=3, epsilon=problems.EPSILON)
    wide = [a.astype(np.float64) for a in (dy, x, scale, bias)]
    for name, got in accuracy.truth(*wide, groups=3, epsilon=problems.EPSILON).items():
        np.testing.assert_allclose(got, want[name].truth, rtol=1e-9, atol=1e-9)


def test_plots(tmp_path):
    """Every figure is drawn from JSON, also where a candidate is missing in some rows."""
    row = _case().row() | {"temp_bytes": {"ours": 0, "flax": 10**6, "flax_exact": 10**6}}
    times = {"median": 1e-3, "low": 1e-3, "high": 1e-3, "rounds": 5}
    some = dict.fromkeys(("ours", "flax", "copy"), times)
    rows = [row | {"seconds": some}, row | {"problem": "b", "seconds": some | {"torch": times}}]
    written = {"machine": {"cpu": "one"}, "rows": rows}
    (tmp_path / "cpu.json").write_text(json.dumps(written))
    errors = {name: {"y": 0.0, "dx": 1e-3} for name in ("jax_gn", "flax")}
    errors = [{"dtype": "float32", "offset": o, "errors": errors} for o in (0.0, 1e3)]
    (tmp_path / "accuracy.json").write_text(json.dumps({"rows": errors}))
    files = plots.draw(tmp_path, tmp_path / "out")
    assert [f.name for f in files] == [
        "bandwidth_cpu.png",
        "speedup_cpu.png",
        "memory_cpu.png",
        "accuracy.png",
    ]
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)


def test_the_accuracy_table_of_the_docs():
    """It is that of the JSON beside it."""
    rows = json.loads(accuracy.RESULTS.read_text())["rows"]
    page = plots.PAGE.read_text()
    assert plots.with_table(page, rows) == page and accuracy.table(rows) in page


def test_plots_of_the_docs_exist():
    """Every picture that a page shows is there."""
    for page in (ROOT / "docs").glob("*.md"):
        for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / path).is_file(), f"{page}: {path}"
