"""Which kernels a run uses, decided once, with the reason in words.

    CKPT_KERNELS unset        the GPU where there is one and its kernels can be had, else NumPy
    CKPT_KERNELS=cuda         the GPU or an error
    CKPT_KERNELS=path:FILE    a library that was built elsewhere (`ckpt kernels build`)
    CKPT_KERNELS=host         the shim: the kernels' own sources on the CPU. For tests, slower than NumPy at everything
    CKPT_KERNELS=off          NumPy, whatever there is

A plan is the same on every rung and so are the bytes that come out. A run that has begun on one never goes on on
another: an error of the device ends it.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Literal, NamedTuple

from ckpt_tool.device import build, cache, driver
from ckpt_tool.device.library import Device, Library
from ckpt_tool.errors import StorageError, UsageError, near_misses

Level = Literal["numpy", "host", "cuda", "path"]
SETTINGS = ("off", "host", "cuda", "path:FILE")
CPU_HINT = "--device cpu (the default) does the same on the CPU; ckpt kernels info says what there is"


class DeviceChoice(NamedTuple):
    """What a run uses and why."""

    level: Level
    reason: str
    path: Path | None = None  # the library that was named
    # those of the GPUs (90 for compute capability 9.0); code and hint: of the error that `open_device` raises where the
    # level is numpy
    architectures: tuple[int, ...] = ()
    code: str = ""
    hint: str = CPU_HINT


def choose_device(setting: str | None = None) -> DeviceChoice:
    """The rung of the ladder, from `setting` or CKPT_KERNELS. Builds nothing. Raises UsageError E1553 for a setting
    that it does not know, StorageError E1550 for a library that is not there."""
    return _decide(os.environ.get("CKPT_KERNELS", "") if setting is None else setting)


@functools.cache
def _decide(setting: str) -> DeviceChoice:
    kind, colon, value = setting.partition(":")
    if kind == "path" and value:
        return _use_given_library(Path(value))
    if colon or kind not in ("", "off", "host", "cuda"):
        raise UsageError(
            f"CKPT_KERNELS={setting} is unknown: want {', '.join(SETTINGS)}",
            code="E1553",
            place="CKPT_KERNELS",
            hint=near_misses(kind, SETTINGS) or "leave it unset to use a GPU where there is one",
        )
    if kind == "off":
        return DeviceChoice("numpy", "CKPT_KERNELS=off forbids the device", code="E1553")
    if kind == "host":
        return DeviceChoice("host", "CKPT_KERNELS=host: the kernels run on the CPU, for tests")
    return _gpu(driver.probe())


def _use_given_library(path: Path) -> DeviceChoice:
    """The library at a given path. Since it is code, it must be a file that belongs to this user or to root, and that
    only its owner may write."""
    try:
        about = path.stat()
    except OSError as e:
        raise StorageError(
            f"CKPT_KERNELS names a library that can't be read: {e.strerror}",
            code="E1550",
            path=path,
            hint="ckpt kernels build --out FILE makes one",
        ) from e
    if not path.is_file() or about.st_mode & 0o022 or about.st_uid not in (0, os.geteuid()):
        raise StorageError(
            "CKPT_KERNELS names what is no file, may be written by others, or belongs to another user",
            code="E1550",
            path=path,
            hint="a library is code that will run: copy it to a folder of your own and take the write permission off",
        )
    return DeviceChoice("path", f"CKPT_KERNELS=path:{path}", path.absolute())


def _gpu(found: driver.Probe) -> DeviceChoice:
    """The GPUs, if their kernels are built or can be."""
    if not found.cards:
        return DeviceChoice("numpy", f"there is no GPU to use: {found.reason}", code="E1556")
    architectures = tuple(sorted({card.architecture for card in found.cards}))
    name = f"{found.cards[0].name}, driver for CUDA {driver.spell_version(found.driver)}"
    if build.find_nvcc() is None and build.found_for(architectures) is None:
        return DeviceChoice(
            "numpy",
            f"there is {name}, but no nvcc to build its kernels, and none are in {cache.folder()}",
            code="E1554",
            hint="install the CUDA toolkit, or build elsewhere (ckpt kernels build --out FILE) and set "
            "CKPT_KERNELS=path:FILE",
        )
    return DeviceChoice("cuda", name, architectures=architectures)


def open_device(number: int = 0) -> Device:
    """The device of this run, its kernels built where they are not yet. Raises UsageError E1553, E1554, E1556 to E1558
    where there is none, StorageError E1550, E1555, E1559 where its kernels can't be had."""
    choice = choose_device()
    if choice.level == "numpy":
        raise UsageError(choice.reason, code=choice.code, place="--device cuda", hint=choice.hint)
    return Device(library_of(choice), number)


def library_of(choice: DeviceChoice) -> Library:
    """The library of a choice, built where it is not yet. Raises as `open_device`."""
    return _load(choice.level, choice.path, choice.architectures)


@functools.cache
def _load(level: Level, path: Path | None, architectures: tuple[int, ...]) -> Library:
    if path is not None:
        return Library(path)
    if level == "host":
        done = build.ensure_built("host")
    else:  # for the GPUs at hand, or for those and others
        done = build.found_for(architectures) or build.ensure_built("cuda", architectures)
    return Library(done.path, done.through)
