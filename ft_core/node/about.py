"""What a node is, for as long as it lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ft_core.process.inject import ENV as INJECT_ENV
from ft_core.protocol.sockets import split_address
from ft_core.settings import Settings


@dataclass(frozen=True)
class About:
    """A node, and where it can be reached."""

    node: str
    domain: str
    node_rank: int
    """Position at the start; -1: a spare; `settings.ANY_RANK`: whichever is free."""
    pid: int
    data: str
    """Address of its memory, for other agents."""
    store: str
    """Address of the stores of epochs, should role 0 be here."""
    master: str
    """Where a script may listen, should role 0 be here (MASTER_ADDR and MASTER_PORT)."""
    job_dir: str
    environment: Mapping[str, str]
    """What its workers have in theirs, where the job's settings do not say."""

    def environment_of(self, role: int, local_rank: int, master: str, settings: Settings) -> dict[str, str]:
        """What a worker here that plays `role` finds: the variables torchrun sets, those by which a program
        that it executes could find us, and the settings' own. `master`: of the node with role 0,
        "HOST:PORT"."""
        host, port = split_address(master)
        return {
            "RANK": str(role),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(settings.world_size),
            "LOCAL_WORLD_SIZE": str(settings.nproc_per_node),
            "GROUP_RANK": str(role // settings.nproc_per_node),
            "GROUP_WORLD_SIZE": str(settings.nnodes),
            "ROLE_RANK": str(role),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(settings.world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.job_dir.rpartition("/")[2],
            **self.environment,
            "FT_JOB_DIR": self.job_dir,
            INJECT_ENV: settings.inject,
            **settings.environment,
        }
