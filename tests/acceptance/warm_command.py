"""`ckpt` without its start-up time: a process that has imported the tool and forks for each command (run as a program).

One JSON array on stdin, `[stdout file, stderr file, argument...]`, is one command; one number on stdout is its exit
code. The fork happens in a process with a single thread and runs `ckpt_tool.cli.run` as `python -m ckpt_tool` does.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys

import numpy
import xxhash

import ckpt_tool.cli

READY = (numpy, xxhash)  # imported for their cost alone


def import_all() -> None:
    """Every module that moves bytes: what each command would else import anew after the fork."""
    for room in ("core", "storage", "formats", "plan", "run", "commands"):
        for module in pkgutil.iter_modules([f"{ckpt_tool.__path__[0]}/{room}"], f"ckpt_tool.{room}."):
            importlib.import_module(module.name)


def command(stdout: str, stderr: str, arguments: list[str]) -> int:
    """Run one command line in a child; its exit code (128 + signal when it was killed)."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status if status >= 0 else 128 - status
    code = 70
    try:
        for fd, path in ((1, stdout), (2, stderr)):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, fd)
            os.close(opened)
        code = ckpt_tool.cli.run(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    import_all()
    for line in sys.stdin:
        stdout, stderr, *arguments = json.loads(line)
        print(command(stdout, stderr, arguments), flush=True)
