"""What torch has for the store of the default process group: each process's own.

Process groups do not need one here. A script that uses it to tell its peers something would wait for ever.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed as dist

from ft_core.errors import ConfigError


class OwnStore(dist.Store):
    """Has what this process has set."""

    def __init__(self) -> None:
        """Empty."""
        super().__init__()
        self._store = dist.HashStore()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises ConfigError where one is not there: nobody else will set it."""
        if missing := [key for key in keys if not self._store.check([key])]:
            raise ConfigError(
                f"the script waits for {', '.join(map(repr, missing))} in torch's default store, which under "
                "ftrun each process has for itself: use a collective in its place (broadcast_object_list, "
                "barrier), or a torch.distributed.TCPStore of the script's own"
            )

    def get(self, key: str) -> bytes:
        """Raises ConfigError where it is not there."""
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()
