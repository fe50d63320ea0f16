"""Inner loops in C for the CPU, compiled on first use where there is a compiler; every one has a NumPy road with the
same bits."""

notes: list[str] = []  # why this process goes without them, for -v; here, so that nothing is loaded to ask
