"""What `ftctl doctor` must know of DeepSpeed: versions, its launcher, how a script asks for protection."""

from __future__ import annotations

from collections.abc import Sequence

from ft_core.cli.doctor.case import Framework, Supported
from ft_core.errors import ConfigError
from ft_deepspeed import arguments


def protects(words: Sequence[str]) -> tuple[bool, str] | None:
    """What the configuration among a script's arguments says of protection, if it can be seen."""
    try:
        asked = arguments.asks(words)
    except ConfigError as error:
        return False, str(error)
    return asked


FRAMEWORK = Framework(
    supported={
        "deepspeed": Supported(
            (0, 17),
            (0, 19),
            broken=(((0, 18, 7), (0, 18, 9), "fails by itself in the first step of ZeRO 1 and 2 on CPUs"),),
        )
    },
    protection="a configuration with a fault_tolerance section (DeepSpeed)",
    protects=protects,
    launchers={"deepspeed": "deepspeed"},
)
