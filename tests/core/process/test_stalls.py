from __future__ import annotations

import threading
from pathlib import Path

from waiting import wait_for_value

from ft_core.process.stalls import Stalls


def test_what_holds_a_loop_up_is_written_down_while_other_threads_are_busy(tmp_path: Path) -> None:
    path, over = tmp_path / "stalls.txt", threading.Event()

    def depth(n: int) -> int:
        return n and depth(n - 1) + 1

    def busy() -> None:
        while not over.is_set():
            sum(depth(i % 30) for i in range(50))

    def written() -> bool:
        return path.exists() and "in test_what_holds_a_loop_up" in path.read_text()

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            stalls = Stalls(path, 0.01)
            stalls.beat()
            wait_for_value(written, True)
            path.unlink()
            stalls.close()
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_nothing_is_written_while_it_goes_on(tmp_path: Path) -> None:
    stalls = Stalls(tmp_path / "stalls.txt", 60)
    for _ in range(100):
        stalls.beat()
    stalls.close()
    assert not (tmp_path / "stalls.txt").exists()
