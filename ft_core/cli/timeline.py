"""`ftctl timeline`: where each role's time went from its worker's start, or the end of an epoch, to its next
step, and a trace of that for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ft_core.errors import FtError
from ft_core.process.timeline import NAME


class Line(msgspec.Struct, frozen=True):
    """What a worker has written of one epoch."""

    role: int
    epoch: int
    phases: list[tuple[str, float]]
    """Name, and when it began: seconds since 1970 by its node's clock."""
    end: float
    state: int = 0
    """Bytes of state that were verified, and loaded."""
    fetch_s: float = 0.0
    """Seconds that its agent took to bring it to this node, while the worker started; 0: it was there."""
    passed: int = 0
    """Steps that its script went through without doing them, on its way to its peers."""
    left_out: int = 0
    """Batches of theirs that it did not load."""
    ready: int = 0
    """1: its worker had started the role ahead of need. The phases begin when it took it over."""

    @property
    def begin(self) -> float:
        """When the first phase began."""
        return self.phases[0][1]

    def spans(self) -> list[tuple[str, float, float]]:
        """(phase, begin, end)."""
        ends = [*(at for _, at in self.phases[1:]), self.end]
        return [(name, at, end) for (name, at), end in zip(self.phases, ends, strict=True)]

    def rates(self) -> dict[str, float]:
        """GB/s at which the state was fetched, verified and loaded; nothing of what was not done."""
        names = [name for name, _ in self.phases]
        if not self.state or "verifying" not in names:
            return {}
        verified = names.index("verifying")  # what is called loading before that is the way there
        spent = {"fetched": self.fetch_s, "verified": 0.0, "loaded": 0.0}
        for name, begin, end in self.spans()[verified:]:
            spent["verified"] += (end - begin) * (name == "verifying")
            spent["loaded"] += (end - begin) * (name == "loading")
        return {what: self.state / 1e9 / seconds for what, seconds in spent.items() if seconds > 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--epoch", type=int, metavar="N", help="of this epoch; else of the newest")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write all epochs for Perfetto (Chrome's JSON) as well"
    )
    parser.add_argument("--json", action="store_true", help="for programs, one role a line")


def main(args: argparse.Namespace) -> int:
    """Returns 0. Raises FtError where nothing is found."""
    if args.job_dir is None:
        raise FtError("--job-dir DIR: workers' time lines are files of the job's directory")
    lines = read(args.job_dir)
    if not lines:
        raise FtError(
            f"{args.job_dir}/logs: no time line of any worker: no role has done a step yet, or the nodes do "
            "not share the job's directory; run this on a node"
        )
    if args.trace is not None:
        args.trace.write_text(json.dumps(trace(lines)))
    epoch = max(line.epoch for line in lines) if args.epoch is None else args.epoch
    chosen = [line for line in lines if line.epoch == epoch]
    if not chosen:
        raise FtError(f"no time line of epoch {epoch}: there are {sorted({line.epoch for line in lines})}")
    if args.json:
        for line in chosen:
            print(msgspec.json.encode(line).decode())
    else:
        print("\n".join(shown(chosen)))
    return 0


def read(job_dir: Path) -> list[Line]:
    """All that can be seen here, by epoch and role. Lines that are not whole are left out."""
    found = []
    decode = msgspec.json.Decoder(Line).decode
    for path in sorted((job_dir / "logs").glob(f"*/worker-*/**/{NAME}")):
        for text in path.read_bytes().splitlines(keepends=True):
            if text.endswith(b"\n"):
                with contextlib.suppress(msgspec.DecodeError):  # of a disk that was full, say
                    found.append(decode(text))
    return sorted((line for line in found if line.phases), key=lambda line: (line.epoch, line.role))


def shown(lines: Sequence[Line]) -> list[str]:
    """The lines of one epoch, for people."""
    rows = [f"epoch {lines[0].epoch}: seconds of each role until its next step was done"]
    for line in lines:
        spent = ", ".join(f"{name} {end - begin:.3f}" for name, begin, end in line.spans())
        rows.append(f"role {line.role}: {line.end - line.begin:.3f} = {spent}")
        if line.ready:
            rows.append("  a standby had started it ahead of need, and took it over then")
        if line.passed:
            rest = f", and left {line.left_out:,} batches unread" if line.left_out else ""
            rows.append(f"  its script passed over {line.passed:,} steps{rest}")
        if rates := line.rates():
            at = ", ".join(f"{what} at {rate:.1f} GB/s" for what, rate in rates.items())
            rows.append(f"  state: {line.state / 1e9:.2f} GB, {at}")
    return rows


def trace(lines: Sequence[Line]) -> dict[str, object]:
    """In Chrome's format: a track for each role, a slice for each phase."""
    events: list[dict[str, object]] = []
    for line in lines:
        about = {"pid": 0, "tid": line.role, "ph": "X", "cat": f"epoch {line.epoch}"}
        for name, begin, end in line.spans():
            times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
            events.append({"name": name, **about, **times, "args": {"epoch": line.epoch}})
    for role in sorted({line.role for line in lines}):
        events.append(
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": role, "args": {"name": f"role {role}"}}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
