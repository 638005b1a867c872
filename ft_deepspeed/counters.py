"""What a step leaves in the engine's attributes, for a newcomer's script, which may read them.

Most of it follows from the step's being done. What does not (a step that was skipped, a loss scale that has
changed) is on record.
"""

from __future__ import annotations

from typing import Any

_ENGINE = (
    "global_steps",
    "global_samples",
    "micro_steps",
    "skipped_steps",
    "gas_boundary_ctr",
    "_step_applied",
)
_WRAPPER = ("overflow", "cur_scale", "cur_iter", "last_overflow_iter")
_SCALER = (*_WRAPPER, "cur_hysteresis")
_SCALERS = ("loss_scaler", "loss_scale_config")

Numbers = dict[str, Any]


def read(engine: Any) -> Numbers:
    """Numbers, by where they are."""
    found: Numbers = {}
    for place, part, names in _parts(engine):
        for name in names:
            value = vars(part).get(name)
            if isinstance(value, (bool, int, float)):
                found[f"{place}.{name}"] = value
    return found


def expected(before: Numbers, engine: Any, ends: bool) -> Numbers:
    """After a call of `step` that nothing special happens in. `ends`: it is at the end of accumulation."""
    after = dict(before)
    for name, more in (
        ("engine.micro_steps", 1),
        ("engine.global_steps", ends),
        ("engine.global_samples", engine.train_batch_size() if ends else 0),
        ("loss_scaler.cur_iter", ends),
    ):
        if name in after:
            after[name] += int(more)
    if "engine._step_applied" in after:
        after["engine._step_applied"] = ends
    return after


def other(expected: Numbers, found: Numbers) -> Numbers:
    """What is not as expected."""
    return {name: value for name, value in found.items() if expected.get(name) != value}


def write(engine: Any, numbers: Numbers) -> None:
    """Put them where they belong, in the types that are there."""
    for place, part, names in _parts(engine):
        for name in names:
            if (value := numbers.get(f"{place}.{name}")) is not None:
                here = vars(part).get(name)
                setattr(part, name, type(here)(value) if isinstance(here, (bool, int, float)) else value)


def _parts(engine: Any) -> list[tuple[str, Any, tuple[str, ...]]]:
    parts = [("engine", engine, _ENGINE), ("wrapper", engine.optimizer, _WRAPPER)]
    for name in _SCALERS:
        for owner in (engine.optimizer, engine):
            if (part := vars(owner).get(name)) is not None and hasattr(part, "__dict__"):
                parts.append((name, part, _SCALER))
                break
    return parts
