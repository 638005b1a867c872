"""A job's history as one page of HTML, which needs no other file and runs no script. All that comes from the
job is escaped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from html import escape

from ft_core.cli.durations import time_text
from ft_core.history.job import History, Recovery
from ft_core.protocol.goodput import Cause, in_words

POINTS = 2000
"""The most points of a curve, and strips of the time line."""
_WIDTH, _HEIGHT, _LEFT = 1000, 220, 60
COLORS = {
    Cause.PRODUCTIVE: "#2f9e6e",
    Cause.DEGRADED: "#a3b83b",
    Cause.SAVING: "#4f86d9",
    Cause.REDONE: "#dba02c",
    Cause.START_UP: "#8f9aa7",
    Cause.DETECTION: "#d0434f",
    Cause.DECISION: "#a55bc0",
    Cause.WAITING: "#6b4fcf",
    Cause.RESTORING: "#e2763a",
    Cause.UNKNOWN: "#c4c4c4",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6570; --line: #d6dbe1;
  --page: #fff; --card: #f5f7f9 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa4af; --line: #39414b; --page: #14181d; --card: #1d232a } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  max-width: 70rem; padding: 1.5rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
td.n, th.n { text-align: right } .soft { color: var(--soft) } .wide { overflow-x: auto }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; font-size: .85rem }
.figures { display: flex; flex-wrap: wrap; gap: 1rem } .figures div { background: var(--card);
  padding: .6rem 1rem; border-radius: .4rem } .figures b { display: block; font-size: 1.3rem }
.box { display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin-right: .4em }
svg { width: 100%; height: auto } svg text { fill: var(--soft); font-size: 12px }
svg .axis { stroke: var(--line) } svg .curve { fill: none; stroke: #4f86d9; stroke-width: 1.5 }
svg .mark { stroke: var(--ink); stroke-width: 1.5 }
"""


def page(found: History) -> str:
    """All of it."""
    sections = (_figures, _costs, _time_line, _steps, _recoveries, _longest, _nodes, _events)
    title = f"Report of {escape(found.directory)}"
    end = escape(found.end) or "it goes on, as far as is known"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>{when(found.began)} to {when(found.ended)}</p>
<pre>{end}</pre>
{"".join(section(found) for section in sections)}
</body>
</html>
"""


def when(at: float) -> str:
    """In the time zone of whoever reads."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _figures(found: History) -> str:
    whole = sum(found.seconds.values())
    done = [each.seconds for each in found.recoveries if each.seconds is not None]
    figures = {
        "of the time in steps that count": f"{100 * found.goodput:.1f} %",
        "in all": time_text(whole),
        "steps": f"{max((version for _, version in found.steps), default=0):,}",
        "recoveries": f"{len(found.recoveries):,}",
        "the longest of them": time_text(max(done)) if done else "-",
    }
    cards = "".join(f"<div><b>{value}</b>{escape(name)}</div>" for name, value in figures.items())
    return f'<div class="figures">{cards}</div>'


def _costs(found: History) -> str:
    whole = sum(found.seconds.values()) or 1.0
    shares = sorted(found.seconds.items(), key=lambda each: -each[1])
    bar, at = [], 0.0
    for cause, seconds in shares:
        wide = _WIDTH * seconds / whole
        bar.append(_strip(at, wide, 0, 28, cause, f"{_name(cause)}: {time_text(seconds)}"))
        at += wide
    rows = [
        (_cause(cause), time_text(seconds), f"{100 * seconds / whole:.2f} %")
        for cause, seconds in shares
        if seconds >= 0.05
    ]
    said = escape(in_words(found.seconds))
    drawn = f'<svg viewBox="0 0 {_WIDTH} 28" role="img" aria-label="{said}">{"".join(bar)}</svg>'
    return f"<h2>What the time went to</h2>{drawn}{_table(('', 'n:time', 'n:share'), rows)}"


def _time_line(found: History) -> str:
    x = _Axis(found.began, found.ended)
    kept = sorted(found.phases, key=lambda phase: -phase.seconds)[:POINTS]
    strips = [
        _strip(
            x(phase.began),
            max(x(phase.began + phase.seconds) - x(phase.began), 0.5 * (phase.cause is not Cause.PRODUCTIVE)),
            *(20, 60, phase.cause),
            f"{_name(phase.cause)}, {time_text(phase.seconds)}, epoch {phase.epoch}: {phase.reason}",
        )
        for phase in sorted(kept, key=lambda phase: phase.began)
    ]
    marks = [
        f'<line class="mark" x1="{x(each.began):.1f}" x2="{x(each.began):.1f}" y1="6" y2="20">'
        f"<title>{escape(each.reason)}</title></line>"
        for each in found.recoveries[-POINTS:]
    ]
    used = dict.fromkeys(phase.cause for phase in found.phases)
    legend = " ".join(f"<span>{_cause(cause)}</span>" for cause in used)
    drawn = f'<svg viewBox="0 0 {_WIDTH} 110" role="img" aria-label="time line">'
    return (
        f"<h2>Time line</h2>{drawn}{''.join([*strips, *marks])}{_ticks(found, 95)}</svg>"
        f'<p class="soft">{legend}. A line above: a failure.</p>'
    )


def _steps(found: History) -> str:
    points = found.steps[:: -(-len(found.steps) // POINTS) or 1]
    most = max((version for _, version in points), default=0)
    if most <= 0:
        return ""
    x = _Axis(found.began, found.ended)
    line = " ".join(
        f"{x(at):.1f},{_HEIGHT - 30 - (_HEIGHT - 50) * max(0, version) / most:.1f}" for at, version in points
    )
    return (
        f'<h2>Steps</h2><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="steps done over time">'
        f'<text x="{_LEFT - 8}" y="24" text-anchor="end">{most:,}</text>'
        f'<text x="{_LEFT - 8}" y="{_HEIGHT - 30}" text-anchor="end">0</text>'
        f'<polyline class="curve" points="{line}"/>{_ticks(found, _HEIGHT - 12)}</svg>'
    )


def _recoveries(found: History) -> str:
    if not found.recoveries:
        return "<h2>Recoveries</h2><p>None.</p>"
    rows = [_recovery(each) for each in found.recoveries]
    head = ("when", "what failed", "where", "n:epoch", "from", "n:took", "of which")
    return f"<h2>Recoveries</h2>{_table(head, rows)}"


def _recovery(each: Recovery) -> tuple[str, ...]:
    line, _, rest = each.reason.partition("\n")
    reason = escape(line)
    if rest or len(line) > 100:
        reason = f"<details><summary>{escape(line[:100])}</summary><pre>{escape(each.reason)}</pre></details>"
    moved = ", ".join(f"role {role} to {node}" for role, node in list(each.moved.items())[:8])
    version = f", step {each.version}" if each.version is not None else ""
    parts = "<br>".join(f"{_cause(c)} {time_text(seconds)}" for c, seconds in each.parts.items())
    return (
        when(each.began),
        f"{reason}<div class='soft'>{escape(each.fault)}</div>",
        f"{escape(each.node)}<div class='soft'>{escape(moved)}</div>",
        str(each.epoch),
        escape(f"{each.origin}{version}"),
        "not done" if each.seconds is None else time_text(each.seconds),
        parts,
    )


def _longest(found: History) -> str:
    rows = [
        (
            _cause(p.cause),
            time_text(p.seconds),
            when(p.began),
            str(p.epoch),
            escape(p.reason[:200]),
        )
        for p in found.longest
    ]
    head = ("", "n:time", "from", "n:epoch", "since")
    return f"<h2>The longest times without progress</h2>{_table(head, rows)}" if rows else ""


def _nodes(found: History) -> str:
    rows = [
        (
            escape(node),
            str(kinds.total()),
            escape(", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))),
            escape(found.avoided.get(node, "")),
        )
        for node, kinds in found.by_node
    ]
    return f"<h2>Failures by node</h2>{_table(('node', 'n:failures', 'of', 'avoided'), rows)}" if rows else ""


def _events(found: History) -> str:
    counts = ", ".join(f"{escape(name)} {count:,}" for name, count in sorted(found.counts.items()))
    rows = [
        (
            when(event["time"]),
            str(event["epoch"]),
            escape(event["event"]),
            f"<pre>{escape(event['reason'])}</pre>",
        )
        for event in found.told
    ]
    head = ("when", "n:epoch", "event", "")
    return f"<h2>Events</h2><p>{counts}</p>{_table(head, rows)}"


# -- parts of the page -------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of HTML. A column whose name begins with `n:` has numbers."""
    kinds = [' class="n"' * name.startswith("n:") for name in head]
    names = "".join(
        f"<th{k}>{escape(name.removeprefix('n:'))}</th>" for k, name in zip(kinds, head, strict=True)
    )
    lines = [
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>"
        for row in rows
    ]
    return f'<div class="wide"><table><tr>{names}</tr>{"".join(lines)}</table></div>'


def _strip(x: float, wide: float, y: float, high: float, cause: Cause, said: str) -> str:
    shape = f'x="{x:.2f}" y="{y}" width="{max(0.0, wide):.2f}" height="{high}"'
    return f'<rect {shape} fill="{COLORS[cause]}"><title>{escape(said)}</title></rect>'


class _Axis:
    """From times to the plots' width."""

    def __init__(self, began: float, ended: float) -> None:
        self._began, self._long = began, max(1e-3, ended - began)

    def __call__(self, at: float) -> float:
        share = min(1.0, max(0.0, (at - self._began) / self._long))
        return _LEFT + (_WIDTH - _LEFT - 10) * share


def _ticks(found: History, y: float) -> str:
    """Times since the job began."""
    long = max(1e-3, found.ended - found.began)
    each = _round(long / 6)
    x = _Axis(found.began, found.ended)
    ticks = [number * each for number in range(int(long / each) + 1)]
    return "".join(
        f'<text x="{x(found.began + at):.1f}" y="{y}" text-anchor="middle">{time_text(at)}</text>'
        for at in ticks
    )


def _round(seconds: float) -> float:
    """A number of seconds that people count by, not below this one if there is one."""
    for each in (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400):
        if each >= seconds:
            return each
    return 86400.0 * math.ceil(seconds / 86400)


def _cause(cause: Cause) -> str:
    return f'<span class="box" style="background:{COLORS[cause]}"></span>{_name(cause)}'


def _name(cause: Cause) -> str:
    return cause.replace("_", "-")
