"""Quantised tensors as the floats that they stand for, made while they are read: one file a kind."""
