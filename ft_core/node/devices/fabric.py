"""The NVLink domain that this machine's GPUs are in: on some machines a whole rack, which fails as one."""

from __future__ import annotations

import ctypes

LIBRARY = "libnvidia-ml.so.1"
_COMPLETED = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED: the GPU has found its place in the fabric."""


class _FabricInfo(ctypes.Structure):
    """NVML's nvmlGpuFabricInfo_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


_VERSION = ctypes.sizeof(_FabricInfo) | 2 << 24


def nvlink_domain(library: str = LIBRARY) -> str:
    """A name that machines have in common whose GPUs reach each other by NVLink; empty if there are no
    others, or nobody says. Asks NVML, which makes no CUDA context. May take as long as a sick driver does."""
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    try:
        return _first(nvml)
    except AttributeError:  # a driver that knows nothing of it
        return ""
    finally:
        nvml.nvmlShutdown()


def _first(nvml: ctypes.CDLL) -> str:
    """What the first GPU says that is in a fabric of several machines: those have an id, others zeros."""
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device, info = ctypes.c_void_p(), _FabricInfo(version=_VERSION)
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
            continue
        if nvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info)) != 0:
            continue
        if info.state == _COMPLETED and info.status == 0 and any(info.cluster):
            return f"nvlink-{bytes(info.cluster).hex()[:8]}-{info.clique}"
    return ""
