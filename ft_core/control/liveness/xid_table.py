"""All errors of GPUs that NVIDIA's driver has a number for (XIDs): what it advises, and what is done here.

Data. Numbers and advice are those of NVIDIA's catalogue for Ampere and newer GPUs; of 160 and 162 its monitor
NVSentinel says more. `docs/device_health.md` shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from ft_core.protocol.messages import DeviceAction


class Advice(StrEnum):
    """What NVIDIA says should be done first."""

    IGNORE = "ignore"
    RESTART_APP = "restart the application"
    RESET_GPU = "reset the GPU"
    RESTART_BM = "restart the machine"
    RESTART_VM = "restart the virtual machine"
    WORKFLOW = "a workflow of its own"
    CHECK = "check what it is about"
    SUPPORT = "contact support"
    NONE = "none"


class Xid(NamedTuple):
    """A row of the table."""

    what: str
    advice: Advice
    action: DeviceAction
    why: str = ""
    """Why the action is another one than others with this advice have."""


_ACTIONS = {
    Advice.IGNORE: DeviceAction.NOTHING,
    Advice.RESTART_APP: DeviceAction.ELSEWHERE,
    Advice.RESET_GPU: DeviceAction.CONDEMN,
    Advice.RESTART_BM: DeviceAction.CONDEMN,
    Advice.RESTART_VM: DeviceAction.DRAIN,
    Advice.WORKFLOW: DeviceAction.DRAIN,
    Advice.CHECK: DeviceAction.COUNT,
    Advice.SUPPORT: DeviceAction.COUNT,
    Advice.NONE: DeviceAction.COUNT,
}
"""What an advice comes to: nobody here resets a GPU or restarts a machine, so what needs that is left."""

_OTHERS = "the workers go on until it is reset: they leave between two steps"
_OWN = "a script's own error, as a rule: its worker ends of it, and is told from a device's where it is next"
_LINK = "a peer that fails is reported by all that it is linked to: what is needed follows as 154"

_UNUSED = (1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 26, 27, 28, 29, 30, 33, 34,
           35, 36, 42, 47, 49, 50, 51, 52, 53, 55, 56, 57, 58, 59, 61, 65, 73, 81, 87, 90, 91, 111, 112, 113,
           114, 115, 116, 117, 118, 122, 123, 124, 125, 138)  # fmt: skip
"""Numbers that no GPU since Ampere reports."""

_ENGINES = {
    "copy engine": (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
    "video decoder": (68, 83, 84, 88, 89, 96, 97, 98),
    "image decoder": (82, *range(99, 106)),
    "optical flow": (86, 139),
}
"""Errors of engines of which there are several: the application is restarted."""


def _row(what: str, advice: Advice, action: DeviceAction | None = None, why: str = "") -> Xid:
    return Xid(what, advice, _ACTIONS[advice] if action is None else action, why)


XIDS: Mapping[int, Xid] = dict(
    sorted(
        {
            **{number: _row("not used", Advice.SUPPORT) for number in _UNUSED},
            **{
                number: _row(f"{engine}: error", Advice.RESTART_APP)
                for engine, numbers in _ENGINES.items()
                for number in numbers
            },
            8: _row("the GPU has stopped processing", Advice.RESTART_APP),
            11: _row("invalid commands", Advice.RESTART_APP),
            13: _row(
                "graphics engine exception: out of bounds, illegal instruction",
                Advice.RESTART_APP,
                DeviceAction.NOTHING,
                _OWN,
            ),
            14: _row("injected by a program", Advice.IGNORE),
            25: _row("illegal commands", Advice.RESTART_APP),
            31: _row("memory page fault", Advice.RESTART_APP, DeviceAction.NOTHING, _OWN),
            32: _row("invalid commands, read over PCIe", Advice.RESTART_APP),
            37: _row("error of the driver's firmware", Advice.IGNORE),
            38: _row("watchdog of the driver's firmware", Advice.IGNORE),
            43: _row("an application's own fault has ended it", Advice.IGNORE),
            44: _row("graphics engine: fault in a context switch", Advice.IGNORE),
            45: _row(
                "clean-up after a process that has ended",
                Advice.WORKFLOW,
                DeviceAction.NOTHING,
                "SIGKILL leads to it; alone it says nothing of the device",
            ),
            46: _row("the GPU has stopped processing, and does not recover", Advice.RESET_GPU),
            48: _row("uncorrectable memory error (double bit)", Advice.WORKFLOW),
            54: _row("a power cable is not connected", Advice.CHECK),
            60: _row("security engine: error", Advice.RESTART_APP),
            62: _row("the power microcontroller has halted", Advice.RESET_GPU),
            63: _row("a memory row is to be remapped, or a page retired", Advice.IGNORE),
            64: _row(
                "remapping a row, or retiring a page, has failed",
                Advice.RESET_GPU,
                DeviceAction.DRAIN,
                _OTHERS,
            ),
            66: _row("illegal access by the driver", Advice.IGNORE),
            67: _row("illegal access by the driver", Advice.IGNORE),
            69: _row("graphics engine: class error", Advice.RESTART_APP),
            74: _row("NVLink error", Advice.WORKFLOW),
            78: _row("a virtual GPU does not start", Advice.CHECK),
            79: _row("the GPU has fallen off the bus", Advice.RESTART_BM),
            80: _row("corrupted data was sent to the GPU", Advice.RESTART_APP),
            92: _row(
                "many correctable memory errors",
                Advice.IGNORE,
                DeviceAction.COUNT,
                "uncorrectable ones may follow",
            ),
            93: _row("the InfoROM's wear limit is exceeded", Advice.IGNORE),
            94: _row("memory error, contained to one application", Advice.RESTART_APP),
            95: _row("memory error, not contained", Advice.RESET_GPU),
            106: _row("test message", Advice.IGNORE),
            107: _row("test message", Advice.IGNORE),
            108: _row("NVLink: remote translation error", Advice.IGNORE),
            109: _row(
                "a context switch takes too long",
                Advice.RESET_GPU,
                DeviceAction.ELSEWHERE,
                "others call it not critical: the device is left alone, its node is not",
            ),
            110: _row("security fault", Advice.RESET_GPU),
            119: _row("the system processor (GSP) does not answer", Advice.RESET_GPU),
            120: _row("error of the system processor (GSP)", Advice.RESET_GPU),
            121: _row("corrected errors of the link to the CPU", Advice.IGNORE),
            136: _row("link training has failed", Advice.RESET_GPU, DeviceAction.DRAIN, _OTHERS),
            137: _row("NVLink: illegal access to a peer", Advice.IGNORE),
            140: _row("uncorrectable memory error that could not be handled", Advice.RESET_GPU),
            141: _row("fast path error", Advice.IGNORE),
            142: _row("video encoder: error", Advice.SUPPORT),
            143: _row("initialization has failed", Advice.RESET_GPU),
            **{
                number: _row(f"NVLink 5: {unit}", Advice.WORKFLOW, DeviceAction.COUNT, _LINK)
                for number, unit in enumerate(("SAW", "RLW", "TLW", "TREX", "NVLPW", "NETIR", "MSE"), 144)
            },
            151: _row("key rotation error", Advice.RESTART_VM),
            152: _row("deep learning accelerator: memory error", Advice.IGNORE),
            153: _row("deep learning accelerator: time-out", Advice.IGNORE),
            154: _row(
                "the driver's own advice has changed",
                Advice.WORKFLOW,
                DeviceAction.COUNT,
                "the advice that it names is acted on: see below",
            ),
            155: _row(
                "NVLink: a link went down on purpose",
                Advice.RESET_GPU,
                DeviceAction.COUNT,
                "nothing is broken by it",
            ),
            156: _row("a resource is to be retired", Advice.RESET_GPU, DeviceAction.DRAIN, _OTHERS),
            157: _row(
                "retiring a resource has failed",
                Advice.IGNORE,
                DeviceAction.COUNT,
                "there is nothing left to repair it with",
            ),
            158: _row("fatal time-out", Advice.RESET_GPU),
            159: _row("CHI non-data error, of the link to the CPU", Advice.CHECK),
            160: _row("a memory channel is to be retired", Advice.RESTART_BM, DeviceAction.DRAIN, _OTHERS),
            161: _row(
                "retiring a memory channel has failed",
                Advice.IGNORE,
                DeviceAction.COUNT,
                "there is nothing left to repair it with",
            ),
            162: _row(
                "power smoothing is back", Advice.RESET_GPU, DeviceAction.COUNT, "nothing is broken by it"
            ),
            163: _row("power smoothing is off", Advice.NONE),
            164: _row("power smoothing will soon be worn out", Advice.NONE),
            165: _row("power smoothing is worn out", Advice.NONE),
            166: _row("NVLink: traffic before encryption was set up", Advice.NONE),
            167: _row(
                "PCIe: fatal time-out",
                Advice.NONE,
                DeviceAction.CONDEMN,
                "the GPU is not reached, as with 79",
            ),
            168: _row("less memory than there should be", Advice.NONE),
            169: _row("the security engine has halted", Advice.NONE),
            170: _row("NVLink: interrupt in confidential mode", Advice.NONE),
            171: _row("details of 48: DRAM", Advice.NONE, DeviceAction.NOTHING, "48 is acted on"),
            172: _row("details of 48: SRAM", Advice.NONE, DeviceAction.NOTHING, "48 is acted on"),
        }.items()
    )
)
"""All, by number."""

UNKNOWN = _row("not in this table", Advice.NONE)
"""A number that is newer than it."""
