"""What `ckpt kernels check` and `ckpt kernels bench` run: every kernel against NumPy on random cases, and its speed."""
