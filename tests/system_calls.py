"""Faults at the system calls of a process, by the kernel: seccomp hands each call that touches files to a supervisor.

The child installs a filter (`install`) and gives its listener away; the process that forked it answers every call
(`Supervisor.serve`): go on, or fail with an errno that the child's libc then sees as the kernel's own, or SIGKILL in
place of the call. So what is struck is what the kernel is asked, by whatever code: `os`, `open`, ctypes, threads.

Calls on paths or descriptors below one folder are counted, from 1. A close that fails has closed: the descriptor leads
to /dev/null then, which releases the file and its lock as Linux does. Linux on x86-64 alone; see `why_not`.

Cost: some 40 us a call. Calls that need no file (mmap of memory, futex) are not in the filter and cost nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import struct
import sys
from typing import Any, NamedTuple

CWD = -100
O_ACCMODE = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
CHANGING_FLAGS = os.O_CREAT | os.O_TRUNC


class Call(NamedTuple):
    """What a system call is asked about. places: a letter and the number of an argument each: `f` a descriptor, `p` a
    path, `a` a folder's descriptor, whose path is the next argument."""

    name: str
    places: str
    changes: bool = False  # what is on the disk, by itself


# The numbers of x86-64.
CALLS = {
    0: Call("read", "f0"),
    1: Call("write", "f0", True),
    2: Call("open", "p0"),
    3: Call("close", "f0"),
    4: Call("stat", "p0"),
    5: Call("fstat", "f0"),
    6: Call("lstat", "p0"),
    8: Call("lseek", "f0"),
    17: Call("pread64", "f0"),
    18: Call("pwrite64", "f0", True),
    19: Call("readv", "f0"),
    20: Call("writev", "f0", True),
    21: Call("access", "p0"),
    40: Call("sendfile", "f0 f1", True),
    72: Call("fcntl", "f0"),
    73: Call("flock", "f0"),
    74: Call("fsync", "f0"),
    75: Call("fdatasync", "f0"),
    76: Call("truncate", "p0", True),
    77: Call("ftruncate", "f0", True),
    82: Call("rename", "p0 p1", True),
    83: Call("mkdir", "p0", True),
    84: Call("rmdir", "p0", True),
    85: Call("creat", "p0", True),
    86: Call("link", "p0 p1", True),
    87: Call("unlink", "p0", True),
    88: Call("symlink", "p1", True),
    89: Call("readlink", "p0"),
    90: Call("chmod", "p0", True),
    91: Call("fchmod", "f0", True),
    132: Call("utime", "p0", True),
    137: Call("statfs", "p0"),
    138: Call("fstatfs", "f0"),
    188: Call("setxattr", "p0", True),
    189: Call("lsetxattr", "p0", True),
    190: Call("fsetxattr", "f0", True),
    191: Call("getxattr", "p0"),
    192: Call("lgetxattr", "p0"),
    193: Call("fgetxattr", "f0"),
    194: Call("listxattr", "p0"),
    195: Call("llistxattr", "p0"),
    196: Call("flistxattr", "f0"),
    197: Call("removexattr", "p0", True),
    198: Call("lremovexattr", "p0", True),
    199: Call("fremovexattr", "f0", True),
    217: Call("getdents64", "f0"),
    221: Call("fadvise64", "f0"),
    235: Call("utimes", "p0", True),
    257: Call("openat", "a0"),
    258: Call("mkdirat", "a0", True),
    260: Call("fchownat", "a0", True),
    262: Call("newfstatat", "a0"),
    263: Call("unlinkat", "a0", True),
    264: Call("renameat", "a0 a2", True),
    265: Call("linkat", "a0 a2", True),
    266: Call("symlinkat", "a1", True),
    267: Call("readlinkat", "a0"),
    268: Call("fchmodat", "a0", True),
    269: Call("faccessat", "a0"),
    277: Call("sync_file_range", "f0"),
    280: Call("utimensat", "a0", True),
    285: Call("fallocate", "f0", True),
    295: Call("preadv", "f0"),
    296: Call("pwritev", "f0", True),
    306: Call("syncfs", "f0"),
    316: Call("renameat2", "a0 a2", True),
    326: Call("copy_file_range", "f0 f2", True),
    327: Call("preadv2", "f0"),
    328: Call("pwritev2", "f0", True),
    332: Call("statx", "a0"),
    437: Call("openat2", "a0"),
    439: Call("faccessat2", "a0"),
    452: Call("fchmodat2", "a0", True),
}
OPENING = {"open": 1, "openat": 2, "openat2": 2}  # which argument has the flags; openat2's begins with them
LOCKS = (fcntl.F_SETLK, fcntl.F_SETLKW, 37, 38)  # what fcntl does to a file; 37 and 38 are locks of open descriptions

# <linux/seccomp.h>, <linux/audit.h>, <linux/filter.h>
_SECCOMP = 317
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
_NEW_LISTENER = 8
_NOTIFY = 0x7FC00000
_ALLOW = 0x7FFF0000
_ARCH = 0xC000003E
_LOAD = 0x20
_EQUALS = 0x15
_RETURN = 0x06
_NOTIF = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_ADD_FD = struct.Struct("=QIIII")
_RECEIVE = 3 << 30 | _NOTIF.size << 16 | ord("!") << 8
_SEND = 3 << 30 | _ANSWER.size << 16 | ord("!") << 8 | 1
_ADD = 1 << 30 | _ADD_FD.size << 16 | ord("!") << 8 | 3
_SET_FLAGS = 1 << 30 | 8 << 16 | ord("!") << 8 | 4
_GO_ON = 1
_SET_FD = 1
_SYNC_WAKE_UP = 1


def why_not() -> str:
    """Why faults can't be injected here; "" where they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"system calls are numbered for Linux on x86-64 alone, not {platform.machine()}"
    try:
        with open("/proc/sys/kernel/seccomp/actions_avail") as f:
            available = f.read().split()
    except OSError as e:
        return f"this kernel does not say what its seccomp can do: {e}"
    return "" if "user_notif" in available else "this kernel's seccomp can't ask another process"


def install() -> int:
    """Filter this process and its threads from now on. Returns the listener, which another process must serve."""
    numbers = sorted(CALLS)
    program = [(_LOAD, 0, 0, 4), (_EQUALS, 1, 0, _ARCH), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    for place, number in enumerate(numbers):
        to_the_end = len(numbers) - place
        program.append((_EQUALS, to_the_end, 0, number))
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOTIFY)]
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    code_buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(code_buffer))
    head_buffer = ctypes.create_string_buffer(head, len(head))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    address = ctypes.c_void_p(ctypes.addressof(head_buffer))
    listener = int(libc.syscall(_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, address))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return listener


class Supervisor:
    """Answers the calls of one filtered process.

    Args:
        process: its id.
        listener: what `install` returned there.
        fault: `at`: which call is struck, 0 for none; `do`: errno or kill; `number`: the errno; `on`: every later
            call too; `calls`: names of those that count, all if it is absent; `path`: a part of the paths that count.
        ops: the file that gets a line for each counted call: name, `!` where it changes the disk, path.
    """

    def __init__(self, process: int, listener: int, under: str, fault: dict[str, Any], ops: str) -> None:
        self._process = process
        self._listener = listener
        self._under = os.path.realpath(under) + "/"
        self._at: int = fault.get("at", 0)
        self._do: str | None = fault.get("do")
        self._number: int = fault.get("number", 0)
        self._on: bool = fault.get("on", False)
        self._only: list[str] | None = fault.get("calls")
        self._part: str = fault.get("path", "")
        self._lines: list[str] = []
        self._ops = ops
        self._is_over = False
        self._nowhere = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # Linux 6.6: the two take turns on one core, which a busy machine needs
            fcntl.ioctl(listener, _SET_FLAGS, _SYNC_WAKE_UP)

    def serve(self) -> None:
        """Until the process has ended."""
        ended = os.pidfd_open(self._process)
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(ended, select.POLLIN)
        try:
            while True:
                events = dict(poll.poll())
                if events.get(self._listener, 0) & select.POLLIN:
                    self._answer()
                elif events:
                    break
        finally:
            for fd in (ended, self._listener, self._nowhere):
                os.close(fd)
            with open(self._ops, "w", errors="surrogateescape") as f:
                f.write("".join(f"{line}\n" for line in self._lines))

    def _answer(self) -> None:
        buffer = bytearray(_NOTIF.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, buffer)
        except OSError as e:
            if e.errno in (errno.ENOENT, errno.EINTR):  # the caller was killed meanwhile
                return
            raise
        identity, thread, _, number, _, _, *args = _NOTIF.unpack(buffer)
        try:
            error = self._judge(identity, thread, CALLS[number], args)
            answer = _ANSWER.pack(identity, 0, -error, 0 if error else _GO_ON)
            fcntl.ioctl(self._listener, _SEND, bytearray(answer))
        except (OSError, ProcessLookupError) as e:
            if e.errno not in (errno.ENOENT, errno.ESRCH, errno.EIO, errno.EINPROGRESS):
                raise

    def _judge(self, identity: int, thread: int, call: Call, args: list[int]) -> int:
        """The errno of a call, 0 where it goes on. What comes after the one fault is not counted, which takes time."""
        if self._is_over:
            return 0
        if call.name == "fcntl" and args[1] not in LOCKS:
            return 0
        if self._only is not None and call.name not in self._only:
            return 0
        below = [place for place in self._places(thread, call, args) if self._is_below(place)]
        if not below:
            return 0
        changes = call.changes or self._creates(thread, call, args)
        shown = os.path.relpath(below[0], self._under).encode("unicode_escape").decode()
        self._lines.append(f"{call.name}{'!' if changes else ''} {shown}")
        count = len(self._lines)
        struck = count == self._at or (self._on and 0 < self._at < count)
        if not struck:
            return 0
        self._is_over = not self._on
        if self._do == "kill":
            os.kill(self._process, signal.SIGKILL)
            return errno.EINTR
        if self._do == "errno" and call.name == "close":
            request = _ADD_FD.pack(identity, _SET_FD, self._nowhere, args[0] & 0xFFFFFFFF, 0)
            fcntl.ioctl(self._listener, _ADD, bytearray(request))
        return self._number if self._do == "errno" else 0

    def _is_below(self, place: str) -> bool:
        return f"{place}/".startswith(self._under) and self._part in place

    def _places(self, thread: int, call: Call, args: list[int]) -> list[str]:
        """The paths that a call is about."""
        found = []
        for kind, digit in call.places.split(" ") if " " in call.places else [call.places]:
            at = int(digit)
            if kind == "f":
                found.append(self._open_path(thread, args[at]))
            elif kind == "p":
                found.append(self._join(thread, CWD, self._text(thread, args[at])))
            else:
                found.append(self._join(thread, args[at], self._text(thread, args[at + 1])))
        return found

    def _open_path(self, thread: int, fd: int) -> str:
        number = ctypes.c_int(fd & 0xFFFFFFFF).value
        link = f"/proc/{thread}/cwd" if number == CWD else f"/proc/{thread}/fd/{number}"
        try:
            return os.readlink(link).removesuffix(" (deleted)")
        except OSError:
            return ""

    def _join(self, thread: int, folder: int, path: str) -> str:
        if path.startswith("/"):
            return os.path.normpath(path)
        return os.path.normpath(os.path.join(self._open_path(thread, folder), path))

    def _text(self, thread: int, address: int) -> str:
        """The string at an address of the process; "" at none, as a call by descriptor has."""
        text = b""
        while address:
            piece = self._memory(thread, address, 4096 - address % 4096)
            end = piece.find(b"\0")
            text += piece if end < 0 else piece[:end]
            if end >= 0 or not piece or len(text) > 4096:
                break
            address += len(piece)
        return os.fsdecode(text)

    def _memory(self, thread: int, address: int, size: int) -> bytes:
        fd = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, size, address)
        finally:
            os.close(fd)

    def _creates(self, thread: int, call: Call, args: list[int]) -> bool:
        if call.name not in OPENING:
            return False
        flags = args[OPENING[call.name]]
        if call.name == "openat2":
            flags = int.from_bytes(self._memory(thread, flags, 8), "little")
        return bool(flags & CHANGING_FLAGS)
