"""Passes of a conversion that only GGUF needs."""
