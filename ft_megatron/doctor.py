"""What `ftctl doctor` must know of Megatron: versions, how a script asks for protection, its rivals."""

from __future__ import annotations

from ft_core.cli.doctor.case import Framework, Supported
from ft_megatron import arguments

FRAMEWORK = Framework(
    supported={"megatron-core": Supported((0, 16), (0, 19))},
    protection="--ft (Megatron-LM)",
    protects=lambda arguments: (True, "--ft") if "--ft" in arguments else None,
    rivals=arguments.RIVALS,
)
