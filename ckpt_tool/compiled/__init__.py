"""Inner loops in C for the CPU, built with the wheel (`build.py`) and shipped in it.

Each has an implementation in NumPy or Python with the same result, which is used where there is no library."""

import os

notes: list[str] = []  # why this process does without them, for -v; here, so that nothing is loaded to ask
VARIABLE = "CKPT_COMPILED"  # off: NumPy; avx512, avx2 or baseline: this path, from the first byte on, or an error


def is_forced() -> bool:
    """Does the user name a path? Then it is used however little there is to do."""
    return os.environ.get(VARIABLE, "") not in ("", "off")


def worth_a_look(size: int, least: int) -> bool:
    """Is work of that size worth loading a library for? Asked before anything is imported."""
    return size >= least or is_forced()
