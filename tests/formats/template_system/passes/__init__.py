"""Passes of a conversion that only the made-up system needs."""
