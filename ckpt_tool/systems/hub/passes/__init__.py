"""Passes of a conversion that only sources of the hub need."""
