"""The parts of `python -m benchmarks`: cases, checks, arithmetic of times; a run of one case."""

import json
import math
import pathlib
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
from benchmarks import measure, peers, problems, timing  # noqa: E402
from benchmarks.problems import Case  # noqa: E402

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
    times = timing.per_call([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)], 2)
    assert times["median"] == times["low"] == times["high"] == 3.0


def test_a_trace_without_events_is_an_error():
    with pytest.raises(RuntimeError, match="CUPTI"):
        timing.per_call([], 3)


def test_device_events_are_those_of_streams():
    event = types.SimpleNamespace(start_ns=2e9, duration_ns=1e9)
    line = types.SimpleNamespace(name="Stream #13(Compute)", events=[event])
    other = types.SimpleNamespace(name="XLA Ops", events=[event])
    gpu = types.SimpleNamespace(name="/device:GPU:0", lines=[line, other])
    host = types.SimpleNamespace(name="/host:CPU", lines=[line])
    data = types.SimpleNamespace(planes=[gpu, host])
    assert timing.device_events(data) == [(2.0, 1.0)]


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
