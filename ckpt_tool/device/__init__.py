"""The reshard kernels at work: a plan's copies on a GPU, or, for tests, on the CPU by the same sources.

What a kernel reads, made of copies
    descriptors.py casts.py quantising.py digests.py comparisons.py
          a packed list for each kernel; which kernel moves which copy; boxes that meet are refused

Kernels
    build.py cache.py      nvcc (or g++ for the host shim), kept by a hash of all that decides the result, privately
    driver.py choose.py    what GPUs there are; which library a run uses, and why
    library.py             the C ABI by ctypes, every call checked; device memory and streams
    kernels.py adamw.py    one function a kernel

Verbs on a device
    station.py loading.py  pinned memory, and what one thread needs; files to the device and back
    checks.py              hashes, differences and values that are not finite, of lines on the device
    walk.py                what a run writes
    verify.py compare.py   what `ckpt verify` and `ckpt diff` ask of values
    resharding.py          shards that are on the device already

Looked at
    trial/                 ckpt kernels check, ckpt kernels bench

The tool never needs them: a reshard on disk is bound by the disk. They pay where values are on the device already.
"""
