"""Durations, for people."""

from __future__ import annotations

_UNITS = ((365 * 86400.0, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min"))


def time_text(seconds: float) -> str:
    """Say a duration in the unit that makes it readable."""
    for unit, name in _UNITS:
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.3g} {name}" if seconds < 1e6 * unit else f"over 1e6 {name}"
    return f"{seconds:.3g} s"
