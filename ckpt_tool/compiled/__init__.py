"""Inner loops in C for the CPU, compiled on first use where there is a compiler; every one has a road of NumPy or
Python with the same result."""

import os

notes: list[str] = []  # why this process goes without them, for -v; here, so that nothing is loaded to ask
VARIABLE = "CKPT_COMPILED"  # off: never; on: at the first call, waited for


def worth_a_look(size: int, least: int) -> bool:
    """Is work of that size worth loading a library for? Asked before anything is imported."""
    return size >= least or os.environ.get(VARIABLE) == "on"
