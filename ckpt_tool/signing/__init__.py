"""Signatures and attestations: what says who wrote an output and out of what, and checks it."""
