"""A library that speaks NVML's protocol to the unchanged `nvidia-ml-py`, and says what a file has.

The file, FAKE_NVML in the environment, has lines `NAME VALUE`, which are read at each call; a process has
one of its own, if there is one: FAKE_NVML.PID. Names, with the number of a GPU: `uncorrected`, `pending`,
`failed`, `retiring`, `advice`, `lost`, `old` (it knows no such) and `xid` (how many have come, each of the
number in `xid_number`); `gpus`: how many there are. Who was asked for memory errors leaves
FAKE_NVML.PID.asked.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_cc = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler, to build a library like NVML's"
)
NAME = "libnvidia-ml.so.1"

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
enum { OK = 0, NOT_SUPPORTED = 3, TIMEOUT = 10, LOST = 15, NO_DRIVER = 9 };
typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } Pci;
typedef struct { unsigned field, scope; long long time, latency; int type, result;
                 union { double d; unsigned u; unsigned long long l; } value; } Field;
typedef struct { void *device; unsigned long long type, data; unsigned gpu, compute; } Event;
static long long taken[64];

static long long state(const char *name, long long gpu) {
    char wanted[64], found[64];
    long long value, answer = 0;
    char own[4096];
    snprintf(own, sizeof own, "%s.%d", getenv("FAKE_NVML"), getpid());
    FILE *file = fopen(own, "r");
    if (!file) file = fopen(getenv("FAKE_NVML"), "r");
    if (!file) return 0;
    if (gpu < 0) snprintf(wanted, sizeof wanted, "%s", name);
    else snprintf(wanted, sizeof wanted, "%s%lld", name, gpu);
    while (fscanf(file, "%63s %lld", found, &value) == 2)
        if (!strcmp(found, wanted)) answer = value;
    fclose(file);
    return answer;
}
static long long gpu_of(void *device) { return (long long)device - 1; }
static int ready(void *device) {
    if (state("lost", gpu_of(device))) return LOST;
    return state("old", gpu_of(device)) ? NOT_SUPPORTED : OK;
}
int nvmlInitWithFlags(unsigned flags) { return state("gpus", -1) ? OK : NO_DRIVER; }
const char *nvmlErrorString(int result) { return "an error of the tests' library"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = state("gpus", -1); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long long)(index + 1);
    return OK;
}
int nvmlDeviceGetPciInfo_v3(void *device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%llXB:00.0", gpu_of(device) + 1);
    return OK;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *for_corrected, unsigned *for_others, unsigned *pending,
                              unsigned *failed) {
    *for_corrected = *for_others = 0;
    *pending = state("pending", gpu_of(device));
    *failed = state("failed", gpu_of(device));
    return ready(device);
}
int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *count) {
    if (type != 1 || counter != 0) return 2;
    char asked[4096];
    *count = state("uncorrected", gpu_of(device));
    snprintf(asked, sizeof asked, "%s.%d.asked", getenv("FAKE_NVML"), getpid());
    FILE *file = fopen(asked, "w");
    if (file) fclose(file);
    return ready(device);
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *device, int *pending) {
    *pending = state("retiring", gpu_of(device));
    return ready(device);
}
int nvmlDeviceGetFieldValues(void *device, int count, Field *fields) {
    for (int at = 0; at < count; at++) {
        fields[at].value.u = state("advice", gpu_of(device));
        fields[at].result = state("old", gpu_of(device)) ? NOT_SUPPORTED : OK;
    }
    return state("lost", gpu_of(device)) ? LOST : OK;
}
int nvmlEventSetCreate(void **events) { *events = (void *)1; return OK; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *events) { return OK; }
int nvmlEventSetWait_v2(void *events, Event *event, unsigned timeout) {
    for (long long gpu = 0; gpu < state("gpus", -1); gpu++)
        if (taken[gpu] < state("xid", gpu)) {
            taken[gpu]++;
            memset(event, 0, sizeof *event);
            event->device = (void *)(gpu + 1);
            event->type = 8;
            event->data = state("xid_number", gpu);
            return OK;
        }
    return TIMEOUT;
}
"""


def build(directory: Path) -> Path:
    """The library, in this directory, which LD_LIBRARY_PATH is to name."""
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / "nvml.c"
    source.write_text(_SOURCE)
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", directory / NAME, source]
    subprocess.run(command, check=True, timeout=60)
    return directory


def say(state: Path, **values: int) -> None:
    """From now on the library says this."""
    written = state.with_name(f"{state.name}.new")
    written.write_text("".join(f"{name} {value}\n" for name, value in values.items()))
    written.replace(state)
