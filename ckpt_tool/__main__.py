"""The `ckpt` command's first lines: what must be quick or must come before any import."""

from __future__ import annotations

import gc
import os
import sys

INTERRUPTED = 130  # what a shell reports for a process that Ctrl-C ended
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> None:
    """Run the command line of this process and exit."""
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["-V"]):
        from ckpt_tool import __version__

        print(f"ckpt {__version__}")
        sys.exit(0)
    _open_closed_streams()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy would start one a core, which spin; nothing needs them
    gc.set_threshold(1_000_000, 20, 50)  # parsing makes many small lasting objects; looking through them is pure cost
    try:
        from ckpt_tool.cli import run

        code = run(arguments)
    except KeyboardInterrupt:  # before `run` listens for it: nothing has been read or written
        os._exit(INTERRUPTED)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit, whatever has become of the streams and of workers in the middle of a large write."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (
            OSError,
            ValueError,
        ):  # a closed pipe, a full disk: reported already, and the last flush must not report it again
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
    gc.freeze()  # the interpreter would look for cycles in all that is left, three times: 20 ms
    if code in (INTERRUPTED, 143):
        os._exit(code)  # a thread that still writes would hold the exit up; the staged output is made for this
    sys.exit(code)


def _open_closed_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr was closed: else the first file that we open takes its number, and
    what a library prints lands in a checkpoint."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is fd


def _forget_working_folder() -> None:
    """Under `python -m` the working folder is searched first for modules: a checkpoint's folder could hold a
    numpy.py."""
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


if __name__ == "__main__":
    _forget_working_folder()
    main()
