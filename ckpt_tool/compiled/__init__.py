"""Inner loops in C for the CPU, compiled on first use where there is a compiler; every one has a road of NumPy or
Python with the same result."""

notes: list[str] = []  # why this process goes without them, for -v; here, so that nothing is loaded to ask
VARIABLE = "CKPT_COMPILED"  # off: never; on: at the first call, waited for
