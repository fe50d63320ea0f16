"""python run_probe.py LIBRARY: sums numbers by the kernel of probe.cu, exit 1 where NumPy says otherwise."""

from __future__ import annotations

import ctypes
import sys

import numpy as np


def main(path: str) -> int:
    dll = ctypes.CDLL(path)
    values = np.arange(1000, dtype=np.uint64)
    for threads in (32, 96, 128):
        sums = np.zeros((2, 3), np.uint64)
        dll.ck_probe(
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_void_p(sums.ctypes.data),
            ctypes.c_uint64(len(values)),
            ctypes.c_int(3),
            ctypes.c_int(threads),
            ctypes.c_void_p(0),
        )
        blocks = np.arange(1000) // threads % 3
        want = [[int((values >> shift)[blocks == block].sum()) for block in range(3)] for shift in range(2)]
        if sums.tolist() != want:
            print(f"sums are {sums}, want {want}")
            return 1
    print("sums equal")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
