"""Orbax, the checkpoints of JAX: `format.py` is the specification."""
