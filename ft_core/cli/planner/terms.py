"""How long things take, term by term: sending a step's copies, and each part of a recovery.

Sizes are in bytes, times in seconds, rates in bytes per second. A rate that nobody has measured is the one
of the hardware's data sheet: what follows from it is a bound, which no job reaches.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from ft_core.control.liveness.suspicion import RETURN_GRACE
from ft_core.errors import ConfigError
from ft_core.settings import Settings

GB = 1e9
PCIE = 63 * GB
"""Line rate of PCIe 5.0 with 16 lanes, in one direction."""
CHECKSUM = 10 * GB
"""What one thread hashes, on the machine where xxh3 was chosen: more than it copies."""


@dataclass(frozen=True)
class Rate:
    """Bytes per second."""

    value: float
    bound: bool
    """Whether it is what the hardware could do at best, and nobody has seen it."""

    def seconds(self, nbytes: float) -> float:
        """For so many bytes."""
        return nbytes / self.value


@dataclass(frozen=True)
class Rates:
    """Between nodes, for all that one sends; from a host to a device; in a host's memory, for a role."""

    network: Rate | None
    device: Rate
    host: Rate


@dataclass(frozen=True)
class Term:
    """A part of a recovery. `seconds` None: nothing is known of it."""

    name: str
    seconds: float | None
    bound: bool = False
    note: str = ""


def network_rate(measured: str, interfaces: int, gbps: float) -> Rate | None:
    """`measured`: GB/s, or a file that `ftctl doctor --network --json` has printed. `gbps`: line rate of each
    interface in Gbit/s. None where nothing is said. Raises ConfigError."""
    if measured:
        return Rate(_measured(measured), bound=False)
    return Rate(interfaces * gbps * GB / 8, bound=True) if gbps else None


def _measured(text: str) -> float:
    try:
        value = float(text) * GB
    except ValueError:
        value = _slowest(Path(text))
    if not value > 0 or math.isinf(value):
        raise ConfigError(f"--measured {text}: give GB/s above 0, or a file")
    return value


def _slowest(path: Path) -> float:
    """The rate of the slowest pair in a file with a line for each."""
    flag = f"--measured {path}"
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        return min(float(json.loads(line)["network"]["bytes_per_second"]) for line in lines)
    except OSError as error:
        raise ConfigError(f"{flag}: neither a number nor a file that can be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{flag}: not what `ftctl doctor --network HOST ... --json` prints, a line for each node: {error}"
        ) from None


def versions_apart(sent: int, rate: Rate, step: float) -> int:
    """N: how many steps pass until the copies of one version are there. 1: they keep up with every step."""
    return max(1, math.ceil(rate.seconds(sent) / step))


def steps_wait(sent: int, rate: Rate, step: float) -> float:
    """Seconds that every step waits for copies, with a version in each."""
    return max(0.0, rate.seconds(sent) - step)


def recovery(
    node_state: int, role_state: int, rates: Rates, start_up: float | None, step: float | None
) -> list[Term]:
    """What the loss of a node takes. `node_state`, `role_state`: bytes of the state of all roles of the node,
    and of the largest role. `start_up`: of the script in a warm process. None where nobody has said it."""
    silent = Settings.heartbeat * Settings.heartbeats_missed
    unknown = "give --start-up-seconds; `ftctl timeline` has it of any recovery"
    network = rates.network
    return [
        Term("noticing it", RETURN_GRACE, note=f"a machine that only goes silent: up to {silent:g} s"),
        Term("start-up", start_up, note=unknown if start_up is None else ""),
        Term("network", network.seconds(node_state), network.bound, "beside the start-up")
        if network is not None
        else Term("network", None, note="give --measured, or --network-gbps"),
        Term("host", rates.host.seconds(role_state), rates.host.bound, "verifying; all roles at once"),
        Term("device", rates.device.seconds(role_state), rates.device.bound, "loading; all roles at once"),
        Term("the step again", step, note="give --device-tflops, or --step-seconds" if step is None else ""),
    ]


def guarded(terms: list[Term]) -> list[Term]:
    """The same where a spare has the copies already, and standbys that have started."""
    there = {
        "start-up": Term("start-up", 0.0, note="a standby has it behind it"),
        "network": Term("network", 0.0, note="the spare has the copies"),
    }
    return [there.get(term.name, term) for term in terms]


def total(terms: list[Term]) -> tuple[float, bool]:
    """Seconds until a step is done, and whether that is all: it is not where a term is unknown. The network
    and the start-up go on at the same time."""
    known = {term.name: term.seconds or 0.0 for term in terms}
    both = known["start-up"], known["network"]
    return sum(known.values()) - min(both), all(term.seconds is not None for term in terms)
