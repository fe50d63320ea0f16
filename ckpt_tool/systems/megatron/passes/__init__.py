"""Passes of a conversion that only Megatron needs."""
