"""What `ftrun` asks about a script before it starts anything: the settings in its DeepSpeed configuration.

`ftrun` imports this module whatever the script is, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from ft_core.errors import ConfigError

log = logging.getLogger(__name__)

_FLAGS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed")

_FILES = (".json", ".hjson")
_SHOWN = 255
"""Characters of a configuration that are named: it is a path, or all of it in base64."""


def settings(arguments: list[str]) -> dict[str, Any]:
    """Settings (`ft_core.settings.FLAGS`) that the configuration among a script's arguments brings.

    Empty when none is there, and when `ftrun` cannot see it: then the script brings it at run time.
    Raises ConfigError naming flag, file, key and fix.
    """
    found: dict[str, Any] = {}
    for flag, text in _configurations(arguments):
        from ft_deepspeed import config

        if text.endswith(_FILES) and not os.path.exists(text):
            log.warning("%s %s: there is no such file here; the script has to make it", flag, text)
        try:
            loaded = config.load(text)
            section = config.parse(loaded) if loaded is not None else None
        except ConfigError as error:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            raise ConfigError(f"{flag} {shown}: {error}") from None
        found = section.settings() if section is not None else {}
    return found


def _configurations(arguments: list[str]) -> Iterator[tuple[str, str]]:
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
