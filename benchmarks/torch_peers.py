"""torch eager, torch.compile and Liger's Triton kernel, in a process of their own.

`python -m benchmarks.torch_peers` reads cases as JSON lines and answers each with one line:
{name: summary}, or {"error": text}. A process of its own, because two users of CUPTI don't agree in
one, and JAX and torch both want the GPU's memory.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import traceback

from benchmarks import problems, timing
from benchmarks.problems import EPSILON, ROUNDING, Case

SECONDS = 1.0  # a case, on a CPU
CHUNK = 2**25  # elements that are float64 at a time


def installed() -> bool:
    return importlib.util.find_spec("torch") is not None


class Worker:
    """The process, from the side of the one who asks."""

    def __init__(self):
        safe = ["-P"] if sys.flags.safe_path else []
        command = [sys.executable, *safe, "-m", "benchmarks.torch_peers"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, case: Case) -> dict:
        """{name: summary} of the case; {"error": text} where torch can't run it."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(problems.to_json(case) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer else {"error": "torch's process ended"}

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    for line in sys.stdin:
        try:
            answer = measure(problems.from_json(line))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


def measure(case: Case) -> dict:
    """{name: summary} of each candidate, its results checked first."""
    import torch  # pyright: ignore[reportMissingImports]

    device = "cuda" if case.platform == "cuda" else "cpu"
    count = timing.turns(case.input_bytes) if device == "cuda" else 1
    sets = [_inputs(case, seed, device) for seed in range(count)]
    expected = truth(case, *sets[0])
    candidates = {}
    for name, norm in _norms(case, device).items():
        step = _step(case, norm)
        _check(case, name, step(*sets[0]), expected)
        candidates[name] = [lambda step=step, arrays=arrays: step(*arrays) for arrays in sets]
    if device == "cuda":
        del expected
        torch.cuda.empty_cache()
        return {name: _traced(calls) for name, calls in candidates.items()}
    first = {name: calls[0] for name, calls in candidates.items()}
    return timing.interleaved(first, lambda result: result, seconds=SECONDS)


def _inputs(case: Case, seed: int, device: str) -> tuple:
    """(x, scale, bias, dy); x is [N, C, *spatial], in memory as the layout says."""
    import torch  # pyright: ignore[reportMissingImports]

    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    x, dy = draw(*case.shape), draw(*case.shape)
    if case.layout == "channels_last":
        x, dy = x.movedim(-1, 1), dy.movedim(-1, 1)
    channels = case.problem.shape[-1]
    needed = case.direction == "both"
    parameters = [draw(channels).requires_grad_(needed) for _ in range(2)]
    return x.requires_grad_(needed), *parameters, dy


def _norms(case: Case, device: str) -> dict:
    """{name: f(x, scale, bias)}."""
    import torch  # pyright: ignore[reportMissingImports]

    groups, functional = case.problem.groups, torch.nn.functional
    activations = {
        None: lambda z: z,
        "silu": functional.silu,
        "relu": functional.relu,
        "gelu": lambda z: functional.gelu(z, approximate="tanh"),
        "leaky_relu": functional.leaky_relu,
    }
    activation = activations[case.activation]

    def eager(x, scale, bias):
        return activation(functional.group_norm(x, groups, scale, bias, EPSILON))

    found = {"torch": eager}
    if device == "cuda":
        found["torch_compiled"] = torch.compile(eager, dynamic=False)
    # Its kernel is for contiguous [N, C, *spatial] on a GPU.
    if device == "cuda" and case.layout == "channels_first" and _has_liger():
        from liger_kernel.ops.group_norm import (  # pyright: ignore[reportMissingImports]
            LigerGroupNormFunction,
        )

        channels = case.problem.shape[-1]
        found["liger"] = lambda x, scale, bias: activation(
            LigerGroupNormFunction.apply(x, scale, bias, channels, groups, EPSILON)
        )
    return found


def _has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def _step(case: Case, norm):
    import torch  # pyright: ignore[reportMissingImports]

    if case.direction == "forward":

        def forward(x, scale, bias, dy):
            with torch.no_grad():
                return (norm(x, scale, bias),)

        return forward

    def both(x, scale, bias, dy):
        y = norm(x, scale, bias)
        return y, *torch.autograd.grad(y, (x, scale, bias), dy)

    return both


def truth(case: Case, x, scale, bias, dy) -> list:
    """The results by the formula in float64, some samples at a time."""
    import torch  # pyright: ignore[reportMissingImports]

    samples = max(1, CHUNK * case.problem.shape[0] // max(1, case.problem.elements))
    parameters = [t.detach().double() for t in (scale, bias)]
    parts, sums = [], [torch.zeros_like(p) for p in parameters]
    for rows, cotangents in zip(x.detach().split(samples), dy.split(samples), strict=True):
        arrays = [rows.double(), *parameters]
        arrays = [a.clone().requires_grad_(case.direction == "both") for a in arrays]
        y = _formula(case, *arrays)
        if case.direction == "forward":
            parts.append((y.float(),))
            continue
        dx, *more = torch.autograd.grad(y, arrays, cotangents.double())
        parts.append((y.detach().float(), dx.float()))
        sums = [a + b for a, b in zip(sums, more, strict=True)]
    results = [torch.cat(column) for column in zip(*parts, strict=True)]
    return results + (sums if case.direction == "both" else [])


def _formula(case: Case, x, scale, bias):
    import torch  # pyright: ignore[reportMissingImports]

    functional = torch.nn.functional
    groups = x.reshape(x.shape[0], case.problem.groups, -1)
    centred = groups - groups.mean(2, keepdim=True)
    xhat = centred / (centred.square().mean(2, keepdim=True) + EPSILON).sqrt()
    column = (-1, *(1,) * (x.ndim - 2))
    z = xhat.reshape(x.shape) * scale.reshape(column) + bias.reshape(column)
    if case.activation == "gelu":
        return functional.gelu(z, approximate="tanh")
    return z if case.activation is None else getattr(functional, case.activation)(z)


def _check(case: Case, name: str, results, expected) -> None:
    names = ("y", "dx", "dscale", "dbias")[: len(expected)]
    for result, got, want in zip(names, results, expected, strict=True):
        error = ((got.float() - want.float()).norm() / want.float().norm()).item()
        if not error < ROUNDING[case.dtype]:
            raise ValueError(f"{name} is wrong: {result} has a relative error of {error:.1e}")


def _traced(calls: timing.Calls) -> dict:
    """Device seconds of a call by CUPTI, through torch's profiler."""
    import torch  # pyright: ignore[reportMissingImports]

    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(timing.CALLS):
            calls[i % len(calls)]()
        torch.cuda.synchronize()
    events = [
        (event.time_range.start * 1e-6, event.time_range.elapsed_us() * 1e-6)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return timing.per_call(events, timing.CALLS)


if __name__ == "__main__":
    main()
