"""examples/sd_unet.py, tiny: all four norms train the same model, and ours through the kernels."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np

import numerics

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
HLO = """
ENTRY %main (x: f32[2,8,4]) -> f32[2,8,4] {
  %x = f32[2,8,4]{2,1,0} parameter(0)
  %t = f32[2,4,8]{2,1,0} transpose(%x), dimensions={0,2,1}
  %b = f32[2,4,8]{2,1,0} bitcast(%t)
  %call = (f32[2,4,8]{2,1,0}, f32[2,2]{1,0}) custom-call(%b), custom_call_target="jax_gn.forward.v2"
  %y = f32[2,4,8]{2,1,0} get-tuple-element(%call), index=0
  %a = f32[2,4,8]{2,1,0} add(%y, %b)
  ROOT %c = f32[2,4,8]{1,2,0} copy(%y)
}
"""


def run(script: str, *arguments, folder) -> str:
    command = [sys.executable, "-P", str(EXAMPLES / script), *map(str, arguments)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sd_unet(tmp_path):
    size = ["--width", 32, "--multiples", 1, 2, "--blocks", 1, "--batch", 2, "--size", 8]
    what = ["--turns", 1, "--steps", 2, "--dtype", "float32", "--hlo", tmp_path / "hlo"]
    out = tmp_path / "out.json"
    printed = run("sd_unet.py", *size, *what, "--out", out, folder=tmp_path)
    results = json.loads(out.read_text())["results"]["float32"]
    assert list(results) == ["flax", "unfused", "fused", "added", "none"]
    norms = 2 * (2 + 2 + 4) + 1
    calls = {name: row["kernel_calls"] for name, row in results.items()}
    ours = ("unfused", "fused", "added")
    assert calls == {"flax": 0, "none": 0} | dict.fromkeys(ours, 2 * norms)
    losses = {name: np.float32(row["losses"]) for name, row in results.items()}
    for name in ours:
        numerics.assert_agree(losses[name], losses["flax"], length=2 * 8 * 8 * 4)
    assert losses["none"][0] != losses["flax"][0]
    assert "norms' part" in printed
    moved = {name: row["layout_changes"]["in_program"] for name, row in results.items()}
    if jax.default_backend() == "cpu":  # no transpose is there because of the kernels
        assert moved["fused"] <= moved["none"]


def test_hlo_layouts(tmp_path):
    (tmp_path / "text").write_text(HLO)
    printed = run("hlo_layouts.py", tmp_path / "text", folder=tmp_path)
    assert "1 calls of jax_gn; transposes and copies: 1 feed them, 1 follow them, 2 in" in printed
    assert "transpose t feeds call" in printed and "copy c follows call" in printed
