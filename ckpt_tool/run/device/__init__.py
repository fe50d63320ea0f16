"""The reshard kernels at work: a plan's copies on a GPU, or, for tests, on the CPU by the same sources.

    descriptors.py   copies -> the packed list that every kernel reads
    reference.py     the same list carried out by NumPy: what the kernels are held against, and what runs without a GPU
    build.py         nvcc (or g++ for the host shim), cached by a hash of all that decides the result
    library.py       the C ABI by ctypes, every call checked
    memory.py        device memory, streams, and the pool of pinned host memory
    kernels.py       one function a kernel
    choose.py        which of these a run uses, and why

The tool never needs them: a reshard on disk is bound by the disk. They pay where values already lie on the device.
"""
