"""The `ckpt` command's first lines: what must be quick or must come before any import."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line of this process and exit."""
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["-V"]):
        from ckpt_tool import __version__

        print(f"ckpt {__version__}")
        sys.exit(0)
    _open_closed_streams()
    from ckpt_tool.cli import run

    sys.exit(run(arguments))


def _open_closed_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr was closed: else the first file that we open takes its number, and
    what a library prints lands in a checkpoint."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is fd


def _forget_working_folder() -> None:
    """Under `python -m` the working folder is searched first for modules: a checkpoint's folder could hold a numpy.py."""
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


if __name__ == "__main__":
    _forget_working_folder()
    main()
