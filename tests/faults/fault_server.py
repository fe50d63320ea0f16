"""Runs the command line in forked children, with a fault at the Nth file operation below one folder.

Started by `conftest.py` as a process of its own (fork needs one without threads). One JSON object a line on stdin:

    {"args": ["convert", ...], "under": "/tmp/x", "fault": {"at": 7, "do": "kill"}, "out": PATH, "err": PATH, "ops":
    PATH}

and one on stdout: {"status": 0..255 or -signal}. Operations are counted in one sequence over all threads; only those
on paths or descriptors below `under` count. What can be done at operation `at` (of kind `op`, or of any kind):

    kill        SIGKILL instead of the operation        tear     half of a write, then SIGKILL
    errno N     the operation fails                     short    a read or write of one byte; from then on too with `on`
    stop N      the signal N to the process, the operation goes on
    truncate, grow, rewrite, replace   someone else does that to the file, then the operation goes on
    fill PATH   someone else fills the disk with a file at PATH
    pause PATH  the operation waits until there is a file PATH; PATH.there appears when it begins to wait

With `on` the fault strikes at every operation from `at` on. `uid`: the child gives up root first.

`ops` gets one line an operation: kind, path; a `close_ro` is a close of what was open for reading alone. It wraps the
functions of `os` that the tool calls, and the one libc call that it makes; what happens below them is the kernel's.
With `looks` what only asks for names, sizes and links counts too; `entry` is what one entry of a scandir is asked.

A fault with `kernel` strikes at system calls instead, of whatever code: `system_calls.Supervisor` says what it holds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import shutil  # noqa: F401  before the wrapping: it looks up what `os` supports
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import system_calls

READS = ("pread", "preadv", "read")
WRITES = ("write", "pwrite")
LOOKS = ("stat", "lstat", "scandir", "listdir", "readlink", "access")
BY_PATH = ("open", "mkdir", "unlink", "rmdir", "chmod", "rename", "replace", "truncate")
BY_FD = (*READS, *WRITES, "fsync", "ftruncate", "posix_fallocate", "copy_file_range", "close")


class Fault:
    """The one fault of one run."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.under = os.path.realpath(job["under"])
        fault = job.get("fault") or {}
        self.at = fault.get("at", 0)
        self.op = fault.get("op")
        self.do = fault.get("do")
        self.on = fault.get("on", False)
        self.number = fault.get("number", 0)
        self.path = fault.get("path", "")
        self.file = fault.get("file", "")
        self.done = False
        self.reads = fault.get("reads", False)
        self.looks = fault.get("looks", False)
        self.count = 0
        self.lock = threading.Lock()
        self.ops = open(job["ops"], "w", buffering=1) if job.get("ops") else None

    def due(self, op: str, path: str | None) -> bool:
        """Count the operation; is it the one?"""
        if path is None or not (path + "/").startswith(self.under + "/") or (op in READS and not self.reads):
            return False
        if op in (*LOOKS, "entry") and not self.looks:
            return False
        if self.op is not None and op not in self.op.split(","):
            return False
        if self.path and self.path not in path:
            return False
        with self.lock:
            self.count += 1
            if self.ops is not None:
                self.ops.write(f"{op} {os.path.relpath(path, self.under)}\n")
            return self.count == self.at or (self.on and self.at and self.count > self.at)

    def strike(self, op: str, path: str) -> None:
        if self.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.do == "errno":
            raise OSError(self.number, os.strerror(self.number), path)
        elif self.do == "stop":
            os.kill(os.getpid(), self.number)
        elif self.do in ("truncate", "grow", "rewrite", "replace"):
            disturb(path, self.do)
        elif self.do == "fill":
            fill_disk(self.file)
        elif self.do == "pause":
            open_file(self.file + ".there", "w").close()
            while not exists(self.file):
                time.sleep(0.01)


# as they are before the wrapping
open_file = open
exists = os.path.exists
rename_file = os.rename


def disturb(path: str, how: str) -> None:
    """What another process does to a source. The bytes differ, the size only for two of the four."""
    with open_file(path, "rb") as f:
        data = f.read()
    if how == "replace":
        with open_file(path + ".new", "wb") as f:
            f.write(data)
        rename_file(path + ".new", path)
        return
    changed = {"truncate": data[: len(data) // 2], "grow": data + b"more", "rewrite": data[:-1] + bytes([data[-1] ^ 1])}
    with open_file(path, "r+b") as f:
        f.write(changed[how])
        f.truncate()


def fill_disk(path: str) -> None:
    with contextlib.suppress(OSError), open_file(path, "wb", buffering=0) as f:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    f.write(bytes(size))


def wrap(fault: Fault) -> None:
    """Put the fault between the tool and `os`."""
    real_readlink = os.readlink

    def path_of(fd: Any) -> str | None:
        try:
            return real_readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return None

    def read_only(fd: int) -> bool:
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY

    def by_path(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            where = os.fsdecode(path) if not isinstance(path, int) else path_of(path)
            folder = kwargs.get("dir_fd")
            if where is not None:
                base = path_of(folder) if isinstance(folder, int) else os.getcwd()
                where = os.path.normpath(os.path.join(base or "/", where))
            if fault.due(name, where):
                fault.strike(name, where or "")
            return real(path, *args, **kwargs)

        return call

    class Entry:
        """An entry of a scandir: each question to it is an operation, though it need not be a system call."""

        def __init__(self, entry: os.DirEntry[str], folder: str | None) -> None:
            self._entry = entry
            self.name = entry.name
            self.path = entry.path
            self._where = os.path.join(folder or "", os.fsdecode(entry.name))

        def __fspath__(self) -> str:
            return self.path

        def _asked(self, what: str, *args: Any, **kwargs: Any) -> Any:
            if fault.due("entry", self._where):
                fault.strike("entry", self._where)
            return getattr(self._entry, what)(*args, **kwargs)

        def is_dir(self, **kwargs: Any) -> Any:
            return self._asked("is_dir", **kwargs)

        def is_file(self, **kwargs: Any) -> Any:
            return self._asked("is_file", **kwargs)

        def stat(self, **kwargs: Any) -> Any:
            return self._asked("stat", **kwargs)

        def is_symlink(self) -> Any:
            return self._entry.is_symlink()

        def inode(self) -> Any:
            return self._entry.inode()

    class Entries:
        """What scandir gives."""

        def __init__(self, entries: Any, folder: str | None) -> None:
            self._entries = entries
            self._folder = folder

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self._entries.close()

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return Entry(next(self._entries), self._folder)

        def close(self) -> None:
            self._entries.close()

    real_scandir = os.scandir

    def scandir(path: Any = ".") -> Any:
        where = path_of(path) if isinstance(path, int) else os.path.abspath(os.fsdecode(path))
        if fault.due("scandir", where):
            fault.strike("scandir", where or "")
        return Entries(real_scandir(path), where)

    def by_fd(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: Any, *args: Any, **kwargs: Any) -> Any:
            where = path_of(args[0] if name == "copy_file_range" else fd)
            kind = "close_ro" if name == "close" and where is not None and read_only(fd) else name
            if not fault.due(kind, where):
                return real(fd, *args, **kwargs)
            if fault.do == "errno" and name == "close":
                real(fd)  # a failing close has closed the descriptor
            fault.strike(name, where or "")
            if fault.do in ("tear", "short"):
                return shortened(name, real, fd, args, tear=fault.do == "tear")
            return real(fd, *args, **kwargs)

        return call

    def shortened(name: str, real: Callable[..., Any], fd: int, args: Any, *, tear: bool) -> Any:
        if name in ("write", "pwrite"):
            half = len(args[0]) // 2 if tear else min(1, len(args[0]))
            result = real(fd, bytes(args[0][:half]), *args[1:])
        elif name in ("read", "pread"):
            result = real(fd, min(1, args[0]), *args[1:])
        elif name == "preadv":
            result = real(fd, [memoryview(args[0][0])[:1]], *args[1:])
        elif name == "copy_file_range":
            result = real(fd, args[0], min(1, args[1]), *args[2:])
        else:
            result = real(fd, *args)
        if tear:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    for name in BY_PATH:
        setattr(os, name, by_path(name, getattr(os, name)))
    if fault.looks:
        for name in LOOKS:
            setattr(os, name, by_path(name, getattr(os, name)))
        os.scandir = scandir
    for name in BY_FD:
        setattr(os, name, by_fd(name, getattr(os, name)))
    from ckpt_tool.storage import platform_calls

    def struck(real: Any) -> Any:
        def renameat2(old: Any, new: Any, *more: Any) -> Any:
            if fault.due("renameat2", os.path.abspath(new)):
                fault.strike("renameat2", os.fspath(new))
            return real(old, new, *more)

        return renameat2

    platform_calls.rename_new = struck(platform_calls.rename_new)
    platform_calls.exchange = struck(platform_calls.exchange)


def child(job: dict[str, Any], to_supervisor: socket.socket) -> int:
    """The forked process: one run of the command line."""
    from ckpt_tool import cli

    for number, path in ((1, job["out"]), (2, job["err"])):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout = io.TextIOWrapper(open(1, "wb", buffering=0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(open(2, "wb", buffering=0, closefd=False), write_through=True)
    if is_kernel_fault(job):
        listener = system_calls.install()
        socket.send_fds(to_supervisor, [b"x"], [listener])
        os.close(listener)
        return cli.run(job["args"])
    fault = Fault(job)
    if job.get("uid"):
        os.setgroups([])
        os.setgid(job["uid"])
        os.setuid(job["uid"])
    for name, limit in (job.get("limits") or {}).items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    wrap(fault)
    return cli.run(job["args"])


def is_kernel_fault(job: dict[str, Any]) -> bool:
    return bool((job.get("fault") or {}).get("kernel"))


def supervise(job: dict[str, Any], process: int, from_child: socket.socket) -> None:
    """Answer the system calls of a child until it ends."""
    _, listeners, _, _ = socket.recv_fds(from_child, 1, 1)
    if listeners:
        supervisor = system_calls.Supervisor(process, listeners[0], job["under"], job["fault"], job["ops"])
        supervisor.serve()


def preload() -> None:
    """Import what a run imports, once, before the forks. The harness alone imports torch: each fork would be slower."""
    import typer

    import ckpt_tool

    found = list(pkgutil.walk_packages(ckpt_tool.__path__, "ckpt_tool."))
    # a run that has given its rights away may be unable to read the environment that it would still import from
    found += pkgutil.walk_packages(typer.__path__, "typer.")
    for module in found:
        if not module.name.endswith("__main__") and not module.name.startswith("ckpt_tool.harness"):
            with contextlib.suppress(
                Exception
            ):  # an extra that is not installed; what is broken fails where it is used
                importlib.import_module(module.name)


def main() -> None:
    preload()
    dependents = importlib.import_module("ckpt_tool.deltas.dependents")
    dependents.MOST_ABOVE = 0  # what is above a scene is that of other tests
    gc.freeze()  # a child that collects would copy the pages of everything that was imported
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                ours.close()
                status = child(job, theirs)
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        theirs.close()
        if is_kernel_fault(job):
            supervise(job, pid, ours)
        ours.close()
        while True:
            try:
                _, status = os.waitpid(pid, 0)
                break
            except OSError as e:
                if e.errno != errno.EINTR:
                    raise
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
