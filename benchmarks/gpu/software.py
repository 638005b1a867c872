"""Row "software": what is here, and whether a recovery can work with it. Needs no device."""

from __future__ import annotations

import importlib
import importlib.metadata
import os

import torch

from benchmarks.gpu.checks import Row, main
from ft_core import plugins
from ft_core.cli.doctor import case, software
from ft_core.comm import nccl_environment
from ft_core.node.admission import nccl

REQUIRED = ("msgspec", "xxhash", "megatron-core")
OPTIONAL = ("deepspeed", "transformer-engine", "apex", "nvidia-ml-py")


def body(row: Row) -> None:
    """Versions, the NCCL that torch has, and torch's threads that must not end a survivor."""
    row.tell("torch", "seen", f"{torch.__version__}, CUDA {torch.version.cuda}")
    for name in (*REQUIRED, *OPTIONAL):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            row.tell(name, False if name in REQUIRED else "not there")
        else:
            row.tell(name, True if name in REQUIRED else "seen", version)
    with row.checking("adapters are found"):
        found = [each.__module__ for each in plugins.load(plugins.HOOKS)]
        row.tell("adapters are found", bool(found), ", ".join(found))
    with row.checking("doctor"):
        facts = case.Case(environment=os.environ, versions=case.versions([]))
        bad = [
            f
            for check in (software.versions, nccl.nccl_version, nccl.nccl_threads)
            for f in check(facts)
            if f.level == "fail"
        ]
        row.tell("doctor: versions and NCCL", not bad, "; ".join(f"{f.name}: {f.found}" for f in bad))
    wrong = [text for text, _ in nccl_environment.ends_survivors(os.environ)]
    row.tell("no thread of torch's ends a survivor", not wrong, "; ".join(wrong))

    def device() -> None:
        if row.device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            memory = f"{properties.total_memory / 2**30:.1f} GiB"
            row.tell("device", "seen", f"{properties.name}, {memory}, NCCL {torch.cuda.nccl.version()}")
        else:
            row.tell("device", "seen", row.device)

    row.on_device("device", device)


if __name__ == "__main__":
    main("software", body)
