"""Writes what was measured into docs/gpu.md: `python -m benchmarks.gpu.page`, after a run on a device."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.common import RESULTS, ROOT

PAGE, RESULT = ROOT / "docs" / "gpu.md", RESULTS / "gpu.json"
BEGIN, END = "<!-- measured: written by benchmarks.gpu.page -->", "<!-- end of what was measured -->"


def section(result: Path) -> str:
    """What is between the two marks."""
    if not result.exists():
        return "Nothing yet: there was no device."
    found = json.loads(result.read_text())
    device, machine = found["device"], found["machine"]
    software = f"torch {machine['torch']}, CUDA {device['cuda']}, NCCL {device['nccl']}"
    about = (
        f"{device['name']} ({device['memory_gib']} GiB), {machine['cores']} cores, {software}, "
        f"{found['date'][:10]}, commit {found['commit']}: `{found['command']}`"
    )
    lines = ["| row | check | result | figure |", "|---|---|---|---|"]
    for check in found["checks"]:
        cells = [check[key].replace("|", "/") for key in ("row", "check", "result", "figure")]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join([about, "", *lines])


def written(page: str, result: Path) -> str:
    """The page with the section in it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section(result)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), RESULT))
