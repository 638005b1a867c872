"""What `ftrun` asks about a script before it starts anything: the settings in its DeepSpeed configuration.

`ftrun` imports this module whatever the script is, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ft_core.errors import ConfigError

log = logging.getLogger(__name__)

_FLAGS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")

_FILES = (".json", ".hjson")
_SHOWN = 255
"""Characters of a configuration that are named: it is a path, or all of it in base64."""


def asks(arguments: Sequence[str]) -> tuple[bool, str] | None:
    """Whether the configuration among a script's arguments asks for protection, and in what words it does
    or does not; None where none can be seen. Raises ConfigError as `settings`."""
    found = None
    for flag, text in _configurations(arguments):
        with _named(flag, text):
            from ft_deepspeed import config

            if (loaded := config.load(text)) is not None:
                asked = config.parse(loaded) is not None
                name = text if os.path.exists(text) else "the configuration"
                found = asked, f"{name} has a {config.SECTION} section" if asked else config.absence(text)
    return found


def settings(arguments: list[str]) -> dict[str, Any]:
    """Settings (`ft_core.settings.FLAGS`) that the configuration among a script's arguments brings.

    Empty when none is there, and when `ftrun` cannot see it: then the script brings it at run time.
    Raises ConfigError naming flag, file, key and fix.
    """
    found: dict[str, Any] = {}
    for flag, text in _configurations(arguments):
        with _named(flag, text):
            from ft_deepspeed import config

            if text.endswith(_FILES) and not os.path.exists(text):
                log.warning("%s %s: there is no such file here; the script has to make it", flag, text)
            loaded = config.load(text)
            section = config.parse(loaded) if loaded is not None else None
            found = section.settings() if section is not None else {}
    return found


@contextlib.contextmanager
def _named(flag: str, text: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise ConfigError(f"{flag} {shown}: {error}") from None


def _configurations(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(flag, value) where a value may be a configuration: DeepSpeed's own flag, and Hugging Face's.

    `--deepspeed` is a switch in scripts that use DeepSpeed's argument parser.
    """
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag not in _FLAGS:
            continue
        if not equals:
            value = next(iter(arguments[position + 1 :]), "")
        if value and (flag != "--deepspeed" or value.startswith("{") or value.endswith(_FILES)):
            yield flag, value
