"""The only floor that moves bytes: the executor, digests, casts, lazy reading."""
