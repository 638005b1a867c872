"""Command lines: argparse's, which also says which flag was meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

DISTRIBUTION = "ft-training"
"""The name under which pip knows this package."""


class Parser(argparse.ArgumentParser):
    """Reads the command line of one program."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.abbreviated: Sequence[argparse.Action] | None = None
        """Flags of which a beginning will do that is no other's; None: all."""
        self.note = ""
        """Said with each error."""

    def add_version(self) -> None:
        """The flag `--version`."""
        said = f"%(prog)s {version(DISTRIBUTION)} ({DISTRIBUTION})"
        self.add_argument("--version", action="version", version=said, help="say which this is, and end")

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse as argparse does."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return found

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line, and end."""
        super().error(message + self.note)

    def _meant(self, unknown: Sequence[str]) -> str:
        words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        known = sorted(set(_flags(self)))
        near = [match for word in words for match in difflib.get_close_matches(word, known, n=1)]
        return f"; did you mean {' '.join(near)}?" if near else ""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation may stand for. The two spellings of a flag are one."""
        found: list[Any] = super()._get_option_tuples(option_string)
        if not option_string.startswith("--"):
            return found
        flags: dict[int, Any] = {}
        for one in found:
            if self.abbreviated is None or one[0] in self.abbreviated:
                flags.setdefault(id(one[0]), one)
        return list(flags.values())


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """All that it knows, and its commands."""
    for action in parser._actions:
        yield from (name for name in action.option_strings if name.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _flags(command)
