"""What NVML says of this node's GPUs, through `nvidia-ml-py`. Makes no CUDA context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ft_core.node.devices.xids import ADVICE
from ft_core.node.notices.notice import plain
from ft_core.protocol.messages import DeviceFinding, Symptom

T = TypeVar("T")
_AT_ONCE = 64
"""XIDs, at most, that are taken in one look: others wait."""


class Reading(NamedTuple):
    """What one GPU says of its state; None where it does not."""

    uncorrected: int | None = None
    """Memory errors since its driver was loaded."""
    remapping: int | None = None
    """Whether rows are to be remapped by its next reset."""
    retiring: int | None = None
    """Whether pages are to be retired by the next restart of its driver (GPUs before Ampere)."""
    remap_failed: int | None = None
    advice: int | None = None
    """What its driver says is to be done, by the number of `Symptom.ADVICE`."""
    lost: int | None = None
    """Whether the driver does not reach it."""

    def after(self, before: Reading) -> Reading:
        """With what it does not say as it was."""
        return Reading(*(old if new is None else new for old, new in zip(before, self, strict=True)))


def news(before: Reading, now: Reading) -> list[tuple[Symptom, int, str]]:
    """What is to be told: symptom, number, in words.

    What grows, or waits for a convenient moment, is told when it changes while this job looks: others have
    lived with what was there before.
    """
    found: list[tuple[Symptom, int, str]] = []
    if before.uncorrected is not None and (now.uncorrected or 0) > before.uncorrected:
        found.append((Symptom.UNCORRECTED, 0, f"{before.uncorrected} before, {now.uncorrected} now"))
    if before.remapping == 0 and now.remapping:
        found.append((Symptom.REMAPPING, 0, ""))
    if before.retiring == 0 and now.retiring:
        found.append((Symptom.RETIRING, 0, ""))
    if now.remap_failed and not before.remap_failed:
        found.append((Symptom.REMAP_FAILED, 0, ""))
    if now.advice and now.advice != before.advice:
        found.append((Symptom.ADVICE, now.advice, ""))
    if now.lost and not before.lost:
        found.append((Symptom.LOST, 0, ""))
    return found


class _Gpu(NamedTuple):
    handle: Any
    device: int
    bus: str


class Nvml:
    """The library, once it is open. Each call may take as long as a sick driver does."""

    def __init__(self, library: Any, gpus: list[_Gpu]) -> None:
        """Use `opened` to make one."""
        self._nvml, self._gpus = library, gpus
        self._before: dict[str, Reading] = {}
        self._events: Any = None
        """Which has the XIDs that nobody has taken yet; None where they cannot be had."""

    def subscribe(self) -> None:
        """Keep XIDs from now on."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for gpu in self._gpus:
                nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return  # the kernel's log has them, too
        self._events = events

    def look(self) -> list[DeviceFinding]:
        """What is new since the last look."""
        found = self._xids()
        for gpu in self._gpus:
            before = self._before.get(gpu.bus, Reading())
            now = self._before[gpu.bus] = self._read(gpu.handle).after(before)
            about = news(before, now)
            found += [DeviceFinding(what, number, gpu.device, gpu.bus, text) for what, number, text in about]
        return found

    def _xids(self) -> list[DeviceFinding]:
        nvml, found = self._nvml, list[DeviceFinding]()
        for _ in range(_AT_ONCE if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                bus = _plain(nvml.nvmlDeviceGetPciInfo(event.device).busId)
            except nvml.NVMLError:  # no more of them, as a rule
                break
            if event.eventType == nvml.nvmlEventTypeXidCriticalError and event.eventData != ADVICE:
                where = next((gpu for gpu in self._gpus if gpu.bus == bus), _Gpu(None, -1, bus))
                found.append(DeviceFinding(Symptom.XID, event.eventData, where.device, bus, "said by NVML"))
        return found

    def _read(self, handle: Any) -> Reading:
        nvml = self._nvml
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        try:
            rows = self._ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
            return Reading(
                uncorrected=self._ask(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since)),
                remapping=rows and rows[2],
                remap_failed=rows and rows[3],
                retiring=self._ask(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)),
                advice=self._ask(lambda: self._advice(handle)),
                lost=0,
            )
        except nvml.NVMLError:
            return Reading(lost=1)

    def _advice(self, handle: Any) -> int | None:
        wanted = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if wanted is None:  # an older nvidia-ml-py
            return None
        [field] = self._nvml.nvmlDeviceGetFieldValues(handle, [wanted])
        return int(field.value.uiVal) if field.nvmlReturn == self._nvml.NVML_SUCCESS else None

    def _ask(self, call: Callable[[], T]) -> T | None:
        """None for what this GPU does not have, or its driver does not know, or not now."""
        try:
            return call()
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None


def opened(places: Mapping[str, int] | None) -> Nvml | None:
    """None on a machine without NVML, or where `nvidia-ml-py` is not installed. `places`: this node's GPUs,
    as `gpus.by_bus` has them; None: that is not known."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return None
    found = []
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            bus = _plain(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        except pynvml.NVMLError:
            continue  # no worker can use it either
        if places is None or bus in places:
            found.append(_Gpu(handle, -1 if places is None else places[bus], bus))
    nvml = Nvml(pynvml, found)
    nvml.subscribe()
    return nvml


def _plain(bus: str | bytes) -> str:
    """A place on the bus as the kernel's log has it: NVML says `00000000:3B:00.0`."""
    text = bus.decode(errors="replace") if isinstance(bus, bytes) else bus
    domain, _, rest = plain(text).lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"
