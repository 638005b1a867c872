"""The layer in which a newcomer's script does to files what was done before."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.overlay.handover import Place, appended_to, begun_anew

_BEGIN = """
import os, sys
from pathlib import Path
from ft_core.overlay import Overlay

def refuse(what):
    print("refused:", what, flush=True)
    os._exit(9)

overlay = Overlay()
def begin():
    overlay.begin(Path("job"), Path(os.environ.get("UPPER", "/tmp")), refuse)
"""


def run(at: Path, script: str, code: int = 0) -> str:
    """As a newcomer's, which has `begin()` and `overlay`."""
    text = _BEGIN + textwrap.dedent(script)
    found = subprocess.run([sys.executable, "-c", text], cwd=at, capture_output=True, text=True)
    assert found.returncode == code, found.stdout + found.stderr
    return found.stdout


def picture(at: Path) -> dict[str, Any]:
    """All that is there, with content and times."""
    found: dict[str, Any] = {}
    for directory, below, files in os.walk(at):
        for name in below + files:
            path = Path(directory, name)
            seen = path.lstat()
            content = os.readlink(path).encode() if path.is_symlink() else b""
            content = path.read_bytes() if name in files and not content else content
            found[str(path.relative_to(at))] = seen.st_mode, seen.st_mtime_ns, seen.st_ino, content
    return found


def test_what_is_passed_over_changes_nothing(tmp_path: Path) -> None:
    for name in ("a", "best", "log", "kept/1", "kept/2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    os.symlink("a", tmp_path / "link")
    before = picture(tmp_path)
    said = run(
        tmp_path,
        """
        import io, logging, pickle, shutil, tempfile
        import numpy as np, torch
        from os import remove, replace
        import _io, posix
        begin()
        log = open("log", "w")
        overlay.passes()
        log.write("anew")
        open("a", "w").write("other"), open("new", "x").write("new")
        with open("weights", "wb") as file: pickle.dump([1], file)
        torch.save(torch.ones(3), "a.tmp"), replace("a.tmp", "best")
        assert torch.load("best").sum() == 3
        np.savez("z.npz", a=np.ones(2)), np.ones(2).tofile("raw"), np.save("n", np.ones(1))
        assert sorted(np.load("z.npz")) == ["a"] and np.fromfile("raw").sum() == 2 and np.load("n.npy") == 1
        shutil.copyfile("best", "last"), shutil.copytree("kept", "kept2"), shutil.move("kept2", "kept3")
        assert sorted(os.listdir("kept3")) == ["1", "2"] and Path("kept3/1").read_text() == "kept/1\\n"
        shutil.rmtree("kept"), os.makedirs("kept/deep", exist_ok=True)
        assert os.listdir("kept") == ["deep"], os.listdir("kept")
        Path("link").unlink(), os.symlink("best", "link"), os.link("best", "hard")
        assert Path("link").resolve().name == "best" and torch.load("link").sum() == 3
        remove("a")
        assert not os.path.exists("a") and "a" not in os.listdir()
        posix.rename("new", "newer"), posix.rename("newer", "new"), _io.open("lower", "w").close()
        posix.remove("lower")
        os.chmod("best", 0o600), os.utime("log", (1, 1)), os.truncate("log", 0)
        fd = os.open("raw", os.O_WRONLY | os.O_APPEND); os.write(fd, b"more"); os.close(fd)
        assert os.path.getsize("raw") == 20
        handler = logging.FileHandler("log2"); logging.getLogger().addHandler(handler); logging.error("line")
        assert [e.name for e in os.scandir() if e.is_dir()] == ["kept", "kept3"]
        print(sorted(p.name for p in Path().glob("*")))
        """,
    )
    assert picture(tmp_path) == before
    names = "best hard kept kept3 last link log log2 n.npy new raw weights z.npz"
    assert said.strip() == str(names.split())


def test_what_was_made_before_is_made_again_and_what_is_gone_is_removed_again(tmp_path: Path) -> None:
    (tmp_path / "out/extra").mkdir(parents=True)
    (tmp_path / "out/extra/file").write_text("real")
    (tmp_path / "mark").write_text("real")
    before = picture(tmp_path)
    run(
        tmp_path,
        """
        import shutil
        begin()
        overlay.passes()
        os.mkdir("out/extra"), open("mark", "x").close(), os.symlink("x", "out/file")
        for again in (lambda: os.mkdir("out/extra"), lambda: open("mark", "x")):
            try:
                again()
                raise SystemExit("made twice")
            except FileExistsError:
                pass
        os.remove("step-1.pt"), shutil.rmtree("step-2"), os.replace("x.tmp", "x"), Path("step-3").unlink()
        os.makedirs("out", exist_ok=True)
        assert open("out/extra/file").read() == "real"
        """,
    )
    assert picture(tmp_path) == before


def test_in_start_up_what_is_new_is_real(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("real")
    run(
        tmp_path,
        """
        begin()
        os.makedirs("cache/deep")
        open("cache/deep/file", "w").write("cached")
        os.replace("cache/deep/file", "cache/file")
        open("old", "w").write("anew"), open("lock", "x").close(), os.remove("lock")
        assert open("old").read() == "anew"
        import subprocess
        assert subprocess.check_output(["cat", "old", "cache/file"], text=True) == "realcached"
        """,
    )
    found = {name: content for name, (*_, content) in picture(tmp_path).items()}
    assert found == {"old": b"real", "cache": b"", "cache/deep": b"", "cache/file": b"cached"}


def test_files_that_are_open_go_on(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("one\ntwo\nthr")
    (tmp_path / "a").write_text("of another run\none\ntwo\n")
    (tmp_path / "clock").write_text("12:01 one\n12:02 two\n")
    run(
        tmp_path,
        """
        import logging
        begin()
        w, a, clock = open("w", "w"), open("a", "a", buffering=1 << 20), open("clock", "w")
        fd = os.open("w", os.O_WRONLY)
        overlay.passes()
        for line in ("one", "two", "three"):
            print(line, file=w), print(line, file=a), print("13:00", line, file=clock)
        own = open("named.13:00", "w")
        own.write("own\\n")
        overlay.end(whole=True)
        for file in (w, a, clock, own):
            print("four", file=file)
        w.flush()
        assert os.lseek(fd, 0, os.SEEK_END) == len("one\\ntwo\\nthree\\nfour\\n")
        """,
    )
    found = {name: content.decode() for name, (*_, content) in picture(tmp_path).items()}
    assert found == {
        "w": "one\ntwo\nthree\nfour\n",
        "a": "of another run\none\ntwo\nthree\nfour\n",
        "clock": "12:01 one\n12:02 two\nfour\n",
        "named.13:00": "own\nfour\n",
    }


@pytest.mark.parametrize("flushed", [0, 3, 6, 9])
def test_files_that_are_open_where_a_script_goes_on_at_a_later_step(flushed: int, tmp_path: Path) -> None:
    """Nothing of what was written in the steps between is cut off, and what comes after is there once."""
    later = "three\nfour\n"
    (tmp_path / "w").write_text("head\none\ntwo\n" + later[:flushed])
    (tmp_path / "a").write_text("of another run\nhead\none\ntwo\n" + later[:flushed])
    run(
        tmp_path,
        """
        begin()
        w, a, new = open("w", "w"), open("a", "a", buffering=1 << 20), open("new", "w")
        print("head", file=w), print("head", file=a), print("head", file=new)
        overlay.passes()
        overlay.jumps()
        open("passed", "w").write("harm")
        overlay.arrives()
        for line in ("three", "four"):
            print(line, file=w), print(line, file=a)
        overlay.end()
        for file in (w, a, new):
            print("five", file=file)
        """,
    )
    found = {name: content.decode() for name, (*_, content) in picture(tmp_path).items()}
    assert found == {
        "w": "head\none\ntwo\nthree\nfour\nfive\n",
        "a": "of another run\nhead\none\ntwo\nthree\nfour\nfive\n",
        "new": "head\nfive\n",
    }


_STRETCH = """
        import shutil, subprocess
        log = open("log", "w")
        overlay.passes()
        open("passed", "w").write("harm"), log.write("1\\n")
        overlay.arrives()
        log.write("2\\n")
        open("new", "x").write("new"), os.mkdir("made"), open("made/file", "w").write("made")
        open("tmp", "w").write("best"), os.replace("tmp", "best"), os.remove("old"), shutil.rmtree("tree")
        open("history", "a").write("line 2\\n"), os.symlink("best", "link"), os.rename("moved", "there")
        assert open("best").read() == "best" and not os.path.exists("old") and os.path.exists("there/part")
"""


@pytest.mark.parametrize("done", range(12))
def test_what_may_have_been_done_before_is_done_once(tmp_path: Path, done: int) -> None:
    """`done`: how much of it the worker that was lost had done."""
    for name in ("tree/a", "moved/part"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    for name, text in (("old", "old"), ("best", "before"), ("history", "line 1\n"), ("log", "1\n")):
        (tmp_path / name).write_text(text)
    acts: list[Callable[[], Any]] = [
        lambda: (tmp_path / "log").write_text("1\n2\n"),
        lambda: (tmp_path / "new").write_text("ne"),
        lambda: (tmp_path / "new").write_text("new"),
        lambda: (tmp_path / "made").mkdir(),
        lambda: (tmp_path / "made/file").write_text("made"),
        lambda: (tmp_path / "best").write_text("best"),
        lambda: (tmp_path / "old").unlink(),
        lambda: shutil.rmtree(tmp_path / "tree"),
        lambda: (tmp_path / "history").write_text("line 1\nline 2\n"),
        lambda: (tmp_path / "link").symlink_to("best"),
        lambda: (tmp_path / "moved").rename(tmp_path / "there"),
        lambda: (tmp_path / "log").write_text("1\n2\n3\n"),  # after its next pass has begun
    ]
    for act in acts[: done + 1]:
        act()
    run(tmp_path, f"begin()\n{textwrap.dedent(_STRETCH)}\noverlay.end(whole=True); log.write('3\\n')")
    found = {name: content.decode() for name, (*_, content) in picture(tmp_path).items()}
    assert found == {
        "log": "1\n2\n3\n",
        "new": "new",
        "made": "",
        "made/file": "made",
        "best": "best",
        "history": "line 1\nline 2\n",
        "link": "best",
        "there": "",
        "there/part": "moved/part",
    }


_CHECKPOINT = {
    "begun anew": (
        'if rank == 0: shutil.rmtree("best", ignore_errors=True); os.makedirs("best")',
        'open(f"best/rank{rank}", "w").write(content)',
    ),
    "moved as a whole": (
        'os.makedirs("tmp", exist_ok=True); open(f"tmp/rank{rank}", "w").write(content)',
        'if rank == 0: os.rename("tmp", "new")',
    ),
    "moved over an old one": (
        'os.makedirs("tmp", exist_ok=True); open(f"tmp/rank{rank}", "w").write(content)',
        'if rank == 0: shutil.rmtree("best"); os.rename("tmp", "best")',
    ),
    "one more, and the oldest goes": (
        'if rank == 0 and len(os.listdir("kept")) > 2: shutil.rmtree(f"kept/{min(os.listdir(\'kept\'))}")',
        'os.makedirs("kept/4", exist_ok=True); open(f"kept/4/rank{rank}", "w").write(content)',
    ),
}


@pytest.mark.parametrize("barrier", ["on record", "made"])
@pytest.mark.parametrize("way", _CHECKPOINT)
def test_a_checkpoint_that_all_have_written_stays_as_it_is(way: str, barrier: str, tmp_path: Path) -> None:
    """Two ranks write it between two steps, then the first one dies. Where the `barrier` between is not on
    record, what it has written tells that it had been further."""
    if barrier == "made" and way == "moved over an old one":
        pytest.skip("the others would have waited for it there: then nothing was done")
    for name in ("best", *(f"kept/{number}" for number in range(1, 4))):
        (tmp_path / name).mkdir(parents=True)
        for rank in range(2):
            (tmp_path / name / f"rank{rank}").write_text("old")
    before, after = _CHECKPOINT[way]
    done = "import os, shutil\n" + "".join(
        f"for rank in range(2):\n    content = str(rank)\n    {part}\n" for part in (before, after)
    )
    subprocess.run([sys.executable, "-c", done], cwd=tmp_path, check=True)
    expected = picture(tmp_path)
    again = f"""
        import shutil
        begin()
        overlay.passes()
        overlay.arrives()
        rank, content = 0, "0"
        {before}
        {"overlay.was_done()" if barrier == "on record" else ""}
        {after}
        overlay.end()
        """
    run(tmp_path, again)
    assert picture(tmp_path) == expected


def test_what_passed_steps_write_is_not_there_even_in_directories_of_the_newcomers_own(
    tmp_path: Path,
) -> None:
    """By the clock, say: what would be saved there is of another step than its name says."""
    run(
        tmp_path,
        """
        import tempfile
        begin()
        os.makedirs("run-12:01"), open("run-12:01/config", "w").write("start-up")
        open("run-12:01/lock", "w").close()
        scratch = tempfile.mkdtemp()
        events = open("run-12:01/events", "w")
        overlay.passes()
        log = open("run-12:01/log", "w")
        os.remove("run-12:01/lock")
        for step in range(1, 4):
            os.makedirs("run-12:01/models", exist_ok=True)
            with open("run-12:01/models/tmp", "w") as file: file.write("wrong")
            os.rename("run-12:01/models/tmp", f"run-12:01/models/{step}")
            assert open(f"run-12:01/models/{step}").read() == "wrong"
            open("run-12:01/best", "w").write("wrong"), open(f"{scratch}/{step}", "w").write("part")
        overlay.arrives()
        assert sorted(os.listdir("run-12:01")) == ["best", "config", "events", "log", "models"]
        assert sorted(os.listdir("run-12:01/models")) == ["1", "2", "3"] and len(os.listdir(scratch)) == 3
        os.remove("run-12:01/models/1")  # the oldest goes
        open("run-12:01/models/4", "w").write("right")
        overlay.was_done()
        overlay.end()
        open("run-12:01/models/5", "w").write("right")
        log.write("after"), events.write("after"), log.close(), events.close()
        """,
    )
    found = {name: content.decode() for name, (*_, content) in picture(tmp_path).items() if content}
    assert found == {
        "run-12:01/config": "start-up",
        "run-12:01/models/4": "right",
        "run-12:01/models/5": "right",
        "run-12:01/log": "after",
        "run-12:01/events": "after",
    }
    assert sorted(os.listdir(tmp_path / "run-12:01/models")) == ["2", "3", "4", "5"]


def test_what_was_read_at_the_start_and_written_in_training_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(("before", "data", "cache/file", ".hidden", "during", "start-up")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        if name != "start-up":
            os.utime(tmp_path / name, (1000.0 + number, 1000.0 + number))
    said = run(
        tmp_path,
        """
        import time
        begin()
        time.sleep(0.01)
        with overlay.real():
            os.utime("start-up")  # by another process, meanwhile
        open("mine", "w").write("mine")
        for name in ("before", "data", "cache/file", ".hidden", "start-up", "mine"):
            open(name).read()
        for since in (1000.5, 998.5, 900.0):
            print(os.path.basename(overlay.read_since(since, True)), end=",")
        open("during").read()
        print(os.path.basename(overlay.read_since(1000.5, True)), overlay.read_since(1000.5, False), end=",")
        overlay.passes()
        os.utime("before")
        open("before").read()
        print(overlay.read_since(1003.5, True))
        """,
    )
    assert said == ",before,before,during ,\n"


def test_what_others_write_meanwhile_stays(tmp_path: Path) -> None:
    """The newcomer is the first one to come to a step that all do then."""
    (tmp_path / "best").mkdir()
    (tmp_path / "best/old").write_text("old")
    (tmp_path / "best/changed").write_text("old")
    run(
        tmp_path,
        """
        import shutil
        begin()
        overlay.passes()
        overlay.arrives()
        os.makedirs("new", exist_ok=True), open("new/mine", "w").write("mine")
        shutil.rmtree("best"), os.mkdir("best"), open("best/mine", "w").write("mine")
        with overlay.real():
            os.makedirs("new", exist_ok=True)
            for name in ("new/theirs", "best/theirs", "best/changed"):
                open(name, "w").write("theirs")
        overlay.end()
        """,
    )
    found = {name: content.decode() for name, (*_, content) in picture(tmp_path).items() if content}
    assert found == {
        "best/mine": "mine",
        "best/theirs": "theirs",
        "best/changed": "theirs",
        "new/mine": "mine",
        "new/theirs": "theirs",
    }


def test_a_line_is_not_added_again_where_the_other_was_a_step_further(tmp_path: Path) -> None:
    """The other's line of the step that is done again is behind it."""
    (tmp_path / "rows").write_text("step 1\nstep 2\nstep 3\n")
    run(
        tmp_path,
        """
        begin()
        def add(line):
            with open("rows", "a") as file: file.write(line)
        overlay.passes()
        add("step 1\\n")
        overlay.arrives()
        add("step 2\\n")
        overlay.end()
        """,
    )
    assert (tmp_path / "rows").read_text() == "step 1\nstep 2\nstep 3\n"


def test_nobody_waits_again_but_for_what_is_looked_at_again_and_again(tmp_path: Path) -> None:
    text = """
        import threading, time
        slept = []
        time.sleep = lambda seconds: slept.append(seconds + 0)
        from time import sleep as pause
        begin()
        pause(1)
        assert slept == [1], "in start-up"
        overlay.passes()
        def loads(batch):
            pause(batch)
        for step in range(1000):
            loads(1)
            time.sleep(2)
            overlay.gets_on()
        assert slept == [1], slept
        for look in range(3):
            time.sleep(3)
        assert slept == [1, 3, 3], "a loop that waits for something does"
        overlay.gets_on()
        thread = threading.Thread(target=pause, args=[4])
        thread.start()
        thread.join()
        assert slept == [1, 3, 3, 4], "a thread of the script's"
        try:
            pause("long")
        except TypeError:
            pass
        overlay.arrives()
        pause(5)
        overlay.end()
        pause(6)
        assert slept == [1, 3, 3, 4, 5, 6]
    """
    run(tmp_path, text)


def test_programs_are_not_run_again(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import subprocess
        begin()
        overlay.passes()
        subprocess.run(["touch", "harm"], check=True), os.system("touch harm")
        subprocess.Popen("touch harm", shell=True).wait()
        assert not os.path.exists("harm")
        overlay.end()
        subprocess.run(["touch", "done"], check=True)
        """,
    )
    assert list(picture(tmp_path)) == ["done"]


@pytest.mark.parametrize(
    "does",
    [
        "import subprocess; subprocess.check_output(['cat', 'old'])",
        "os.execv('/bin/true', ['true'])",
        "os.spawnv(os.P_WAIT, '/bin/true', ['true'])",
        "os.chdir('made')",
        "os.posix_spawn('/bin/true', ['true'], {})",
    ],
)
def test_what_cannot_be_watched_is_not_let_through(tmp_path: Path, does: str) -> None:
    (tmp_path / "old").write_text("real")
    before = picture(tmp_path)
    said = run(tmp_path, f"begin(); overlay.passes(); os.mkdir('made')\n{does}", code=9)
    assert said.startswith("refused: it ")
    assert picture(tmp_path) == before


def test_databases_are_not_harmed_and_one_that_is_open_is_not_gone_on_with(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "rows")) as db:
        db.execute("create table t (x)")
        db.commit()
    before = picture(tmp_path)
    script = """
        import sqlite3
        begin()
        def add(db):
            db.execute("insert into t values (1)"), db.commit()
            return db
        held = add(sqlite3.connect("rows"))
        overlay.passes()
        add(sqlite3.connect(database="rows")).close()
        assert sqlite3.connect("file:rows?mode=ro", uri=True).execute("select * from t").fetchall() == []
        assert sqlite3.connect(":memory:").execute("select 1").fetchall() == [(1,)]
        """
    run(tmp_path, f"{script}\n        held.close()\n        overlay.arrives(), overlay.end()")
    said = run(tmp_path, f"{script}\n        overlay.arrives(), overlay.end()", code=9)
    assert said.startswith("refused: a library's own code has ") and "rows open" in said
    said = run(tmp_path, f"{script}\n        overlay.arrives(), sqlite3.connect('rows')", code=9)
    assert said.startswith("refused: it changes a part of rows")
    assert picture(tmp_path) == before


def test_a_file_that_is_mapped_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "losses").write_bytes(bytes(range(64)))
    before = picture(tmp_path)
    said = run(
        tmp_path,
        """
        import numpy as np
        begin()
        losses = np.memmap("losses", dtype="float64", mode="w+", shape=(8,))
        overlay.passes()
        losses[0] = 1.0
        overlay.arrives(), overlay.end()
        """,
        code=9,
    )
    assert said.startswith("refused: it has ") and "losses mapped into memory" in said
    assert picture(tmp_path) == before


@pytest.mark.parametrize("mode", ["at", "wt"])
def test_a_compressed_file_is_gone_on_with_where_it_is_the_same_to_the_byte(
    mode: str, tmp_path: Path
) -> None:
    """The time in its header is another one, and one that is appended to is behind."""
    text = f"""
        import bz2, gzip
        at = "rows.gz"
        def opened():
            return gzip.open(at, {mode!r})
        predecessor = opened()
        predecessor.write("one"), predecessor.flush()
        before = open(at, "rb").read()
        gzip.time.time = lambda: 1
        begin()
        rows = opened()
        overlay.passes()
        rows.write("one")
        overlay.arrives(), overlay.end()
    """
    said = run(tmp_path, text, code=9)
    assert said.startswith("refused: it has ") and "rows.gz open" in said
    same = text.replace("gzip.open", "bz2.open").replace("rows.gz", "rows.bz2")
    run(tmp_path, f"{same}\n        rows.close()\n        assert bz2.open(at, 'rt').read() == 'one'")


def test_threads_and_forked_processes_of_the_script_are_watched(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("real")
    run(
        tmp_path,
        """
        import threading
        begin()
        overlay.passes()
        def save():
            open("old", "w").write("harm")
        thread = threading.Thread(target=save)
        thread.start(), thread.join()
        if (child := os.fork()) == 0:
            save(), os.remove("old")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
    )
    assert (tmp_path / "old").read_text() == "real"


def test_a_forked_process_that_outlives_the_layer_writes_for_real(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("real")
    text = """
        begin()
        read, write = os.pipe()
        ready, written = os.pipe()
        if (child := os.fork()) == 0:
            with open("of the layer", "w") as file, open("old", "w") as other:
                file.write("new"), other.write("in the layer")
            os.close(written), os.close(write), os.read(read, 1)
            with open("written later", "w") as file:
                file.write("late")
            with open("old", "a") as file:
                file.write(", later")
            os._exit(0)
        os.close(read), os.close(written), os.read(ready, 1)
        overlay.arrives(), overlay.end()
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0
    """
    run(tmp_path, text)
    assert (tmp_path / "written later").read_text() == "late"
    assert (tmp_path / "old").read_text() == "real, later"


@pytest.mark.parametrize("gives", ["future", "loop", "thread", "queue"])
def test_what_is_given_to_a_thread_in_a_passed_step_is_done_in_the_layer(gives: str, tmp_path: Path) -> None:
    """It is behind the script: nothing of it is done once more when files are real."""
    (tmp_path / "metrics").write_text("one\ntwo\n")
    text = """
        import asyncio, queue, threading
        from concurrent.futures import ThreadPoolExecutor
        begin()
        held = threading.Event()
        def add(line):
            held.wait()
            with open("metrics", "a") as file: file.write(f"{line}\\n")
        async def add_soon(line): add(line)
        pool, loop, lines = ThreadPoolExecutor(1), asyncio.new_event_loop(), queue.Queue()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        def take():
            while True: add(lines.get())
        threading.Thread(target=take, daemon=True).start()
        def give(line):
            if GIVES == "future": pool.submit(add, line)
            if GIVES == "loop": asyncio.run_coroutine_threadsafe(add_soon(line), loop)
            if GIVES == "thread": threading.Thread(target=add, args=(line,)).start()
            if GIVES == "queue": lines.put(line)
        overlay.passes()
        give("one"), give("two")
        threading.Timer(0.2, held.set).start()
        overlay.arrives()
        give("three")
        overlay.end()
        give("four")
        lines.put("five") if GIVES == "queue" else pool.shutdown()
        while len(open("metrics").read().split()) < 4: pass
    """
    run(tmp_path, text.replace("GIVES", repr(gives)))
    assert (tmp_path / "metrics").read_text().split()[:4] == ["one", "two", "three", "four"]


@pytest.mark.parametrize("opens", [True, False])
def test_a_forked_process_that_has_a_file_of_the_layer_open_is_not_gone_on_with(
    opens: bool, tmp_path: Path
) -> None:
    """It would go on with a file that nobody sees any more. What it has of its parent's is no harm."""
    (tmp_path / "metrics").write_text("one\ntwo\n"), (tmp_path / "log").write_text("one\n")
    text = f"""
        begin()
        log = open("log", "w")
        rows = open("rows", "w")
        read, write = os.pipe()
        ready, written = os.pipe()
        if (child := os.fork()) == 0:
            file = open("metrics", "w") if {opens} else open("new", "w")
            os.close(written), os.close(write), os.read(read, 1)
            os._exit(0)
        os.close(read), os.close(written), os.read(ready, 1)
        overlay.passes(), overlay.arrives(), overlay.end()
        os.close(write), os.waitpid(child, 0)
    """
    said = run(tmp_path, text, code=9 if opens else 0)
    assert ("refused: a process that it has forked" in said) == opens
    assert (tmp_path / "metrics").read_text() == "one\ntwo\n"


def test_libraries_that_write_by_a_name(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "old").write_text("real")
    before = picture(tmp_path)
    run(
        tmp_path,
        """
        import torch
        from torch import save
        begin()
        from safetensors.torch import load_file, save_file
        import safetensors
        overlay.passes()
        save_file({"a": torch.ones(2)}, "old")
        assert load_file("old")["a"].sum() == 2
        with safetensors.safe_open("old", "pt") as found:
            assert list(found.keys()) == ["a"]
        save(torch.ones(1), "old"), torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), f="new")
        """,
    )
    assert picture(tmp_path) == before


_OPENED = "import numpy, h5py, pyarrow as pa, pyarrow.parquet as pq; t = pa.table({'a': [1, 2, 3]}); "


@pytest.mark.parametrize(
    "does",
    [
        "with h5py.File('old.h5', 'w') as f: f['x'] = [4] * 9\nassert len(h5py.File('old.h5')['x']) == 9",
        "with h5py.File('old.h5', 'a') as f: f['y'] = 1\nassert sorted(h5py.File('old.h5')) == ['x', 'y']",
        "with h5py.File('old.h5', mode='r+') as f: f['x'][0] = 7\nassert h5py.File('old.h5')['x'][0] == 7",
        "with h5py.File('new.h5', 'x') as f: f['x'] = 1\nassert list(h5py.File('new.h5')) == ['x']",
        "pq.write_table(t, 'old.parquet')\nassert pq.read_table('old.parquet').num_rows == 3",
        "with pq.ParquetWriter('new.parquet', t.schema) as w: w.write_table(t)\n"
        "assert pq.ParquetFile('new.parquet').metadata.num_rows == 3",
        "with pa.OSFile('old.parquet', 'wb') as f: pq.write_table(t, f)\n"
        "with pa.memory_map('old.parquet') as f: assert pq.read_table(f).num_rows == 3",
        "with pa.OSFile('new', mode='w') as f, pa.ipc.new_file(f, t.schema) as w: w.write_table(t)\n"
        "assert pa.ipc.open_file('new').read_all().num_rows == 3",
        "with pa.ipc.new_stream('new', t.schema) as w: w.write_table(t)\ndel w\n"
        "with pa.OSFile('new') as f: assert pa.ipc.open_stream(f).read_all().num_rows == 3",
        "import pyarrow.csv as c; c.write_csv(t, 'new')\nassert c.read_csv('new').num_rows == 3",
        "import pyarrow.feather as f; f.write_feather(t, 'old.parquet')\n"
        "assert f.read_table('old.parquet').num_rows == 3",
        "from tokenizers import Tokenizer, models; Tokenizer(models.BPE()).save('old.h5')\n"
        "Tokenizer.from_file('old.h5')",
    ],
)
def test_libraries_of_data_write_to_the_layer_and_read_it_back(tmp_path: Path, does: str) -> None:
    made = (
        f"{_OPENED}h5py.File('old.h5', 'w')['x'] = 1 + numpy.arange(3); pq.write_table(t[:1], 'old.parquet')"
    )
    run(tmp_path, textwrap.dedent(made))
    before = picture(tmp_path)
    run(tmp_path, f"{_OPENED}begin(); overlay.passes()\n{does}\noverlay.arrives(); overlay.end()")
    assert picture(tmp_path) == before


def test_what_a_library_makes_many_files_of_or_holds_open_is_not_let_through(tmp_path: Path) -> None:
    many = (
        "begin(); overlay.passes()\nimport pyarrow.dataset as d; d.write_dataset(t, 'made', format='parquet')"
    )
    assert "writes the files of made" in run(tmp_path, _OPENED + many, code=9)
    held = "begin(); overlay.passes()\nf = h5py.File('new.h5', 'w')\noverlay.arrives(), overlay.end()"
    assert "new.h5 open" in run(tmp_path, _OPENED + held, code=9)
    again = "begin(); overlay.passes(); overlay.arrives()\nh5py.File('old.h5', 'a')"
    assert "changes a part of old.h5" in run(tmp_path, _OPENED + again, code=9)
    assert not picture(tmp_path)


def test_what_is_left_of_processes_that_are_gone(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        os.environ["UPPER"] = os.getcwd()
        os.mkdir("ft-overlay-4194399-x"), os.mkdir(f"ft-overlay-{os.getpid()}-x")
        begin()
        print(sorted(name.rpartition("-")[0] for name in os.listdir()))
        """,
    )
    assert "4194399" not in found and found.count("ft-overlay") == 2


# -- where a file goes on --------------------------------------------------------------------------

_LINES = st.lists(st.sampled_from(["a", "b", "loss 1", "12:00"]), max_size=8)


@given(_LINES, st.integers(0, 60), _LINES)
def test_a_file_that_is_begun_anew_goes_on_as_if_nothing_had_happened(
    passed: list[str], flushed: int, beyond: list[str]
) -> None:
    written = "".join(f"{line}\n" for line in passed).encode()
    cut = written[:flushed]
    assert begun_anew(written, cut, True) == Place(len(cut), written[len(cut) :])
    further = written + "".join(f"{line}\n" for line in beyond).encode()
    end, missing = begun_anew(written, further, True)
    assert further[:end] + missing == written
    end, missing = begun_anew(written, further, False)
    assert further[:end] + missing == further


@given(_LINES, _LINES, st.integers(0, 60))
def test_nothing_is_cut_off_a_file_that_is_appended_to(
    before: list[str], passed: list[str], flushed: int
) -> None:
    base, written = ("".join(f"{line}\n" for line in lines).encode() for lines in (before, passed))
    real = base + written[:flushed]
    end, missing = appended_to(written, real)
    assert end == len(real)
    if missing:
        assert (real + missing).endswith(written)


# -- any order of things ---------------------------------------------------------------------------

_PLACES = ["a", "b", "d/a", "d/b", "d/e/a", "f", "f/a", "l"]


def _acts() -> dict[str, Callable[[str, str], Any]]:
    def write(path: str, other: str) -> None:
        with open(path, "w") as file:
            file.write(other)

    def append(path: str, other: str) -> None:
        with open(path, "a") as file:
            file.write(other)

    return {
        "write": write,
        "append": append,
        "read": lambda path, _: open(path).read(),
        "mkdir": lambda path, _: os.mkdir(path),
        "makedirs": lambda path, _: os.makedirs(path, exist_ok=True),
        "remove": lambda path, _: os.remove(path),
        "rmdir": lambda path, _: os.rmdir(path),
        "rmtree": lambda path, _: shutil.rmtree(path),
        "rename": lambda path, other: os.rename(path, other),
        "copy": lambda path, other: shutil.copyfile(path, other) and None,
        "copytree": lambda path, other: shutil.copytree(path, other) and None,
        "symlink": lambda path, other: os.symlink(os.path.basename(other), path),
        "link": lambda path, other: os.link(path, other, follow_symlinks=False),
        "list": lambda path, _: sorted(os.listdir(path)),
        "stat": lambda path, _: stat.S_IFMT(os.stat(path).st_mode),
        "truncate": lambda path, _: os.truncate(path, 1),
    }


def _made(at: str) -> None:
    os.makedirs(f"{at}/d/e")
    for name in ("a", "d/a", "d/e/a"):
        Path(at, name).write_text(f"content of {name}")
    os.symlink("a", f"{at}/l")


def _seen() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for directory, below, files in os.walk("."):
        for name in below + files:
            path = os.path.join(directory, name)
            found[path] = (
                os.readlink(path) if os.path.islink(path) else name in files and Path(path).read_text()
            )
    return found


def _outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except shutil.Error:
        return "shutil.Error"
    except OSError as error:
        return error.errno


def fuzz(seed: int) -> None:
    """In a process of its own, in an empty directory: the layer against the kernel."""
    from ft_core.overlay import Overlay

    def refuse(what: str) -> Any:
        raise AssertionError(what)

    rng = random.Random(seed)
    _made("plain")
    _made("layered")
    top, overlay, acts = os.getcwd(), Overlay(), _acts()
    before = picture(Path("layered"))
    script = []
    for _ in range(rng.randrange(1, 25)):
        script.append((rng.choice(list(acts)), rng.choice(_PLACES), rng.choice(_PLACES)))
    shutil._use_fd_functions = False  # type: ignore[attr-defined] # as the layer has it; its errors differ
    os.chdir("plain")
    expected = [(_outcome(lambda a=acts[n], p=p, q=q: a(p, q)), _seen()) for n, p, q in script]  # type: ignore[misc]
    os.chdir(f"{top}/layered")
    overlay.begin(Path(top, "job"), Path(top), refuse)
    overlay._calls.tree.passing = STRICT  # type: ignore[union-attr, assignment]
    for (name, path, other), (result, seen) in zip(script, expected, strict=True):
        told = _outcome(lambda: acts[name](path, other))  # noqa: B023
        assert told == result, (name, path, other, told, result)
        assert _seen() == seen, (name, path, other, _seen(), seen)
    overlay.end()
    os.chdir(top)
    assert picture(Path("layered")) == before


class _Strict:
    """Passing, but what is there is there: as in the kernel."""

    def __bool__(self) -> bool:
        caller = sys._getframe(1).f_code.co_name
        return caller not in ("_has_made", "remove", "rename", "rmtree")


STRICT = _Strict()


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_any_order_of_things_looks_as_if_it_were_real(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 50):
        at = tmp_path / str(seed)
        at.mkdir()
        child = os.fork()
        if child == 0:
            os.chdir(at)
            try:
                fuzz(seed)
                os._exit(0)
            except BaseException as error:
                print(f"seed {seed}: {error!r}", file=sys.stderr, flush=True)
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, f"seed {seed}"


@pytest.mark.parametrize("looked_through", [True, False])
def test_modules_that_have_taken_a_function_by_its_name(looked_through: bool, tmp_path: Path) -> None:
    """Imported in the fork server or since, in sight or not."""
    for name in ("early", "hidden", "late"):
        text = (
            "from os import remove as away\nfrom torch import save\nfrom tempfile import mkdtemp\nown = len\n"
        )
        (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / f"of_{name}").touch()
    before = picture(tmp_path)
    found = run(
        tmp_path,
        f"""
        import torch
        sys.path.insert(0, os.getcwd())
        sys.dont_write_bytecode = True
        from ft_core import import_hook
        from ft_core.overlay.references import look_through
        import early, hidden
        kept = [(m.away, m.save, m.mkdtemp) for m in (early, hidden)]
        if {looked_through}:
            look_through()
        import_hook.aside["hidden"] = sys.modules.pop("hidden")
        early.mine = os.remove
        import late
        begin()
        overlay.passes()
        for module in (early, hidden, late):
            module.away("of_" + module.__name__)
            module.save(1, "saved_" + module.__name__)
            assert module.own is len
        print(sorted(n for n in os.listdir() if n.endswith("den") or n.endswith("ly") or n.endswith("te")))
        overlay.arrives()
        overlay.end()
        assert [(m.away, m.save, m.mkdtemp) for m in (early, hidden)] == kept
        assert early.mine is os.remove
        """,
    )
    assert "saved_early" in found and "saved_hidden" in found and "saved_late" in found and "of_" not in found
    assert picture(tmp_path) == before


if __name__ == "__main__":
    fuzz(int(sys.argv[1]))
