"""For what a role waits that holds others up: what is made of what an agent sees, and what it sees of real
processes, those that hang among them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
from harness import ROOT
from waiting import wait_for_value

from benchmarks.hangs_how import HANGS
from ft_core.control.liveness.hangs.waiting import waits_for
from ft_core.node.workers.flight import look
from ft_core.process import stacks
from ft_core.process.doing import Doing, Seen, below, look_at
from ft_core.process.stacks import Frame
from ft_core.protocol.flight import Look

TORCH = "/venv/lib/python3.11/site-packages/torch"
PIPE = Frame("/usr/lib/python3.11/multiprocessing/connection.py", "wait")
LOADER = (PIPE, Frame(f"{TORCH}/utils/data/dataloader.py", "_try_get_data"), Frame("/job/train.py", "main"))
READS = (Frame("/job/data.py", "__getitem__"), Frame(f"{TORCH}/utils/data/_utils/fetch.py", "fetch"))
SAVES = Frame(f"{TORCH}/serialization.py", "_save")
SCRIPT = (Frame("/mnt/datasets/job/train.py", "main"),)
BUILDS = (
    Frame("/usr/lib/python3.11/subprocess.py", "communicate"),
    Frame(f"{TORCH}/utils/cpp_extension.py", "_run_ninja_build"),
)
TRITON = (Frame("/venv/lib/python3.11/site-packages/triton/compiler/compiler.py", "make_llir"), *SCRIPT)
POOL = (
    Frame("/usr/lib/python3.11/threading.py", "wait"),
    Frame("/x/multiprocessing/pool.py", "get"),
    *SCRIPT,
)


def main(doing: Doing, what: str = "") -> Seen:
    return Seen(10, "python", doing, what)


def child(doing: Doing, what: str = "", name: str = "pt_data_worker") -> Seen:
    return Seen(11, name, doing, what)


@pytest.mark.parametrize(
    ("seen", "what", "said"),
    [
        (Look(main("local"), LOADER, (child("sleep"),)), "data", "its process 11 (pt_data_worker) sleeps"),
        (Look(main("local"), LOADER, (child("local"), child("runs"))), "data", "computes"),
        (Look(main("lock"), LOADER, (child("network", "10.0.0.3:443"),)), "data", "network, 10.0.0.3:443"),
        (Look(main("sleep"), READS), "data", "its loader sleeps"),
        (Look(main("local"), READS, (child("local", name="sh"), child("network", name="curl"))),
         "data", "curl"),
        (Look(main("lock"), (Frame("/x/site-packages/fsspec/asyn.py", "sync"), *READS)), "data", "lock"),
        (Look(main("file", "/mnt/shared/part-7")), "storage", "it waits for a file, /mnt/shared/part-7"),
        (Look(main("network", "10.0.0.3:443")), "storage", "10.0.0.3:443"),
        (Look(main("sleep"), (Frame("/job/store.py", "write"), SAVES)), "storage", "it sleeps"),
        (Look(main("local"), BUILDS, (child("local", name="ninja"),)), "a compiler", "(ninja)"),
        (Look(main("runs"), TRITON), "a compiler", "make_llir"),
        (Look(main("process"), (), (child("runs", name="cc1plus"),)), "a compiler", "cc1plus"),
        (Look(main("sleep"), BUILDS[1:]), "a compiler", "_run_ninja_build"),
        (Look(main("lock"), POOL, (child("runs", name="python"),)), "a process", "computes"),
        (Look(main("process"), (), (child("network", name="aws"),)), "a process", "aws"),
    ],
)  # fmt: skip
def test_it_waits(seen: Look, what: str, said: str) -> None:
    wait = waits_for(seen)
    assert wait is not None and wait.what == what and said in wait.words


@pytest.mark.parametrize(
    "seen",
    [
        Look(main("local"), LOADER, (child("stopped"),)),
        Look(main("local"), LOADER, (child("sleep"), child("stopped"))),
        Look(main("local"), LOADER, (child("ended"),)),
        Look(main("local"), LOADER, (child("local"),)),
        Look(main("local"), LOADER, (child("lock"),)),
        Look(main("local"), LOADER),
        Look(main("runs"), READS),
        Look(main("lock"), READS),
        Look(main("stopped"), ()),
        Look(main("runs"), (SAVES,)),
        Look(main("lock"), (SAVES,)),
        Look(main("runs"), SCRIPT, (child("sleep"),)),
        Look(main("lock"), SCRIPT, (child("network", name="wandb-core"),)),
        Look(main("sleep"), SCRIPT, (child("sleep"),)),
        Look(main("local"), SCRIPT),
        Look(main("process"), (), (child("stopped", name="nvcc"),)),
        Look(main("lock"), POOL, (child("local", name="python"),)),
        Look(main("unknown")),
    ],
)
def test_it_hangs(seen: Look) -> None:
    """Or it does something of which nothing is known that would excuse it."""
    assert waits_for(seen) is None


# -- real processes --------------------------------------------------------------------------------

BEGIN = """
import os, sys, time, socket, subprocess
from pathlib import Path
from typing import get_args
from ft_core.process import stacks
stacks.register(Path(sys.argv[1]))
import torch
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self): return 100
    def __getitem__(self, i):
        if i > 4:
            os.write(1, b"there\\n")  # at once, as two processes say it: unbuffered, print writes twice
            time.sleep(600) if sys.argv[3] == "sleeps" else compute()
        return i

def compute():
    while True: pass

def train(workers):
    for _ in DataLoader(Samples(), num_workers=workers, persistent_workers=workers > 0): pass

def loader(): train(2)
def in_process(): train(0)
def storage():
    print("there", flush=True)
    open(sys.argv[3]).read()
def network():
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[3])))
    connection.settimeout(600)
    print("there", flush=True)
    connection.recv(1)
def compiler():
    subprocess.run(["sh", "-c", "echo there; " + sys.argv[3] + " 600; true"])

def hang():
    from benchmarks.hangs_how import HANGS
    print("there", flush=True)
    HANGS[sys.argv[3]]()
    assert False, "it came back"

globals()[sys.argv[2]]()
"""


@contextmanager
def worker(tmp_path: Path, kind: str, how: str) -> Iterator[int]:
    """A process that is about to wait, or to hang, so."""
    command = [sys.executable, "-c", BEGIN, str(tmp_path), kind, how]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def seen_waiting(pid: int, tmp_path: Path, what: str) -> str:
    """How that shows, once it does."""
    words = ""

    def shows() -> bool:
        nonlocal words
        seen = look(pid, tmp_path)
        wait = waits_for(seen) if seen is not None else None
        words = wait.words if wait is not None and wait.what == what else ""
        return bool(words)

    wait_for_value(shows, True)
    return words


@pytest.mark.parametrize(("how", "said"), [("sleeps", "sleeps"), ("computes", "computes")])
def test_a_loader_with_processes(how: str, said: str, tmp_path: Path) -> None:
    """Until one of these is stopped."""
    with worker(tmp_path, "loader", how) as pid:
        assert said in seen_waiting(pid, tmp_path, "data")
        loaders = [each.pid for each in below(pid) if each.name != "sh"]
        os.kill(loaders[0], signal.SIGSTOP)
        wait_for_value(lambda: look_at(loaders[0]).doing, "stopped")
        seen = look(pid, tmp_path)
        assert seen is not None and waits_for(seen) is None


def test_a_loader_without_any(tmp_path: Path) -> None:
    with worker(tmp_path, "in_process", "sleeps") as pid:
        assert "its loader sleeps" in seen_waiting(pid, tmp_path, "data")


def test_storage_that_does_not_answer(tmp_path: Path) -> None:
    """A file that somebody has yet to write stands in for it."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with worker(tmp_path, "storage", str(path)) as pid:
        assert str(path) in seen_waiting(pid, tmp_path, "storage"), "as it is opened"
        writer = os.open(path, os.O_WRONLY)
        wait_for_value(lambda: look_at(pid).what, str(path))
        assert look_at(pid).doing == "file"
        assert str(path) in seen_waiting(pid, tmp_path, "storage"), "as it is read"
        os.close(writer)


def test_a_machine_that_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with worker(tmp_path, "network", str(port)) as pid:
            assert f"127.0.0.1:{port}" in seen_waiting(pid, tmp_path, "storage")


def test_a_compiler(tmp_path: Path) -> None:
    name = tmp_path / "ptxas"
    shutil.copy(shutil.which("sleep") or "", name)
    with worker(tmp_path, "compiler", str(name)) as pid:
        assert "(ptxas)" in seen_waiting(pid, tmp_path, "a compiler")


SETTLED: dict[str, Doing] = {
    "stop": "stopped", "spin": "runs", "lock": "sleep", "regex": "runs", "deadlock": "lock",
    "loader": "local", "storage": "local",
}  # fmt: skip


@pytest.mark.parametrize("kind", HANGS)
def test_what_hangs_is_not_seen_waiting(kind: str, tmp_path: Path) -> None:
    with worker(tmp_path, "hang", kind) as pid:
        wait_for_value(lambda: look_at(pid).doing, SETTLED[kind])
        if kind == "loader":
            wait_for_value(lambda: any(each.doing == "stopped" for each in below(pid)), True)

        def looked() -> Look:
            seen = look(pid, tmp_path)
            assert seen is not None and waits_for(seen) is None, seen
            return seen

        # The kernel alone does not say it; what waits for a lock may yet be on its way there.
        wait_for_value(lambda: bool(looked().stack), kind != "stop")


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen(["true"])
    wait_for_value(lambda: look_at(process.pid).doing, "ended")
    process.wait()
    assert look_at(process.pid).doing == "ended" and below(process.pid) == []
    assert look(None, None) is None and "ended" in get_args(Doing)


def test_frames_of_a_stack() -> None:
    lines = (
        "Current thread 0x1 (most recent call first):",
        '  File "/a b/c.py", line 3 in f',
        '  File "d", line 4 in g',
    )
    text = "\n".join(lines)
    assert stacks.frames(text) == [Frame("/a b/c.py", "f"), Frame("d", "g")]
    assert stacks.frames("") == []
