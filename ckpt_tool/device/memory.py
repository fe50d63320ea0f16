"""Memory of a device and the streams that work on it. An address is a plain integer."""

from __future__ import annotations

from ctypes import byref, c_float, c_void_p
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ckpt_tool.device.library import DeviceInfo, Library

Bytes = npt.NDArray[np.uint8]


class Closed:
    """What a `with` block closes at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Memory(Closed):
    """`nbytes` of device memory at `address`; freed by `close` or at the end of a `with`."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        out = c_void_p()
        device.library.call("alloc", byref(out), nbytes)
        self.address = out.value or 0

    def close(self) -> None:
        if self.address:
            self.device.library.call("free", self.address)
            self.address = 0


class Device:
    """One device through one library. stream: 0 is the default stream.

    >>> with device.upload(np.arange(6, dtype=np.uint8)) as memory:
    ...     device.download(memory.address, 6)
    """

    def __init__(self, library: Library, number: int = 0) -> None:
        self.library, self.number = library, number
        library.call("use", number)
        self.info: DeviceInfo = library.info(number)

    def use(self) -> None:
        """Make it the device of the calling thread."""
        self.library.call("use", self.number)

    def alloc(self, nbytes: int) -> Memory:
        return Memory(self, nbytes)

    def upload(self, values: npt.NDArray[np.generic] | npt.NDArray[np.void], stream: int = 0) -> Memory:
        """A copy of a contiguous array on the device. Waits until the array may change again."""
        memory = Memory(self, values.nbytes)
        self.write(memory.address, values, stream)
        return memory

    def write(self, address: int, values: npt.NDArray[np.generic] | npt.NDArray[np.void], stream: int = 0) -> None:
        """Copy a contiguous array to `address` and wait."""
        if values.nbytes:
            self.library.call("upload", address, values.ctypes.data, values.nbytes, stream)
            self.sync(stream)

    def download(self, address: int, nbytes: int, stream: int = 0) -> Bytes:
        """`nbytes` of the device as a new array, once all work of the stream is done."""
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            self.library.call("download", out.ctypes.data, address, nbytes, stream)
        self.sync(stream)
        return out

    def fill(self, address: int, byte: int, nbytes: int, stream: int = 0) -> None:
        self.library.call("fill", address, byte, nbytes, stream)

    def sync(self, stream: int = 0) -> None:
        """Wait for the stream. Errors of the kernels that ran on it are raised here."""
        self.library.call("stream_sync", stream)

    def milliseconds(self, begin: c_void_p, end: c_void_p) -> float:
        out = c_float(0.0)
        self.library.call("event_elapsed", byref(out), begin, end)
        return out.value
