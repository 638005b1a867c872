"""Where a script says `float(...)`, which returns a plain number whatever it is made of: it can be given
another there.

No class of Python's own can be changed, but a module can have its own `float`. One that uses the name for
anything but a call (a type of an array, `isinstance`) is left as it is.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_NAME = "float"


@contextmanager
def replaced(spaces: Iterable[dict[str, Any]], function: Callable[..., Any]) -> Iterator[None]:
    """Have modules, of which these are the variables, call `function` instead."""
    found = [space for space in spaces if _NAME not in space and "__name__" in space]
    uses: dict[int, list[bool]] = {id(space): [] for space in found}
    for each in gc.get_objects():
        if type(each) is types.FunctionType and id(each.__globals__) in uses:
            uses[id(each.__globals__)] += (called for _, called in _uses(each.__code__))
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if id(frame.f_globals) in uses and frame.f_code.co_name == "<module>":
            begins = _loop(frame)
            uses[id(frame.f_globals)] += (
                called for offset, called in _uses(frame.f_code) if offset >= begins
            )
        frame = frame.f_back
    chosen = [space for space in found if uses[id(space)] and all(uses[id(space)])]
    made = _Float(function)
    for space in chosen:
        space[_NAME] = made
    try:
        yield
    finally:
        for space in chosen:
            if space.get(_NAME) is made:
                del space[_NAME]


class _Float:
    """Stands for the class, also where a function of the script's is pickled with what it refers to."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> Any:
        return type, (0.0,)


def _uses(code: types.CodeType) -> Iterator[tuple[int, bool]]:
    """Where the name is used, and whether to call it."""
    if _NAME in code.co_names:
        found = list(dis.get_instructions(code))
        for at, each in enumerate(found):
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval == _NAME:
                beside = [other.opname for other in found[max(0, at - 1) : at + 2]]
                by_itself = each.opname == "LOAD_GLOBAL" and bool((each.arg or 0) & 1)
                yield each.offset, by_itself or "PUSH_NULL" in beside
    for part in code.co_consts:
        if isinstance(part, types.CodeType) and part.co_flags & inspect.CO_OPTIMIZED:
            yield from ((-1, called) for _, called in _uses(part))


def _loop(frame: types.FrameType) -> int:
    """Where the outermost loop begins in which a module's own code is, or the place itself."""
    jumps = (each for each in dis.get_instructions(frame.f_code) if each.opname.startswith("JUMP_BACKWARD"))
    around = (each.argval for each in jumps if each.argval <= frame.f_lasti <= each.offset)
    return min([frame.f_lasti, *around])
