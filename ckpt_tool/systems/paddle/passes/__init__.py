"""Passes of a conversion that only Paddle needs."""
