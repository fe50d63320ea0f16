"""Quantised weights: what headers and configs say of them, how they travel, and `--dequantize`."""
