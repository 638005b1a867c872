"""What `ftctl doctor` must know of DeepSpeed: versions, its launcher, how a script asks for protection."""

from __future__ import annotations

from ft_core.cli.doctor.case import Framework, Supported

FRAMEWORK = Framework(
    supported={
        "deepspeed": Supported(
            (0, 17),
            (0, 19),
            broken=(((0, 18, 7), (0, 18, 9), "fails by itself in the first step of ZeRO 1 and 2 on CPUs"),),
        )
    },
    protection="a configuration with a fault_tolerance section (DeepSpeed)",
    protects=lambda flags: any(flag.startswith("--deepspeed") for flag in flags),
    launchers={"deepspeed": "deepspeed"},
)
