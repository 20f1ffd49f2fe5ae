"""Transposes and copies that XLA puts around jax_gn's custom calls, read out of optimized HLO.

    python examples/hlo_layouts.py FILE...          # texts of jax.stages.Compiled.as_text()

A transpose or copy of a whole tensor at one of our calls would be a layout that the kernel was not
given. Some are not ours: on CPUs XLA transposes every input of a convolution for the gradient of
its weights, whoever made it. So the number in the whole program is given too: compare it with that
of the same model without our calls.
"""

import re
import sys
from pathlib import Path

MOVES = ("transpose", "copy", "copy-start")


def layout_changes(text: str) -> dict:
    """{"summary": in words, "at_calls": one line a change, "in_program": their number}."""
    opcode, operands, body, roots = {}, {}, {}, {}
    calls, home, computation = [], {}, ""
    for line in text.splitlines():
        if line.endswith("{") and " = " not in line:
            computation = line.replace("ENTRY ", "").split()[0].lstrip("%")
        found = re.match(r"\s*(ROOT )?%?([\w.-]+) = (.*)", line)
        call = found and re.search(r"(?:^|\s)([a-z][\w-]*)\(([^)]*)\)", found[3])
        if not call:
            continue
        name = found[2]
        opcode[name], operands[name] = call[1], re.findall(r"%([\w.-]+)", call[2])
        body[name] = (re.search(r"calls=%?([\w.-]+)", line) or [None, None])[1]
        home[name] = computation
        if found[1]:
            roots[computation] = call[1]
        if 'custom_call_target="jax_gn.' in line:
            calls.append(name)
    users: dict[str, list[str]] = {}
    for name, names in operands.items():
        for operand in names:
            users.setdefault(operand, []).append(name)

    def through(name: str, graph: dict) -> list[str]:
        """The neighbours, past operations that move nothing."""
        found = []
        for other in graph.get(name, []):
            views = opcode.get(other) in ("bitcast", "get-tuple-element")
            found += through(other, graph) if views else [other]
        return found

    def kind(name: str) -> str | None:
        """What an instruction does: of a fusion, its root."""
        return roots.get(body.get(name), opcode.get(name))

    at_calls = [
        f"{kind(other)} {other} {side} {call}"
        for call in calls
        for side, graph in (("feeds", operands), ("follows", users))
        for other in through(call, graph)
        if kind(other) in MOVES
    ]
    # Instructions inside fusions count once, through their fusion.
    fused = set(body.values())
    in_program = sum(kind(name) in MOVES for name in opcode if home[name] not in fused)
    sides = {side: sum(f" {side} " in line for line in at_calls) for side in ("feeds", "follows")}
    summary = (
        f"{len(calls)} calls of jax_gn; transposes and copies: {sides['feeds']} feed them, "
        f"{sides['follows']} follow them, {in_program} in the program"
    )
    return {"summary": summary, "at_calls": at_calls, "in_program": in_program}


if __name__ == "__main__":
    for file in sys.argv[1:]:
        found = layout_changes(Path(file).read_text())
        print(f"{file}: {found['summary']}", *found["at_calls"], sep="\n    ")
