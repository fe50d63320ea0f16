"""What the CUDA driver reports of itself and its devices, without any toolkit.

The driver's own library (libcuda.so.1, installed with the driver) is called by ctypes; nothing is allocated on a
device.

    Probe(driver=13000, cards=(Card("NVIDIA H100 80GB HBM3", 90),), reason="")
    Probe(driver=0, cards=(), reason="no NVIDIA driver: libcuda.so.1 can't be loaded (...)")

Cost: milliseconds; some 100 ms for the first call where a device is. A process that has called it should not fork and
go on with CUDA in the child: the driver does not survive that.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

DRIVER = "libcuda.so.1"
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, cuda.h
_MAJOR = 75
_MINOR = 76
_NO_DEVICE = 100


class Card(NamedTuple):
    """A device as the driver names it."""

    name: str
    architecture: int  # 90 for compute capability 9.0


class Probe(NamedTuple):
    """driver: the newest CUDA that it can run, 13000 for 13.0, 0 without one. reason: why there are no cards."""

    driver: int
    cards: tuple[Card, ...]
    reason: str


def spell_version(version: int) -> str:
    """13020 -> 13.2"""
    return f"{version // 1000}.{version % 1000 // 10}"


def probe(name: str = DRIVER) -> Probe:
    """Ask the driver. Never raises: what is wrong is the reason."""
    try:
        driver = ctypes.CDLL(name)
        initialise = driver.cuInit
    except (OSError, AttributeError) as e:
        return Probe(0, (), f"no NVIDIA driver: {e}")

    version = ctypes.c_int(0)
    count = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    status = initialise(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status == _NO_DEVICE or (status == 0 and count.value == 0):
        return Probe(version.value, (), "the NVIDIA driver sees no GPU (CUDA_VISIBLE_DEVICES hides them, too)")
    if status != 0:
        return Probe(version.value, (), f"the NVIDIA driver can't start: {_error_name(driver, status)}")

    cards = []
    for number in range(count.value):
        device = ctypes.c_int(0)
        major = ctypes.c_int(0)
        minor = ctypes.c_int(0)
        text = ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceGetName(text, len(text), device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        cards.append(Card(text.value.decode(errors="replace"), major.value * 10 + minor.value))

    return Probe(version.value, tuple(cards), "")


def _error_name(driver: Any, status: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status}"
