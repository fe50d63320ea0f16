"""Adapters in whatever files they are: their config, their pairs of matrices, what is stored next to them or inside a
model."""
