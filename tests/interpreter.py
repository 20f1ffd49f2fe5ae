"""Programs in a fresh Python: what JAX registers, and its threads, last as long as a process."""

import subprocess
import sys
import textwrap


def output(program: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """What the program prints; fails, and shows why, where it does."""
    done = subprocess.run(
        [sys.executable, "-P", *options, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
