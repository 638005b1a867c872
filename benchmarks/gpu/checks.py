"""What a row of checks tells, and how: a line of JSON for each check, written as soon as it is known."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ft_core.process.stream import has_gpu

Result = Literal["pass", "fail", "seen", "no device", "not there"]
"""`seen`: a figure that nothing is demanded of."""


@dataclass(frozen=True)
class Check:
    """One line of the table. `figure`: for people; `data`: the numbers, with their units in the names."""

    row: str
    check: str
    result: Result
    figure: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class NotThereError(Exception):
    """What is to be tried is not installed, or not possible here."""


class Row:
    """The checks of one process. `device`: "cuda", "cpu" to walk the same code without one, or "none"."""

    def __init__(self, name: str, device: str, quick: bool, out: Path) -> None:
        self.name, self.device, self.quick = name, device, quick
        self._out = out

    @property
    def walks(self) -> bool:
        """Whether there is a device to do it on, or another in its place."""
        return self.device != "none"

    def tell(self, check: str, result: Result | bool, figure: str = "", **data: Any) -> None:
        """Write one down."""
        if isinstance(result, bool):
            result = "pass" if result else "fail"
        line = json.dumps(asdict(Check(self.name, check, result, figure, data)))
        with self._out.open("a") as file:
            file.write(line + "\n")

    @contextmanager
    def checking(self, check: str) -> Iterator[None]:
        """Around one check: without a device it is not made; an error in it is the check's, not the row's."""
        try:
            yield
        except NotThereError as error:
            self.tell(check, "not there", str(error))
        except Exception as error:
            traceback.print_exc()
            self.tell(check, "fail", f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")

    def on_device(self, check: str, action: Callable[[], None]) -> None:
        """A check that needs a device."""
        if not self.walks:
            self.tell(check, "no device")
            return
        with self.checking(check):
            action()


def available() -> str:
    """ "cuda", or "none"."""
    return "cuda" if has_gpu() and torch.cuda.is_available() else "none"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Of a row's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu", "none"), default=available())
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("/dev/stdout"))
    return parser.parse_args(argv)


def main(name: str, body: Callable[[Row], None]) -> None:
    """A row's process."""
    args = arguments()
    if args.device == "cuda":
        torch.cuda.set_device(0)
    body(Row(name, args.device, args.quick, args.out))
    sys.stdout.flush()


def read(path: Path) -> list[Check]:
    """What a row's process has told until it ended."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Check(**json.loads(line)) for line in lines if line.endswith("\n")]
