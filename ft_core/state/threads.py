"""Work on memory by several threads: one core moves or hashes less than a socket's memory gives."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

THREADS = 4
"""At least, if this process has as many cores. More where an eighth of the cores is more: as a rule that is a
role's part of them, and all roles of a node may load at once."""


def each(count: int, do: Callable[[int], None]) -> None:
    """Call `do` with all numbers below `count`, by several threads, this one included.

    Whichever is free takes the next, so that none waits long for one that does not get to run. `do` must
    leave the interpreter's lock. Raises what it raised first; then the rest may be left out.
    """
    numbers, failures = iter(range(count)), list[BaseException]()
    lock = threading.Lock()

    def take() -> int | None:
        with lock:
            return None if failures else next(numbers, None)

    def work() -> None:
        try:
            while (number := take()) is not None:
                do(number)
        except BaseException as error:
            failures.append(error)

    cores = len(os.sched_getaffinity(0))
    helpers = min(max(THREADS, cores // 8), cores, count) - 1
    # The name is one of the engine's own: what these threads do is none of the script's operations.
    threads = [threading.Thread(target=work, name=f"ft-each-{n}", daemon=True) for n in range(helpers)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
