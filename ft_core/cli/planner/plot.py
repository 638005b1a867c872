"""A drawing of what `ftctl plan` expects: the productive share of time, by how often something fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from ft_core.cli.durations import time_text
from ft_core.cli.planner.worth import Point

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 360, 60, 30, 40, 50
_TICKS = (600.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0, 30 * 86400.0)
"""Seconds between failures that have a line."""


def svg(points: Sequence[Point], here: float) -> str:
    """A picture that needs no other file. `points`: in order; `here`: seconds between failures of the job."""
    low, high = math.log(points[0].between), math.log(points[-1].between)

    def x(seconds: float) -> float:
        return _LEFT + (math.log(seconds) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(share: float) -> float:
        return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)

    def curve(colour: str, share: Callable[[Point], float]) -> str:
        line = " ".join(f"{x(each.between):.1f},{y(share(each)):.1f}" for each in points)
        return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'

    def text(at: float, down: float, said: str, anchor: str = "middle", colour: str = "#444") -> str:
        return (
            f'<text x="{at:.1f}" y="{down:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(said)}</text>'
        )

    def line(x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ccc" {more}/>'

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="productive share of time by time between failures">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for fifth in range(6):
        share = fifth / 5
        drawn += [
            line(_LEFT, y(share), right, y(share)),
            text(_LEFT - 6, y(share) + 4, f"{share:.0%}", "end"),
        ]
    for tick in _TICKS:
        if points[0].between <= tick <= points[-1].between:
            drawn += [line(x(tick), _TOP, x(tick), bottom), text(x(tick), bottom + 16, time_text(tick))]
    if points[0].between <= here <= points[-1].between:
        drawn.append(line(x(here), _TOP, x(here), bottom, 'stroke-dasharray="4" style="stroke:#444"'))
        drawn.append(text(x(here), _TOP - 6, f"this job: {time_text(here)}"))
    drawn += [
        curve("#2a9d4e", lambda each: each.expected),
        curve("#c0392b", lambda each: each.restarted),
        text(right, y(0.12), "from memory", "end", "#2a9d4e"),
        text(right, y(0.04), "restarted from checkpoints", "end", "#c0392b"),
        text((_LEFT + right) / 2, _HEIGHT - 12, "time between two failures of the job"),
        "</svg>\n",
    ]
    return "\n".join(drawn)
