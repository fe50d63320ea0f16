"""The C ABI of the kernels (kernels/ck.h) by ctypes: every call is checked."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tool.device.descriptors import DESC
from ckpt_tool.errors import StorageError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

ABI_VERSION = 1


class _Info(ctypes.Structure):
    _fields_ = [
        ("name", c_char * 128),
        ("uuid", c_char * 40),
        ("total_bytes", c_uint64),
        ("free_bytes", c_uint64),
        ("major", c_int32),
        ("minor", c_int32),
        ("multiprocessors", c_int32),
        ("l2_bytes", c_int32),
        ("driver", c_int32),
        ("runtime", c_int32),
        ("warp", c_int32),
        ("host", c_int32),
    ]


class DeviceInfo(NamedTuple):
    """What a device is."""

    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    # driver, runtime: 13000 is CUDA 13.0
    driver: int
    runtime: int
    host: bool  # the shim, which is no device


ADDRESS = c_void_p
STREAM = c_void_p
LISTED = (ADDRESS, c_uint32, c_uint64, c_int, c_int, STREAM)  # list, count, tiles, blocks, threads, stream

# Name -> argument types; all return a cudaError_t.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ck_devices": (POINTER(c_int),),
    "ck_info": (c_int, POINTER(_Info)),
    "ck_use": (c_int,),
    "ck_alloc": (POINTER(c_void_p), c_size_t),
    "ck_free": (ADDRESS,),
    "ck_host_alloc": (POINTER(c_void_p), c_size_t),
    "ck_host_free": (ADDRESS,),
    "ck_upload": (ADDRESS, ADDRESS, c_size_t, STREAM),
    "ck_download": (ADDRESS, ADDRESS, c_size_t, STREAM),
    "ck_move": (ADDRESS, ADDRESS, c_size_t, STREAM),
    "ck_fill": (ADDRESS, c_int, c_size_t, STREAM),
    "ck_stream_create": (POINTER(c_void_p),),
    "ck_stream_destroy": (STREAM,),
    "ck_stream_sync": (STREAM,),
    "ck_event_create": (POINTER(c_void_p),),
    "ck_event_destroy": (c_void_p,),
    "ck_event_record": (c_void_p, STREAM),
    "ck_event_elapsed": (POINTER(c_float), c_void_p, c_void_p),
    "ck_box_copy": LISTED,
    "ck_box_cast": (*LISTED[:3], c_uint32, c_uint32, ADDRESS, *LISTED[3:]),  # source, target, counts
    "ck_box_dequantise": (
        *LISTED[:3],
        c_uint32,
        c_uint32,
        ADDRESS,
        ADDRESS,
        *LISTED[3:],
    ),  # codes, target, scales, counts
    "ck_box_quantise": (
        *LISTED[:3],
        c_uint32,
        c_uint32,
        ADDRESS,
        ADDRESS,
        *LISTED[3:],
    ),  # source, scheme, table, counts
    "ck_box_transpose": LISTED,
    "ck_adamw_ema": (
        ADDRESS,
        c_uint64,
        c_uint64,
        c_uint32,
        c_uint64,
        c_uint64,
        c_uint64,
        c_uint64,
        c_uint64,
        c_uint32,
        c_int,
        c_int,
        STREAM,
    ),  # constants, count, gradient, its kind, master, exp_avg, exp_avg_sq, ema, parameter, its kind, blocks, threads
    "ck_ema_swap": (c_uint64, c_uint64, c_uint64, c_uint64, c_uint32, c_int, c_int, STREAM),
    "ck_compare": (ADDRESS, c_uint32, c_uint64, ADDRESS, c_int, c_int, STREAM),
    "ck_digest": (ADDRESS, c_uint32, c_uint64, c_int, c_int, c_int, STREAM),
}

# What the runtime says of a device that can't be used -> the code and the hint of our error.
UNUSABLE = {
    "cudaErrorNoDevice": ("E1556", "there is no GPU, or CUDA_VISIBLE_DEVICES hides it; --device cpu does without"),
    "cudaErrorInvalidDevice": ("E1556", "there is no GPU of that number; ckpt kernels info lists them"),
    "cudaErrorInsufficientDriver": (
        "E1557",
        "install or update the driver, or build with an older CUDA toolkit: ckpt kernels build",
    ),
    "cudaErrorSystemDriverMismatch": ("E1557", "the driver was updated while it was loaded: start the machine again"),
    "cudaErrorNoKernelImageForDevice": ("E1558", "build for this GPU: ckpt kernels build --force"),
    "cudaErrorUnsupportedPtxVersion": (
        "E1558",
        "the driver is older than the toolkit: build for this GPU, ckpt kernels build",
    ),
}


class Library:
    """One compiled library of the kernels.

    through: another name of the same file, under which it is loaded (`cache.Kept.through`). Raises StorageError E1550
    where the file can't be loaded or is of another version of the ABI.
    """

    def __init__(self, path: Path, through: Path | None = None) -> None:
        self.path = path
        try:
            self._dll = ctypes.CDLL(str(through or path))
            self._dll.ck_abi.restype = c_uint32
            abi = int(self._dll.ck_abi())
        except (OSError, AttributeError) as e:
            raise StorageError(
                f"the kernel library can't be loaded: {e}", code="E1550", path=path, hint="ckpt kernels build --force"
            ) from e
        if abi != DESC.itemsize << 8 | ABI_VERSION:
            raise StorageError(
                f"the kernel library has ABI {abi:#x}, want {DESC.itemsize << 8 | ABI_VERSION:#x}",
                code="E1550",
                path=path,
                hint="it was built from other sources: ckpt kernels build --force",
            )
        for name, types in FUNCTIONS.items():
            function = getattr(self._dll, name)
            function.argtypes = types
            function.restype = c_int
        for name in ("ck_error_name", "ck_error_text"):
            getattr(self._dll, name).argtypes, getattr(self._dll, name).restype = (c_int,), c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Call `ck_NAME`. Raises StorageError E1551 naming the call and the error; UsageError E1552 for out of memory,
        E1556 to E1558 where the device can't be used at all."""
        status = getattr(self._dll, f"ck_{name}")(*arguments)
        if status == 0:
            return
        error = self._dll.ck_error_name(status).decode()
        text = f"{name} failed on the device: {error}: {self._dll.ck_error_text(status).decode()}"
        if error == "cudaErrorMemoryAllocation":
            raise UsageError(
                text, code="E1552", hint="lower --memory, or leave --device out: the CPU needs no such memory"
            )
        if error in UNUSABLE:
            code, hint = UNUSABLE[error]
            raise UsageError(text, code=code, hint=hint)
        raise StorageError(text, code="E1551", hint="ckpt kernels check tests the device; --device cpu does without it")

    def devices(self) -> int:
        """The number of devices that the library can use."""
        count = c_int(0)
        self.call("devices", byref(count))
        return count.value

    def info(self, device: int = 0) -> DeviceInfo:
        """Name, memory and capability of a device."""
        raw = _Info()
        self.call("info", device, byref(raw))
        return DeviceInfo(
            raw.name.decode(),
            raw.uuid.decode(),
            raw.total_bytes,
            raw.free_bytes,
            (raw.major, raw.minor),
            raw.multiprocessors,
            raw.l2_bytes,
            raw.driver,
            raw.runtime,
            bool(raw.host),
        )


# ----------------------------------------------------------------------------------------------------
# Memory of a device and the streams that work on it. An address is a plain integer.


Bytes = npt.NDArray[np.uint8]


class Closed:
    """What a `with` block closes at its end."""

    def close(self) -> None:
        """Release the resource; called at the end of the `with` block."""
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
        self.device = device
        self.nbytes = nbytes
        address = c_void_p()
        device.library.call("alloc", byref(address), nbytes)
        self.address = address.value or 0

    def close(self) -> None:
        """Free the memory. A second call does nothing."""
        if self.address:
            self.device.library.call("free", self.address)
            self.address = 0


class Device:
    """One device through one library. stream: 0 is the default stream.

    >>> with device.upload(np.arange(6, dtype=np.uint8)) as memory:
    ...     device.download(memory.address, 6)
    """

    def __init__(self, library: Library, number: int = 0) -> None:
        self.library = library
        self.number = number
        library.call("use", number)
        self.info: DeviceInfo = library.info(number)

    def use(self) -> None:
        """Make it the device of the calling thread."""
        self.library.call("use", self.number)

    def alloc(self, nbytes: int) -> Memory:
        """New memory on the device; its content is undefined."""
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
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            self.library.call("download", data.ctypes.data, address, nbytes, stream)
        self.sync(stream)
        return data

    def fill(self, address: int, byte: int, nbytes: int, stream: int = 0) -> None:
        """Set `nbytes` bytes from `address` on to the value `byte`."""
        self.library.call("fill", address, byte, nbytes, stream)

    def sync(self, stream: int = 0) -> None:
        """Wait for the stream. Errors of the kernels that ran on it are raised here."""
        self.library.call("stream_sync", stream)

    def milliseconds(self, begin: c_void_p, end: c_void_p) -> float:
        """The time between two events on the device, in milliseconds."""
        elapsed = c_float(0.0)
        self.library.call("event_elapsed", byref(elapsed), begin, end)
        return elapsed.value
